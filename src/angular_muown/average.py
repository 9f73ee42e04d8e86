"""Averages of the last weights: moved after every step, put in the weights' place to be read.

No step reads an average, so the weights are the same to the bit with and without. Why an average
begins with the weights that it finds is said where it is made, in `state`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from angular_muown.groups import Group
from angular_muown.placement import is_sharded, local
from angular_muown.schedules import averaging

State = dict[str, Any]
Pairs = list[tuple[Tensor, Tensor]]
ROOM = 2**24  # elements of 16-bit weights that are read as float32 at a time


def update(group: Group, known: Mapping[Tensor, State]) -> None:
    """a <- a + (w - a) share(k) for all of a group, after its k-th step: also for parameters that
    had no gradient in it. Those that never had one have no average; it would be their weights."""
    if group["average"] is None:
        return
    states = [(p, known.get(p, {})) for p in group["params"]]
    pairs = [
        (local(state["average"]), local(state.get("master", p)).detach())
        for p, state in states
        if "average" in state
    ]
    share = averaging(group["average"])(group["step"])
    for some in _within(ROOM, pairs):
        averages = [a for a, _ in some]
        weights = [w.to(a.dtype) for a, w in some]
        if isinstance(share, Tensor):  # foreach takes no one tensor for all
            for a, w in zip(averages, weights, strict=True):
                a.lerp_(w, share.to(a.dtype))
        else:
            torch._foreach_lerp_(averages, weights, share)


def _within(room: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Pairs]:
    """In turn, as many as have so few elements, at least one."""
    some: Pairs = []
    taken = 0
    for a, w in pairs:
        if some and taken + a.numel() > room:
            yield some
            some, taken = [], 0
        some.append((a, w))
        taken += a.numel()
    if some:
        yield some


class Keeper(Protocol):
    """Of an optimizer, what is needed here."""

    swapped: bool
    param_groups: list[Group]
    state: Any  # Mapping[Tensor, State]


def check_outside(keeper: Keeper, what: str) -> None:
    if keeper.swapped:
        raise RuntimeError(
            f"{what} inside of averaged(), where the parameters hold averages and the weights wait "
            "to come back: leave the with block first"
        )


@contextmanager
def in_place_of_weights(keeper: Keeper, model: nn.Module | None) -> Iterator[None]:
    """Averages in the place of the weights, which come back to the bit. Values are copied and
    addresses stay, because compiled models and recorded graphs rely on them."""
    check_outside(keeper, "averaged()")
    groups = [group for group in keeper.param_groups if group["average"] is not None]
    states = [(p, keeper.state.get(p, {})) for group in groups for p in group["params"]]
    found = [(p, state["average"]) for p, state in states if "average" in state]
    if not found:
        raise RuntimeError(
            "no average of the weights is kept: make the optimizer with average=0.1 (about the "
            "last tenth of the steps), and take a step first"
        )
    sharded = [p for p, _ in found if is_sharded(p)]
    _reshard(model, sharded)
    _check_model(model, sharded)
    weights = [local(p.detach()) for p, _ in found]
    copies = [weight.clone() for weight in weights]
    try:
        keeper.swapped = True
        torch._foreach_copy_(weights, [local(a) for _, a in found])
        yield
    finally:
        keeper.swapped = False
        _reshard(model, sharded)
        torch._foreach_copy_(weights, copies)


def _reshard(model: nn.Module | None, sharded: Sequence[Tensor]) -> None:
    """After a forward pass FSDP keeps the outermost weights gathered, for the backward pass. The
    next forward pass would take these for the shards' values, which are other ones by then."""
    if model is None or not sharded:
        return
    from torch.distributed.fsdp import FSDPModule  # takes time to import

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _check_model(model: nn.Module | None, sharded: Sequence[Tensor]) -> None:
    if not sharded:
        return
    if model is None:
        raise ValueError(
            f"averaged() for {len(sharded)} parameters that are spread over ranks: write "
            "averaged(model), because FSDP may keep weights of the model gathered that are no "
            "longer those of the parameters"
        )
    own = {id(p) for p in model.parameters()}
    strangers = [p for p in sharded if id(p) not in own]
    if strangers:
        raise ValueError(
            f"averaged(model) with a {type(model).__name__} that lacks {len(strangers)} of the "
            f"{len(sharded)} parameters that are spread over ranks, one of shape "
            f"{tuple(strangers[0].shape)}: give the whole model"
        )
