"""gpt_speedrun: the fixed architecture of modded-nanogpt's optimization track.

Facts read in github.com/KellerJordan/modded-nanogpt, records/track_3_optimization/
train_gpt_simple.py (commit 04447b4). Its rules forbid another architecture, so they are kept:
a norm after the embedding, biases on all linear layers and on the head, QK-norm, score scale 0.12,
half of a head's dimensions not turned, x / sqrt(1 + (x/15)^2) as the soft-cap (not a tanh).
The track's values for the spec: 12 layers, width 768, 6 heads, vocabulary 50,304, sequence 1024,
tied=False, soft_cap=15, rope_base=1024, init_std=0.0207 (sqrt(0.33 / 768)).

Differences that change no function that the model can learn: q, k, v are one fused weight; heads
turn the other way (the halves of q and k change places); norm_eps is the spec's, not the dtype's;
under autocast the embedding and the residual stream are float32, in the track bfloat16.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from angular_lab.config.spec import ModelSpec
from angular_lab.models.base import Cut, LanguageModel, is_residual_output
from angular_lab.models.layers import Attention, Block, head_size

SCORE_SCALE = 0.12  # of q k^T; the track's value
EMBEDDING_STD = 1.0  # the track's; a norm follows, so it only sets how fast the embedding learns
EXPANSION = 4  # inner width of the MLP over the width, as in GPT-2


class SquaredReLU(nn.Module):
    """down(relu(up x)^2) with biases (arXiv 2109.08668)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class GPTSpeedrun(LanguageModel):
    def __init__(self, spec: ModelSpec) -> None:
        if spec.tied:
            raise ValueError("tied=True: gpt_speedrun starts with a head of zeros, set tied=False")
        if head_size(spec) % 4:
            raise ValueError(
                f"width={spec.width} with heads={spec.heads}: the size of a head must be a "
                "multiple of 4, because half of its pairs are turned"
            )
        inner = EXPANSION * spec.width if spec.mlp is None else spec.mlp
        layers = (
            Block(
                spec,
                Attention(spec, qkv_bias=True, out_bias=True, qk_norm=True, scale=SCORE_SCALE),
                SquaredReLU(spec.width, inner),
            )
            for _ in range(spec.layers)
        )
        super().__init__(spec, layers, head_bias=True)
        self.embedding_norm = nn.RMSNorm(spec.width, eps=spec.norm_eps)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding_norm(self.embedding(tokens))

    def frequencies(self, device: torch.device) -> Tensor:
        """From 1 to 1/base in geometric steps for one half of the pairs, 0 for the other."""
        turned = head_size(self.spec) // 4
        exponents = torch.linspace(0, 1, turned, dtype=torch.float32, device=device)
        frequencies = 1.0 / self.spec.rope_base**exponents
        return torch.cat((frequencies, torch.zeros_like(frequencies)))

    def blocks(self) -> dict[str, Cut]:
        return {pattern: cut for pattern, cut in super().blocks().items() if "qkv" in pattern}

    def initial_std(self, name: str) -> float:
        """Zero for what ends in the residual stream or in the logits."""
        if is_residual_output(name) or name == "lm_head.weight":
            return 0.0
        return EMBEDDING_STD if name == "embedding.weight" else self.spec.init_std
