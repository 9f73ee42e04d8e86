"""Initial state of a parameter: zeros, created before the first step and sharded as it is."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from angular_muown import adamw
from angular_muown.distributed.mesh import (
    is_sharded,
    local,
    shard_like,
    whole,
    zero_vector,
    zeros_like,
)
from angular_muown.params.eight_bit import (
    SCALE,
    from_eight_bit,
    is_eight_bit,
    scale_names,
    to_eight_bit,
)
from angular_muown.params.layout import Layout
from angular_muown.params.options import Group
from angular_muown.stages.context import State
from angular_muown.update import Recipe


def has_state(p: Tensor) -> bool:
    """True if p has a gradient or is sharded.

    Other ranks may have a gradient of a sharded p, and a distributed checkpoint requires the same
    keys on all ranks.
    """
    return p.grad is not None or is_sharded(p)


def is_state_probe(groups: Sequence[Group], active: Sequence[Sequence[Tensor]]) -> bool:
    """True if this step has lr = 0 in all groups and only zero gradients.

    torch's distributed checkpoint takes such a step to make a fresh optimizer create its state. It
    must change nothing else: no counter, no weight.
    """
    if any(float(group["lr"]) != 0 for group in groups):
        return False
    grads = [p.grad for params in active for p in params if p.grad is not None]
    has_nonzero = any(bool(local(grad).any()) for grad in grads)
    # Including those without a gradient on this rank: all ranks must enter the collective.
    sharded = [p for group in groups for p in group["params"] if is_sharded(p)]
    if not sharded:
        return not has_nonzero
    from angular_muown.distributed.reductions import any_rank  # not imported on a single process

    return not any_rank([has_nonzero], sharded)[0]


def ensure_states(
    all_states: Mapping[Tensor, State],
    params: Sequence[Tensor],
    group: Group,
    recipe: Recipe | None,
) -> list[State]:
    """Return the state of each parameter, after adding what a step needs and is missing.

    Every step calls this. Each parameter is looked up once, because hashing a tensor costs the host
    more than everything else here.
    """
    eight_bit = is_eight_bit(group) and recipe is not None
    required = {"step", *(_vectors(recipe, group) if recipe else ())}
    master = group["write_back"] == "master"
    if group["average"] is not None:
        required.add("average")
    states = [all_states[p] for p in params]
    for p, state in zip(params, states, strict=True):
        M = state.get("momentum_buffer")
        if recipe and M is not None and (M.dtype == torch.int8) != eight_bit:
            _convert_momentum(p, state, group)
        if master or not required <= state.keys():
            init_state(p, state, group, recipe)
    return states


def states_of(
    states: list[State], owners: Sequence[Tensor], params: Sequence[Tensor]
) -> list[State]:
    """Select from the owners' states those of `params`, a subset of the owners."""
    if params is owners:
        return states
    by_id = dict(zip(map(id, owners), states, strict=True))
    return [by_id[id(p)] for p in params]


def init_state(p: Tensor, state: State, group: Group, recipe: Recipe | None) -> None:
    """Add missing entries to a state. `recipe` is None for AdamW's parameters."""
    compute = torch.promote_types(p.dtype, torch.float32)
    if recipe is None:
        adamw.init_state(p, group, state)
    else:
        _init_matrices(p, state, group, recipe, compute)
    if group["average"] is not None and "average" not in state:
        # Start from the current weights: the first update overwrites them, and if the first
        # gradient comes later, these were the weights at every step before.
        state["average"] = zeros_like(p, compute).copy_(state.get("master", p))


def _init_matrices(
    p: Tensor, state: State, group: Group, recipe: Recipe, compute: torch.dtype
) -> None:
    if "step" not in state:
        # float32, because a bf16 counter stops at 256; on the host, because reading one from the
        # device costs a sync
        device = p.device if group["capturable"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        dtype = getattr(torch, str(group["state_dtype"])) if group["state_dtype"] else compute
        state["momentum_buffer"] = zeros_like(p, dtype)
    for name in _vectors(recipe, group):
        if name not in state:
            state[name] = zero_vector(p, Layout.of(group), name, compute)
    if group["write_back"] == "master" and p.dtype != compute and "master" not in state:
        state["master"] = zeros_like(p, compute).copy_(p)


def _vectors(recipe: Recipe, group: Group) -> tuple[str, ...]:
    """Return the names of the vectors that a step needs."""
    return (*recipe.state_names, *scale_names(group))


def _convert_momentum(p: Tensor, state: State, group: Group) -> None:
    """Store a momentum as the group asks for: it was loaded, or the group's state_dtype changed.

    If p is sharded, all ranks take part. Each holds the whole momentum for a moment.
    """
    layout, M = Layout.of(group), whole(state["momentum_buffer"])
    if is_eight_bit(group):
        q, scale = to_eight_bit(M, layout)
        state["momentum_buffer"] = shard_like(p, q, layout)
        state[SCALE] = shard_like(p, scale, layout, SCALE)
    else:
        compute = torch.promote_types(p.dtype, torch.float32)
        dtype = getattr(torch, str(group["state_dtype"])) if group["state_dtype"] else compute
        M = from_eight_bit(M, whole(state.pop(SCALE)), layout, dtype)
        state["momentum_buffer"] = shard_like(p, M, layout)


def state_bytes(p: Tensor, group: Group, recipe: Recipe | None) -> int:
    """Return the bytes of a parameter's state on this rank, without creating it.

    If p is sharded, this is its share of the whole state: the exact value may differ by a few rows.
    """
    shape = torch.empty(p.shape, dtype=p.dtype, device="meta")
    state: State = {}
    init_state(shape, state, group, recipe)
    whole = sum(x.nbytes for x in state.values())
    return whole * local(p).numel() // max(p.numel(), 1) if is_sharded(p) else whole
