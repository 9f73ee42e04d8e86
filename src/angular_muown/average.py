"""Averages of the last weights: moved after every step, put in the weights' place to be read.

No step reads an average, so the weights are the same to the bit with and without. Why an average
begins with the weights that it finds is said where it is made, in `state`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from angular_muown.distributed.mesh import is_sharded, local
from angular_muown.params.options import Group
from angular_muown.params.rounding import reconcile_master
from angular_muown.schedules import averaging
from angular_muown.stages.context import State

States = Mapping[Tensor, dict[str, Any]]
Pairs = list[tuple[Tensor, Tensor]]
ROOM = 2**24  # elements of 16-bit weights that are read as float32 at a time
# Parameters that hold their averages now, by id. Not a mark on the optimizer: frameworks wrap it,
# and a step through the wrapper would not see the mark of the wrapped one.
_swapped: set[int] = set()


def update(groups: Sequence[Group], known: States) -> None:
    """After a step. A group in which nothing had a gradient is at its weights for one more step."""
    for group in groups:
        if group["average"] is not None:
            group["averaged"] += 1
            _move(group, known)
        elif isinstance(group["averaged"], Tensor) or group["averaged"]:  # switched off since
            group["averaged"] = 0
            for p in group["params"]:
                known.get(p, {}).pop("average", None)


def _move(group: Group, known: States) -> None:
    """a <- a + (w - a) share(k) for all of a group, at the k-th step that its averages see: also
    for parameters that had no gradient in it. Those that never had one have no average; it would
    be their weights."""
    states = [(p, known.get(p, {})) for p in group["params"]]
    pairs = [(local(state["average"]), p, state) for p, state in states if "average" in state]
    window = group["average"]
    assert window is not None, "update() moves averages that are kept"
    share = averaging(window)(group["averaged"])
    for some in _within(ROOM, ((a, _weight(p, state)) for a, p, state in pairs)):
        averages = [a for a, _ in some]
        weights = [w.to(a.dtype) for a, w in some]
        if isinstance(share, Tensor):  # foreach takes no one tensor for all
            shares = {dtype: share.to(dtype) for dtype in {a.dtype for a in averages}}
            for a, w in zip(averages, weights, strict=True):
                a.lerp_(w, shares[a.dtype])
        elif share == 1:  # whatever a was, also what is not finite
            torch._foreach_copy_(averages, weights)
        else:
            torch._foreach_lerp_(averages, weights, share)


def _weight(p: Tensor, state: State) -> Tensor:
    p = local(p).detach()
    return reconcile_master(local(state["master"]), p) if "master" in state else p


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


def check_outside(groups: Sequence[Group], what: str) -> None:
    if _swapped and any(id(p) in _swapped for group in groups for p in group["params"]):
        raise RuntimeError(
            f"{what} inside of averaged(), where the parameters hold averages and the weights wait "
            "to come back: leave the with block first"
        )


@contextmanager
def in_place_of_weights(
    groups: Sequence[Group], known: States, model: nn.Module | None
) -> Iterator[None]:
    """Averages in the place of the weights, which come back to the bit. Values are copied and
    addresses stay, because compiled models and recorded graphs rely on them."""
    check_outside(groups, "averaged()")
    begun = (g for g in groups if g["average"] is not None and int(g["averaged"]))
    own = [p for group in begun for p in group["params"]]
    states = [(p, known.get(p, {})) for p in own]
    found = [(p, state["average"]) for p, state in states if "average" in state]
    if not found:
        kept = any(group["average"] is not None for group in groups)
        raise RuntimeError(
            "the averages begin with the next step: take one first"
            if kept
            else "no average of the weights is kept: make the optimizer with average=0.1 (about "
            "the last tenth of the steps)"
        )
    sharded = [p for p, _ in found if is_sharded(p)]
    _reshard(model, sharded)  # before that, a model's parameters may be others than the optimizer's
    _check_model(model, sharded)
    copies = [local(p.detach()).clone() for p, _ in found]
    marks = {id(p) for p, _ in found}
    try:
        _swapped.update(marks)
        _put([p for p, _ in found], [local(a) for _, a in found])
        yield
    finally:
        _swapped.difference_update(marks)
        _reshard(model, sharded)
        _put([p for p, _ in found], copies)


def _put(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Where they lie now: somebody may have cast or moved the model inside."""
    torch._foreach_copy_([local(p.detach()) for p in params], list(values))


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
