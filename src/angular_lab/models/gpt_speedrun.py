"""gpt_speedrun: the fixed architecture of modded-nanogpt's optimization track.

The track's rules fix the architecture, as in github.com/KellerJordan/modded-nanogpt,
records/track_3_optimization/train_gpt_simple.py (commit 04447b4): a norm after the embedding,
biases on all linear layers including the head, QK-norm, score scale 0.12, half of a head's
dimensions without rotation, x / sqrt(1 + (x/15)^2) as the soft cap (not tanh).
The track's values for the spec: 12 layers, width 768, 6 heads, vocabulary 50,304, sequence 1024,
tied=False, soft_cap=15, rope_base=1024, init_std=0.0207 (sqrt(0.33 / 768)).

Differences that do not change which functions the model can represent: q, k and v are one fused
weight; heads rotate in the opposite direction (the halves of q and k are exchanged); norm_eps is
the spec's instead of the dtype's; under autocast, the embedding and the residual stream are
float32 instead of bfloat16.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from angular_lab.config.spec import ModelSpec
from angular_lab.errors import UserError
from angular_lab.models.base import Cut, LanguageModel, is_residual_output
from angular_lab.models.layers import Attention, Block, head_size

SCORE_SCALE = 0.12  # of q k^T; the track's value
EMBEDDING_STD = 1.0  # the track's; a norm follows, so it only affects how fast it learns
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
            raise UserError("tied=True: gpt_speedrun starts with a zero head; set tied=False")
        if head_size(spec) % 4:
            raise UserError(
                f"width={spec.width} with heads={spec.heads}: the head size must be a multiple of "
                "4, because half of its pairs are rotated"
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
        """Return 1 to 1/base in geometric steps for one half of the pairs, 0 for the other."""
        rotated = head_size(self.spec) // 4
        exponents = torch.linspace(0, 1, rotated, dtype=torch.float32, device=device)
        frequencies = 1.0 / self.spec.rope_base**exponents
        return torch.cat((frequencies, torch.zeros_like(frequencies)))

    def blocks(self, heads: bool = False) -> dict[str, Cut]:
        return {pattern: cut for pattern, cut in super().blocks(heads).items() if "qkv" in pattern}

    def initial_std(self, name: str) -> float:
        """Return 0 for outputs to the residual stream and for the head."""
        if is_residual_output(name) or name == "lm_head.weight":
            return 0.0
        return EMBEDDING_STD if name == "embedding.weight" else self.spec.init_std
