"""The base class of all models: an embedding, blocks, a norm, a head.

A model does not know about optimizers: `blocks` and `stacks` describe the layout of its weights.
"""

from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from angular_lab.config.spec import ModelSpec
from angular_lab.errors import UserError
from angular_lab.models.cross_entropy import cross_entropy
from angular_lab.models.layers import (
    Block,
    Rotation,
    head_size,
    qkv_rows,
    rotary_frequencies,
    rotation_of,
)

Cut = int | list[int]


class LanguageModel(nn.Module):
    """Map tokens (batch, time) to logits, or with targets to the mean cross-entropy.

    The constructor only allocates, also on the meta device; `init_weights` sets the values.
    """

    cos: Tensor
    sin: Tensor
    recordable = True  # True if a CUDA graph can record passes: none reads a value on the host

    def __init__(
        self, spec: ModelSpec, layers: Iterable[Block], *, head_bias: bool = False
    ) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocabulary, spec.width)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(spec.width, eps=spec.norm_eps)
        self.lm_head = nn.Linear(spec.width, spec.vocabulary, bias=head_bias)
        # A table, not an expression: a compiler would recompute its powers and cosines in every
        # layer (78 ms instead of 65 for a pass of the 124M model on an H200, train_throughput.py).
        tables = self._rotation(self.embedding.weight.device)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)
        # DDP reads this attribute. Without it, DDP would broadcast all buffers from rank 0 before
        # each pass: needless for the tables, and it would overwrite the other ranks' expert loads.
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers()]
        self._tie()

    def _tie(self) -> None:
        if self.spec.tied:
            self.lm_head.weight = self.embedding.weight

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle per position of each pair of a head's dimensions."""
        return rotary_frequencies(head_size(self.spec), self.spec.rope_base, device)

    def _rotation(self, device: torch.device) -> Rotation:
        return rotation_of(self.spec.sequence, self.frequencies(device))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        if length > self.spec.sequence:
            raise UserError(
                f"a sequence of {length} tokens is too long: model.sequence={self.spec.sequence}"
            )
        x = self.embed(tokens)
        rotation = (self.cos[:length], self.sin[:length])
        for layer in self.layers:
            x = layer(x, rotation)
        logits = self.lm_head(self.norm(x))
        if self.spec.soft_cap is not None:
            # Recomputed in the backward pass, so that no float32 intermediates are stored.
            logits = checkpoint(
                soft_cap, logits, self.spec.soft_cap, use_reentrant=False, preserve_rng_state=False
            )
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    def blocks(self, heads: bool = False) -> dict[str, Cut]:
        """Return the row blocks of fused weights, a number or sizes, by name pattern.

        Args:
            heads: cut queries and keys by heads as well.
        """
        rows = qkv_rows(self.spec)
        if heads:
            size, (queries, keys, values) = head_size(self.spec), rows
            rows = [size] * ((queries + keys) // size) + [values]
        return {"*.qkv.weight": 3 if len(set(rows)) == 1 else rows, "*.gate_up*": 2}

    def stacks(self) -> list[str]:
        """Return the name patterns of (E, m, n) stacks of matrices."""
        return []

    def flops_per_token(self) -> float:
        """Return the floating-point operations of training per token, forward and backward.

        6 x the parameters in a token's matrix products: 2 for the forward product, 4 for the two
        backward ones. The head counts (tied or not); the embedding lookup, norms and biases do not;
        of the experts, only those that a token visits. Plus the products of attention, q k^T and
        p v: 12 x layers x width x sequence x 0.5, where causality gives the factor 0.5.
        """
        spec = self.spec
        attention = 12 * spec.layers * spec.width * spec.sequence * 0.5
        return 6.0 * self.matrix_parameters() + attention

    def matrix_parameters(self) -> int:
        """Return the number of parameters in the matrix products of one token."""
        return sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))

    def loads(self) -> list[Tensor]:
        """Return the tokens per expert since the last `balance`, one vector per mixture layer.

        With several ranks, the caller sums each vector over the ranks before `balance`.
        """
        return []

    def balance(self) -> None:
        """Balance the experts of a mixture; to be called once per optimizer step."""

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize matrices with N(0, initial_std), norms with 1, biases and buffers with 0.

        Values are drawn on the CPU from a separate generator, so that they depend neither on the
        device nor on torch's global state. The rotation tables are computed there too, because a
        GPU rounds cosines differently. Call this before sharding.
        """
        self._tie()  # to_empty, which moves a model off the meta device, unties the weights
        generator = torch.Generator(device="cpu").manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 1:
                p.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                values = torch.empty(p.shape, dtype=torch.float32, device="cpu")
                p.copy_(values.normal_(0.0, self.initial_std(name), generator=generator))
        for buffer in self.buffers():
            buffer.zero_()
        rotation = self._rotation(torch.device("cpu"))
        for table, values in zip((self.cos, self.sin), rotation, strict=True):
            table.copy_(values)

    def initial_std(self, name: str) -> float:
        """Return init_std, scaled down for the two outputs per layer to the residual stream."""
        std = self.spec.init_std
        return std / sqrt(2 * self.spec.layers) if is_residual_output(name) else std


def is_residual_output(name: str) -> bool:
    return not {"out", "down"}.isdisjoint(name.split("."))


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return x / sqrt(1 + (x/cap)^2) in float32: close to x for small logits, never above cap.

    This is the form of modded-nanogpt's optimization track, records/track_3_optimization.
    """
    x = logits.float()
    return x * torch.rsqrt(1.0 + (x / cap).square())
