"""Operands: the tensors that the row kernels read and write, on this rank."""

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from angular_muown.distributed.exchange import SharedParameter
from angular_muown.distributed.mesh import is_sharded, local, local_gradient
from angular_muown.kernels.columns import ROW_STATE
from angular_muown.kernels.launch import TYPES

ALIGNMENT = 16  # bytes that a kernel loads at once


class Operand(NamedTuple):
    """The tensors of one parameter."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    vectors: list[Tensor | None]  # in the order of ROW_STATE

    @staticmethod
    def of(shared: SharedParameter) -> "Operand":
        """Select this rank's part; without a gradient, zeros and copies, so that nothing moves."""
        p, state = shared.parameter, shared.state
        for name in ROW_STATE:
            # The kernels read float32; a loaded state may have another dtype.
            if name in state and state[name].dtype != torch.float32:
                state[name] = state[name].float()
        vectors = [local(state[name]) if name in state else None for name in ROW_STATE]
        weight, momentum = local(p), local(state["momentum_buffer"])
        if p.grad is None:
            copies = [None if v is None else v.clone() for v in vectors]
            momentum = momentum.to(_readable(momentum), copy=True)
            return Operand(_dense(weight.clone()), _zeros(weight), _dense(momentum), copies)
        if not (_is_aligned(weight) and _is_aligned(momentum)) or momentum.dtype not in TYPES:
            # Copies stand in for them; they are stored when the step is over.
            opened = shared.opened
            opened.working = weight = _aligned(weight)
            opened.momentum = momentum = _aligned(momentum.to(_readable(momentum)))
        return Operand(weight, _aligned(local_gradient(p)), momentum, vectors)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.weight.dtype, self.gradient.dtype, self.momentum.dtype


def _zeros(t: Tensor) -> Tensor:
    return torch.zeros_like(t, memory_format=torch.contiguous_format)


def _dense(t: Tensor) -> Tensor:
    return t.contiguous()


def _is_aligned(t: Tensor) -> bool:
    return t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0


def _aligned(t: Tensor) -> Tensor:
    """Return t, or a copy if the kernels cannot read it: FSDP2's gradients may start anywhere."""
    return t if _is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def _readable(momentum: Tensor) -> torch.dtype:
    """The dtype in which the kernels read a momentum, which may have been loaded in another."""
    return momentum.dtype if momentum.dtype in TYPES else torch.float32


class Operands:
    """The tensors of all members of a step, and their addresses.

    `refresh` finds out that they are still those of the last step, except for gradients. It runs
    for every parameter at every step, so it goes over them in built-in functions.
    """

    def __init__(self, members: Sequence[SharedParameter]) -> None:
        self.each = [Operand.of(shared) for shared in members]
        self.params: list[Any] = [shared.parameter for shared in members]
        self.dtypes = [one.dtypes for one in self.each]
        self.weights = [one.weight for one in self.each]
        self.momenta = [one.momentum for one in self.each]
        nothing = torch.empty(0, device="cpu")  # for state that the method does not keep
        columns = zip(*(one.vectors for one in self.each), strict=True)
        self.vectors = [[nothing if v is None else v for v in column] for column in columns]
        self.gradients = [one.gradient for one in self.each]
        self.gradient_dtypes = [gradient.dtype for gradient in self.gradients]
        self.gradient_addresses = list(map(Tensor.data_ptr, self.gradients))
        # Copies, of weights or of gradients, have to be made anew in every step.
        self.stand_in = any(
            p.grad is None or one.weight is not local(p) or one.gradient is not local(p.grad)
            for p, one in zip(self.params, self.each, strict=True)
        )
        self.specs = [p._spec for p in self.params] if is_sharded(self.params[0]) else None
        self.remember(members)

    def remember(self, members: Sequence[SharedParameter]) -> None:
        """Compare with the members' present tensors from now on."""
        self.parts = _persistent(members)

    def refresh(self, members: Sequence[SharedParameter]) -> bool:
        """Take the present gradients; return False if the operands have to be made anew."""
        if self.stand_in or not _same(_persistent(members), self.parts):
            return False
        grads: list[Any] = [p.grad for p in self.params]
        if self.specs is not None:
            specs = [getattr(grad, "_spec", None) for grad in grads]
            if not _same(specs, self.specs) and any(
                spec is None or spec.placements != own.placements
                for spec, own in zip(specs, self.specs, strict=True)
            ):
                return False
            grads = [grad._local_tensor for grad in grads]
        if not set(map(type, grads)) <= {Tensor, torch.nn.Parameter}:  # None, or not there yet
            return False
        addresses = list(map(Tensor.data_ptr, grads))
        moved = addresses != self.gradient_addresses
        if (
            not all(map(Tensor.is_contiguous, grads))
            or [grad.dtype for grad in grads] != self.gradient_dtypes
            or (moved and any(address % ALIGNMENT for address in addresses))
        ):
            return False
        self.gradients, self.gradient_addresses = grads, addresses
        return True

    @property
    def addresses(self) -> list[list[int]]:
        """Addresses of all weights, then of all gradients, momenta and row vectors."""
        return [
            list(map(Tensor.data_ptr, self.weights)),
            self.gradient_addresses,
            list(map(Tensor.data_ptr, self.momenta)),
            *(list(map(Tensor.data_ptr, column)) for column in self.vectors),
        ]


def _persistent(members: Sequence[SharedParameter]) -> list[Any]:
    """Return every parameter, its state, and this rank's part of the parameter."""
    tensors = [t for shared in members for t in (shared.parameter, *shared.state.values())]
    # FSDP2 gives a parameter another part at times, such as after loading a state dict.
    return [*tensors, *(getattr(shared.parameter, "_local_tensor", None) for shared in members)]


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))
