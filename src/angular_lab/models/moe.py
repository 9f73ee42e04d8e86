"""moe: a mixture of experts in the style of DeepSeek-V3 (arXiv 2412.19437).

Sigmoid router, shared expert, balancing by a bias instead of an auxiliary loss; no latent
attention. No token is dropped: tokens are sorted by expert, and experts have no capacity limit.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from angular_lab.config.spec import ModelSpec
from angular_lab.errors import UserError
from angular_lab.models.base import LanguageModel
from angular_lab.models.layers import Attention, Block, SwiGLU, mlp_width


class _Permute(torch.autograd.Function):
    """Return x[order] for a permutation.

    The backward pass is a gather too. torch's own adds rows in a nondeterministic order, and
    slowly, because it cannot know that no row occurs twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None


def looped_product(x: Tensor, W: Tensor, counts: Tensor) -> Tensor:
    """Return x_e W_e^T for every expert e; x holds counts[0] rows for the first, and so on."""
    parts = zip(x.split(counts.tolist()), W.unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in parts])


def grouped_product(x: Tensor, W: Tensor, counts: Tensor) -> Tensor:
    """Compute the same in one kernel, in bfloat16."""
    ends = counts.cumsum(0).to(torch.int32)
    return torch._grouped_mm(x.bfloat16(), W.bfloat16().mT, offs=ends)


def can_group(x: Tensor, W: Tensor) -> bool:
    """True if the kernel is available and computes in the dtype that the loop would use."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
    aligned = W.shape[-1] % 8 == 0 and W.shape[-2] % 8 == 0  # 16 bytes, as the kernel requires
    return (
        device == "cuda" and dtype == torch.bfloat16 and aligned and hasattr(torch, "_grouped_mm")
    )


class Experts(nn.Module):
    """SwiGLU experts as stacks: gate_up (E, 2f, d) and down (E, d, f)."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts to rows sorted by expert, counts[e] of them for expert e."""
        product = grouped_product if can_group(x, self.gate_up) else looped_product
        gate, up = product(x, self.gate_up, counts).chunk(2, dim=-1)
        return product(F.silu(gate) * up, self.down, counts)


class Mixture(nn.Module):
    """Return the sum over the chosen experts of weight x expert(x), plus the shared expert.

    s = sigmoid(router x). The experts with the largest s + bias are chosen; their weights are s
    divided by the sum of the chosen s. The bias is not a parameter: it has no gradient and is
    updated by `balance`.
    """

    expert_bias: Tensor
    load: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.chosen, self.balance_rate = spec.experts_per_token, spec.balance_rate
        self.router = nn.Linear(spec.width, spec.experts, bias=False)
        self.experts = Experts(spec.experts, spec.width, spec.expert_mlp)
        self.shared = SwiGLU(spec.width, spec.shared_mlp) if spec.shared_mlp else None
        self.register_buffer("expert_bias", torch.zeros(spec.experts))
        # Zero after each balance(), so that checkpoints do not need it.
        load = torch.zeros(spec.experts, dtype=torch.int64)
        self.register_buffer("load", load, persistent=False)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (tokens, width) to weights and experts, both (tokens, experts per token)."""
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 would produce many ties
            logits = self.router(x.float())
        experts = (logits.sigmoid() + self.expert_bias).topk(self.chosen, dim=-1).indices
        # s divided by its sum, computed from log s: no 0/0 if all scores of a token are tiny.
        return F.logsigmoid(logits).gather(-1, experts).softmax(-1), experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, experts = self.route(tokens)
        owners = experts.flatten()
        counts = torch.zeros_like(self.load).scatter_add(0, owners, torch.ones_like(owners))
        if self.training:
            self.load.add_(counts)
        order = owners.argsort(stable=True)
        inverse = order.argsort()
        copies = tokens.repeat_interleave(self.chosen, dim=0)
        y = self.experts(_Permute.apply(copies, order, inverse), counts)
        y = _Permute.apply(y, inverse, order).unflatten(0, (-1, self.chosen))
        out = (weights.unsqueeze(-1) * y).sum(1).to(y.dtype)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x)

    @torch.no_grad()
    def balance(self) -> None:
        """Raise the bias where the load is below the mean, lower it above (arXiv 2408.15664)."""
        load = self.load.float()
        self.expert_bias.add_((load.mean() - load).sign(), alpha=self.balance_rate)
        self.load.zero_()


class MoE(LanguageModel):
    """`dense_layers` blocks with a plain SwiGLU, then blocks with a mixture; GQA, no biases.

    1.1B-A370M: 14 layers (1 dense), width 1024, 16 heads / 4 kv heads, 32 experts of 704, 6 per
    token, shared 1408, dense 5632, vocabulary 50,280, untied: 1.11B parameters, 382M for a token.

    Balancing: each forward pass in training mode adds to `loads()`. Once per optimizer step, the
    trainer sums each load over the ranks (dist.all_reduce) and calls `balance()`.
    """

    recordable = False  # `looped_product` reads the experts' counts on the host

    def __init__(self, spec: ModelSpec) -> None:
        _check(spec)
        super().__init__(spec, (_block(spec, index) for index in range(spec.layers)))

    def mixtures(self) -> list[Mixture]:
        return [module for module in self.modules() if isinstance(module, Mixture)]

    def stacks(self) -> list[str]:
        return ["*.experts.gate_up", "*.experts.down"]

    def matrix_parameters(self) -> int:
        return super().matrix_parameters() + self._expert_parameters(self.spec.experts_per_token)

    def active_parameters(self) -> int:
        """Return the number of parameters without experts that a token does not visit."""
        idle = self.spec.experts - self.spec.experts_per_token
        return sum(p.numel() for p in self.parameters()) - self._expert_parameters(idle)

    def _expert_parameters(self, count: int) -> int:
        """Return the number of parameters of `count` experts in every mixture."""
        total = sum(p.numel() for m in self.mixtures() for p in m.experts.parameters())
        return total // self.spec.experts * count

    def loads(self) -> list[Tensor]:
        return [mixture.load for mixture in self.mixtures()]

    def balance(self) -> None:
        for mixture in self.mixtures():
            mixture.balance()


def _block(spec: ModelSpec, index: int) -> Block:
    dense = index < spec.dense_layers
    mlp = SwiGLU(spec.width, mlp_width(spec)) if dense else Mixture(spec)
    return Block(spec, Attention(spec), mlp)


def _check(spec: ModelSpec) -> None:
    if not 0 < spec.experts_per_token <= spec.experts:
        raise UserError(
            f"experts_per_token={spec.experts_per_token} with experts={spec.experts}: it must be "
            "at least 1 and at most the number of experts"
        )
    if spec.expert_mlp < 1:
        raise UserError(f"expert_mlp={spec.expert_mlp}: set the experts' inner width")
    if not 0 <= spec.dense_layers < spec.layers:
        raise UserError(
            f"dense_layers={spec.dense_layers} with layers={spec.layers}: at least one layer must "
            "be a mixture; use kind='dense' for a model without experts"
        )
