"""Layers shared by all models: rotary positions, attention, the gated MLP, the block.

All layers work on (batch, time, width) and take their sizes from the ModelSpec. Differences between
the kinds of models are arguments here, never a second implementation.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from angular_lab.config.spec import ModelSpec
from angular_lab.errors import UserError
from angular_lab.models.tensor_parallel import is_divided, local_rows, sum_gradients

Rotation = tuple[Tensor, Tensor]  # cosines and sines, each (time, head size / 2), float32


def rotary_frequencies(size: int, base: float, device: torch.device) -> Tensor:
    """Return base^(-2i/size) for i < size/2, as in Llama and Qwen2 (arXiv 2104.09864)."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    return 1.0 / base**exponents


def rotation_of(length: int, frequencies: Tensor) -> Rotation:
    """Return the tables for positions 0 .. length - 1."""
    positions = torch.arange(length, dtype=torch.float32, device=frequencies.device)
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate (..., time, heads, size): the halves of a head are real and imaginary parts."""
    cos, sin = (table.unsqueeze(-2) for table in rotation)
    real, imaginary = x.chunk(2, dim=-1)
    rotated = (real * cos - imaginary * sin, imaginary * cos + real * sin)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def head_size(spec: ModelSpec) -> int:
    if spec.width % spec.heads or (spec.width // spec.heads) % 2:
        raise UserError(
            f"width={spec.width} with heads={spec.heads}: the heads must divide the width, with an "
            "even head size (rotary positions rotate pairs)"
        )
    return spec.width // spec.heads


def kv_heads(spec: ModelSpec) -> int:
    count = spec.heads if spec.kv_heads is None else spec.kv_heads
    if spec.heads % count:
        raise UserError(f"kv_heads={count} must divide heads={spec.heads}")
    return count


def mlp_width(spec: ModelSpec) -> int:
    """Return spec.mlp, or 8/3 of the width rounded up to a multiple of 256."""
    return -(-8 * spec.width // (3 * 256)) * 256 if spec.mlp is None else spec.mlp


def row_products(fused: nn.Linear, x: Tensor, rows: list[int]) -> list[Tensor]:
    """Return the products of x with the row blocks of a fused weight.

    Splitting the result of one product instead would concatenate the parts' gradients in the
    backward pass, a copy that shows in a profile of the 124M model (measured in
    docs/evidence/what-did-not-help.md).
    """
    weight: Tensor = fused.weight
    if is_divided(weight):
        x, weights = sum_gradients(x, weight), local_rows(weight, rows)
    else:
        weights = weight.split(rows)
    biases = [None] * len(rows) if fused.bias is None else fused.bias.split(rows)
    return [F.linear(x, W, b) for W, b in zip(weights, biases, strict=True)]


class Attention(nn.Module):
    """Causal attention with fused q, k, v rows (in this order) and grouped k, v heads.

    Args:
        qkv_bias, out_bias: True adds biases to these projections.
        qk_norm: True normalizes q and k to RMS 1 per head, without a weight, before the rotation.
        scale: factor of the scores; None is 1/sqrt(head size).
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.size = head_size(spec)
        self.eps = spec.norm_eps if qk_norm else None
        self.scale = scale
        self.rows = qkv_rows(spec)
        self.qkv = nn.Linear(spec.width, sum(self.rows), bias=qkv_bias)
        self.out = nn.Linear(spec.width, spec.width, bias=out_bias)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        # (batch, time, heads, size) as long as possible: the products write this layout and read
        # gradients in it, so that nothing is copied.
        parts = row_products(self.qkv, x, self.rows)
        q, k, v = (part.unflatten(-1, (-1, self.size)) for part in parts)
        if self.eps is not None:
            q, k = (F.rms_norm(part, (self.size,), eps=self.eps) for part in (q, k))
        q, k = (rotate(part, rotation).to(v.dtype) for part in (q, k))
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return self.out(y.transpose(1, 2).flatten(-2))


def qkv_rows(spec: ModelSpec) -> list[int]:
    """Return the numbers of rows of q, k and v in the fused weight."""
    shared = kv_heads(spec) * head_size(spec)
    return [spec.width, shared, shared]


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), gate above up in one weight (arXiv 2002.05202)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.rows = [inner, inner]
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = row_products(self.gate_up, x, self.rows)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, spec: ModelSpec, attn: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(spec.width, eps=spec.norm_eps)
        self.attn = attn
        self.mlp_norm = nn.RMSNorm(spec.width, eps=spec.norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))
