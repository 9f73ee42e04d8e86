"""Operands: the tensors that the row kernels read and write, on this rank."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from angular_muown.distributed.exchange import SharedParameter
from angular_muown.distributed.mesh import as_part, is_sharded, local, local_gradient
from angular_muown.kernels.columns import ROW_STATE
from angular_muown.kernels.launch import TYPES

DENSE = torch.contiguous_format
ALIGNMENT = 16  # bytes that a kernel loads at once
NOTHING = torch.empty(0, device="cpu")  # for row state that the method does not keep; address 0


class Operand(NamedTuple):
    """The tensors of one parameter."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    vectors: list[Tensor]  # in the order of ROW_STATE

    @staticmethod
    def of(shared: SharedParameter) -> "Operand":
        """Select this rank's part; without a gradient, zeros and copies, so that nothing moves."""
        p, state = shared.parameter, shared.state
        state.pop("master", None)  # of a setting that has changed: nothing would update it
        vectors = [_row_vector(shared, name) if name in state else NOTHING for name in ROW_STATE]
        weight, momentum = local(p), local(state["momentum_buffer"])
        _check_shape(shared, "momentum_buffer", momentum, tuple(weight.shape))
        if p.grad is None:
            momentum = momentum.to(_readable(momentum), copy=True, memory_format=DENSE)
            zeros = torch.zeros_like(weight, memory_format=DENSE)
            return Operand(
                weight.clone(memory_format=DENSE),
                zeros,
                momentum,
                [v if v is NOTHING else v.clone() for v in vectors],
            )
        if not (_is_aligned(weight) and _is_aligned(momentum)) or momentum.dtype not in TYPES:
            # Copies stand in for them; they are stored when the step is over.
            opened = shared.opened
            opened.working = weight = _aligned(weight)
            opened.momentum = momentum = _aligned(momentum.to(_readable(momentum)))
        return Operand(weight, _aligned(local_gradient(p)), momentum, vectors)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.weight.dtype, self.gradient.dtype, self.momentum.dtype

    @property
    def addresses(self) -> list[int]:
        tensors = (self.weight, self.gradient, self.momentum, *self.vectors)
        return [t.data_ptr() for t in tensors]


def _row_vector(shared: SharedParameter, name: str) -> Tensor:
    """Return a row vector as the kernels read it, dense and in float32, which a loaded one may not
    be."""
    value, p = shared.state[name], shared.parameter
    part = local(value)
    shape = shared.layout.vector_shape(local(p), name, shared.sharding.window)
    _check_shape(shared, name, part, shape)
    if part.dtype != torch.float32 or not part.is_contiguous():
        part = part.float().contiguous()
        if is_sharded(p) and is_sharded(value):
            shared.state[name] = as_part(part, p, value.shape, value.placements)
        else:
            shared.state[name] = part
    return part


def _check_shape(shared: SharedParameter, name: str, part: Tensor, shape: Sequence[int]) -> None:
    if tuple(part.shape) != tuple(shape):
        raise ValueError(
            f"the {name} of parameter {shared.name!r} has shape {tuple(part.shape)} on this rank, "
            f"but its layout needs {tuple(shape)}: after changing a parameter or its blocks, start "
            "with fresh state for it by del optimizer.state[p]"
        )


def _is_aligned(t: Tensor) -> bool:
    return t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0


def _aligned(t: Tensor) -> Tensor:
    return t if _is_aligned(t) else t.clone(memory_format=DENSE)


def _readable(momentum: Tensor) -> torch.dtype:
    """The dtype in which the kernels read a momentum, which may have been loaded in another."""
    return momentum.dtype if momentum.dtype in TYPES else torch.float32


class Operands:
    """What the kernels need to know of all members of a step; it keeps no tensor after it.

    `refresh` finds out that all but the gradients are those of the last step. It runs for every
    parameter at every step, so it goes over them in built-in functions.
    """

    def __init__(self, members: Sequence[SharedParameter]) -> None:
        each = [Operand.of(shared) for shared in members]
        self.device = each[0].weight.device
        self.dtypes = [one.dtypes for one in each]
        self.sizes = [one.weight.nbytes for one in each]
        self.kept = [tuple(v is not NOTHING for v in one.vectors) for one in each]
        self.addresses = [list(column) for column in zip(*(o.addresses for o in each), strict=True)]
        self.placements = [getattr(shared.parameter, "placements", None) for shared in members]
        # Copies, of weights or for want of a gradient, have to be made anew in every step.
        self.stand_in = any(
            one.parameter.grad is None
            or operand.weight is not local(one.parameter)
            or operand.momentum is not local(one.state["momentum_buffer"])
            for one, operand in zip(members, each, strict=True)
        )
        self.in_use: list[Any] = each  # until the step is over
        self.ids: list[int] = []

    def remember(self, members: Sequence[SharedParameter]) -> None:
        """Compare with the members' present tensors from now on."""
        self.ids = list(map(id, _persistent(members)))

    def refresh(self, members: Sequence[SharedParameter]) -> bool:
        """Take the present gradients; return False if the operands have to be made anew."""
        tensors = _persistent(members)
        if self.stand_in or list(map(id, tensors)) != self.ids:
            return False
        parts = [getattr(t, "_local_tensor", t) for t in tensors]
        count = len(members)
        pointers = list(map(Tensor.data_ptr, parts[:-count]))
        columns = [pointers[i : i + count] for i in range(0, len(pointers), count)]
        dense = all(map(Tensor.is_contiguous, parts[: 2 * count]))
        if not dense or columns != [self.addresses[0], *self.addresses[2:]]:
            return False
        if [t.dtype for t in parts[count : 2 * count]] != [dtypes[2] for dtypes in self.dtypes]:
            return False
        gradients = self._gradients(members)
        if gradients is None:
            return False
        self.in_use = gradients
        self.addresses[1] = list(map(Tensor.data_ptr, gradients))
        return True

    def _gradients(self, members: Sequence[SharedParameter]) -> list[Tensor] | None:
        """Return this rank's parts of the gradients, or None if they are not what they were.

        Copies replace those that the kernels cannot read: FSDP2's may start anywhere.
        """
        grads: list[Any] = [shared.parameter.grad for shared in members]
        if [getattr(grad, "placements", None) for grad in grads] != self.placements:
            return None
        grads = [getattr(grad, "_local_tensor", grad) for grad in grads]
        if not set(map(type, grads)) <= {Tensor, torch.nn.Parameter}:  # None, or not there yet
            return None
        if [grad.dtype for grad in grads] != [dtypes[1] for dtypes in self.dtypes]:
            return None
        odd = [i for i, grad in enumerate(grads) if not _is_aligned(grad)]
        if odd:
            copies = [torch.empty_like(grads[i], memory_format=DENSE) for i in odd]
            torch._foreach_copy_(copies, [grads[i] for i in odd])
            for i, copy in zip(odd, copies, strict=True):
                grads[i] = copy
        return grads

    def release(self) -> None:
        """Keep no tensor: the caller may free gradients and state."""
        self.in_use = []


def _persistent(members: Sequence[SharedParameter]) -> list[Any]:
    """Return all members' parameters, momenta, row vectors and counters, column by column."""
    states = [shared.state for shared in members]
    params: list[Any] = [shared.parameter for shared in members]
    columns = [[state.get(name, NOTHING) for state in states] for name in ROW_STATE]
    momenta = [state["momentum_buffer"] for state in states]
    counters = [state["step"] for state in states]
    return [*params, *momenta, *(t for column in columns for t in column), *counters]
