"""Averages of recent weights: updated after every step, swapped in for the weights to be read.

No step reads an average, so the weights are the same bit for bit with and without averages.
`params.state` explains why an average starts at the current weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from angular_muown.distributed.mesh import is_sharded, local
from angular_muown.params.options import Group
from angular_muown.params.rounding import reconcile_master
from angular_muown.schedules import averaging
from angular_muown.stages.context import State

States = Mapping[Tensor, State]
Pairs = list[tuple[Tensor, Tensor]]
CHUNK_ELEMENTS = 2**24  # of 16-bit weights that are converted to float32 at a time
# Ids of parameters that hold their averages now. They are not marked on the optimizer: frameworks
# wrap it, and a step through the wrapper would not see a mark on the wrapped optimizer.
_swapped: set[int] = set()


def update(groups: Sequence[Group], states: States) -> None:
    """Update all averages after a step, including those of groups without a gradient."""
    for group in groups:
        if group["average"] is not None:
            group["averaged"] += 1
            _update_group(group, states)
        elif isinstance(group["averaged"], Tensor) or group["averaged"]:  # no longer averaged
            group["averaged"] = 0
            for p in group["params"]:
                states.get(p, {}).pop("average", None)


def _update_group(group: Group, states: States) -> None:
    """a <- a + (w - a) share(k), at the k-th step that the group's averages see.

    This includes parameters without a gradient in this step. Those that never had one have no
    average; it would equal their weights.
    """
    params = [(p, states.get(p, {})) for p in group["params"]]
    averaged = [(local(state["average"]), p, state) for p, state in params if "average" in state]
    window = group["average"]
    assert window is not None, "update() calls this for averaged groups only"
    share = averaging(window)(group["averaged"])
    for chunk in _chunks(CHUNK_ELEMENTS, ((a, _weight(p, state)) for a, p, state in averaged)):
        averages = [a for a, _ in chunk]
        weights = [w.to(a.dtype) for a, w in chunk]
        if isinstance(share, Tensor):  # foreach does not take a single tensor for all
            shares = {dtype: share.to(dtype) for dtype in {a.dtype for a in averages}}
            for a, w in zip(averages, weights, strict=True):
                a.lerp_(w, shares[a.dtype])
        elif share == 1:  # a copy discards a non-finite average, lerp would not
            torch._foreach_copy_(averages, weights)
        else:
            torch._foreach_lerp_(averages, weights, share)


def _weight(p: Tensor, state: State) -> Tensor:
    p = local(p).detach()
    return reconcile_master(local(state["master"]), p) if "master" in state else p


def _chunks(limit: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Pairs]:
    """Yield the pairs in chunks of at most `limit` elements, but at least one pair."""
    chunk: Pairs = []
    elements = 0
    for a, w in pairs:
        if chunk and elements + a.numel() > limit:
            yield chunk
            chunk, elements = [], 0
        chunk.append((a, w))
        elements += a.numel()
    if chunk:
        yield chunk


def check_outside(groups: Sequence[Group], what: str) -> None:
    """Raise if a parameter holds its average now; `what` is the call to name in the error."""
    if _swapped and any(id(p) in _swapped for group in groups for p in group["params"]):
        raise RuntimeError(
            f"{what} was called inside averaged(), while the parameters hold averages instead of "
            "weights: leave the with block first"
        )


@contextmanager
def in_place_of_weights(
    groups: Sequence[Group], states: States, model: nn.Module | None
) -> Iterator[None]:
    """Replace weights by averages inside a `with` block; restore the weights bit for bit.

    Values are copied, so addresses do not change: compiled models and recorded graphs rely on them.
    """
    check_outside(groups, "averaged()")
    started = (g for g in groups if g["average"] is not None and int(g["averaged"]))
    candidates = [(p, states.get(p, {})) for group in started for p in group["params"]]
    averaged = [(p, state["average"]) for p, state in candidates if "average" in state]
    if not averaged:
        raise RuntimeError(
            "the averages begin with the next step: take a step first"
            if any(group["average"] is not None for group in groups)
            else "this optimizer keeps no averages: construct it with average=0.1 (about the last "
            "tenth of the steps)"
        )
    sharded = [p for p, _ in averaged if is_sharded(p)]
    _reshard(model, sharded)  # until then, the model's parameters may not be the optimizer's
    _check_model(model, sharded)
    weights = [local(p.detach()).clone() for p, _ in averaged]
    ids = {id(p) for p, _ in averaged}
    try:
        _swapped.update(ids)
        _write([p for p, _ in averaged], [local(a) for _, a in averaged])
        yield
    finally:
        _swapped.difference_update(ids)
        _reshard(model, sharded)
        _write([p for p, _ in averaged], weights)


def _write(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into the parameters, which the user may have cast or moved in the meantime."""
    torch._foreach_copy_([local(p.detach()) for p in params], list(values))


def _reshard(model: nn.Module | None, sharded: Sequence[Tensor]) -> None:
    """Make FSDP discard gathered weights.

    FSDP keeps the root module's weights gathered after a forward pass, for the backward pass. The
    next forward pass would use them instead of the shards' new values.
    """
    if model is None or not sharded:
        return
    from torch.distributed.fsdp import FSDPModule  # slow to import

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _check_model(model: nn.Module | None, sharded: Sequence[Tensor]) -> None:
    if not sharded:
        return
    if model is None:
        raise ValueError(
            f"averaged() was called without the model, but {len(sharded)} parameters are sharded "
            "across ranks: write averaged(model), because FSDP may keep outdated weights gathered"
        )
    ids = {id(p) for p in model.parameters()}
    missing = [p for p in sharded if id(p) not in ids]
    if missing:
        raise ValueError(
            f"averaged(model) was called with a {type(model).__name__} that lacks {len(missing)} "
            f"of the {len(sharded)} parameters that are sharded across ranks, one of shape "
            f"{tuple(missing[0].shape)}: pass the whole model"
        )
