"""What a fused layer's rows are used for, measured in the forward pass of the module that owns it.

A cut is right if its blocks are the rows of one use each. The uses come from derivatives of the
module's outputs with respect to the layer's outputs, so they do not depend on how a module is
written.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[Tensor], Any]  # run the model on token numbers (batch, length)
TOLERANCE = 1e-9  # relative, in float64


def block_of_rows(values: dict[str, Any], rows: int) -> list[int]:
    """Return the number of each row's block, by the definition of blocks and interleaved."""
    blocks, units = values.get("blocks", 1), values.get("interleaved", 1)
    sizes = [rows // blocks] * blocks if isinstance(blocks, int) else blocks
    assert sum(sizes) == rows
    unit = [j for j, size in enumerate(sizes) for _ in range(size // units)]
    assert len(unit) * units == rows
    return unit * units


def attention_uses(owner: nn.Module, layer: nn.Module, forward: Forward) -> list[str]:
    """Return "query", "key" or "value" for each output of a layer inside an attention module.

    With one position, softmax is 1: the output depends on values alone. With two, the second
    position's output depends on the first position's key and value, not on its query.
    """
    alone = _gradient(owner, layer, forward, positions=1)
    across = _gradient(owner, layer, forward, positions=2)
    uses = zip(alone, across, strict=True)
    return ["value" if a else "key" if b else "query" for a, b in uses]


def _gradient(owner: nn.Module, layer: nn.Module, forward: Forward, positions: int) -> list[bool]:
    """Return which of the layer's outputs at the first position reach the last one's output."""
    fused, out = _outputs(owner, layer, lambda: forward(torch.arange(5, 5 + positions)[None]))
    weights = torch.linspace(1, 2, out[0, -1].numel(), dtype=out.dtype)
    (gradient,) = torch.autograd.grad((out[0, -1] * weights).sum(), fused)
    return _nonzero(gradient.flatten(0, -2)[0])


def is_local(owner: nn.Module, layer: nn.Module, forward: Forward) -> list[bool]:
    """True for each of the layer's outputs that no later position reads."""
    return [not reached for reached in _gradient(owner, layer, forward, positions=2)]


def is_silent(
    owner: nn.Module, layer: nn.Module, forward: Forward, zero: Sequence[bool]
) -> list[bool]:
    """True for each of the layer's outputs that has no effect if those marked in `zero` are 0."""
    kept = ~torch.tensor(zero)
    hook = layer.register_forward_hook(lambda *a: a[-1] * kept)
    fused, out = _outputs(owner, layer, lambda: forward(torch.arange(5, 8)[None]))
    hook.remove()
    weights = torch.linspace(1, 2, out.numel(), dtype=out.dtype).view_as(out)
    (gradient,) = torch.autograd.grad((out * weights).sum(), fused)
    return [not heard for heard in _nonzero(gradient.flatten(0, -2).abs().amax(0))]


def gate_uses(owner: nn.Module, layer: nn.Module, forward: Forward) -> list[str]:
    """Return "gate" or "up" for each output of a layer inside a gated MLP: it is linear in up."""
    rows = _outputs(owner, layer, lambda: forward(torch.tensor([[5]])))[0].shape[-1]
    tokens = torch.full((rows, 1), 5)

    def shifted(by: float) -> Tensor:
        """Return the outputs if row i of the layer's output is larger by this in sample i."""
        hook = layer.register_forward_hook(lambda *a: a[-1] + by * torch.eye(rows)[:, None])
        try:
            return _outputs(owner, layer, lambda: forward(tokens))[1]
        finally:
            hook.remove()

    return _curved([shifted(by) for by in (0.0, 1.0, 2.0)])


def expert_uses(experts: nn.Module, transposed: bool) -> list[str]:
    """Return "gate" or "up" for each row of the first expert of a stack."""
    W = experts.gate_up_proj.detach()[0]
    rows, width = W.shape[::-1] if transposed else W.shape
    x = torch.linspace(1, 2, width, dtype=W.dtype)[None]
    first, weight = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=W.dtype)

    def shifted(row: int, by: float) -> Tensor:
        """Return the output for x if its product with a row is larger by this."""
        vector = W[:, row] if transposed else W[row]
        before = vector.clone()
        vector += by * x[0] / x.square().sum()
        out = experts(x, first, weight).detach().clone()
        vector.copy_(before)
        return out[0]

    outputs = [torch.stack([shifted(i, by) for i in range(rows)]) for by in (0.0, 1.0, 2.0)]
    return _curved(outputs)


def _curved(outputs: Sequence[Tensor]) -> list[str]:
    first, second, third = (out.detach().flatten(1) for out in outputs)
    curvature = (first - 2 * second + third).abs().amax(1)
    return ["gate" if curved else "up" for curved in _nonzero(curvature)]


def _outputs(owner: nn.Module, layer: nn.Module, run: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    """Return the outputs of the layer and of the module that owns it."""
    outputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, _: Any, out: Any) -> None:
        outputs[module] = out[0] if isinstance(out, tuple) else out

    hooks = [module.register_forward_hook(keep) for module in (layer, owner)]
    run()
    for hook in hooks:
        hook.remove()
    return outputs[layer], outputs[owner]


def _nonzero(x: Tensor) -> list[bool]:
    return (x.abs() > TOLERANCE * x.abs().max()).tolist()
