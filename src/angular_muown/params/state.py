"""Initial state of a parameter: zeros, created before the first step and sharded as it is."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from angular_muown import adamw, cuda_graph
from angular_muown.distributed.mesh import (
    Sharding,
    is_sharded,
    local,
    sharding_of,
    zero_vector,
    zeros_like,
)
from angular_muown.params.eight_bit import (
    SCALE,
    convert_from_eight_bit,
    convert_to_eight_bit,
    is_eight_bit,
    scale_names,
)
from angular_muown.params.layout import Layout
from angular_muown.params.options import Group, parameter_names
from angular_muown.stages.context import State
from angular_muown.stages.reductions import LOCAL, Reductions
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
    required = {"step", *(vector_names(recipe, group) if recipe else ())}
    master = group["write_back"] == "master"
    if group["average"] is not None:
        required.add("average")
    states = [all_states[p] for p in params]
    for p, state in zip(params, states, strict=True):
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
    compute = compute_dtype(p)
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
        state["momentum_buffer"] = zeros_like(p, momentum_dtype(group, compute))
    for name in vector_names(recipe, group):
        if name not in state:
            state[name] = zero_vector(p, Layout.of(group), name, compute)
    if group["write_back"] == "master" and p.dtype != compute and "master" not in state:
        state["master"] = zeros_like(p, compute).copy_(p)


def vector_names(recipe: Recipe, group: Group) -> tuple[str, ...]:
    """Return the names of the vectors that a step needs: those of its stages and of 8 bits."""
    return (*recipe.state_names, *scale_names(group))


def store_as_asked(groups: Sequence[Group], states: Mapping[Tensor, State]) -> list[Tensor]:
    """Convert momenta that have another dtype than their group's state_dtype.

    They were loaded, or a group's state_dtype has changed. Ranks that share rows convert them
    together. Returns the tensors that were replaced.
    """
    replaced = []
    for i, group in enumerate(groups):
        if group["algorithm"] != "matrix":
            continue
        # not strict: a framework may have replaced the parameters, which a later check explains
        for p, name in zip(group["params"], parameter_names(group, i), strict=False):
            M = states[p].get("momentum_buffer") if p in states else None
            if M is not None and M.dtype != momentum_dtype(group, compute_dtype(p)):
                replaced += convert_momentum(p, states[p], group, name)
    return replaced


def convert_momentum(p: Tensor, state: State, group: Group, name: str) -> list[Tensor]:
    """Store a momentum as its group asks for; return the tensors that were replaced."""
    if cuda_graph.is_recording():
        raise RuntimeError(
            f"the momentum of {name!r} has to be converted to state_dtype={group['state_dtype']!r}:"
            " take a step before recording one"
        )
    layout, old, compute = Layout.of(group), state["momentum_buffer"], compute_dtype(p)
    if is_eight_bit(group):
        sharding = _sharding(p, layout, name)
        new, scale = zeros_like(p, torch.int8), zero_vector(p, layout, SCALE, compute)
        parts = local(old), local(new), local(scale)
        window = sharding.window if sharding else None
        convert_to_eight_bit(*parts, layout, window, _reductions(sharding))
        state["momentum_buffer"], state[SCALE] = new, scale
        return [old]
    state["momentum_buffer"] = read_momentum(p, state, layout, name, momentum_dtype(group, compute))
    return [old, *([state.pop(SCALE)] if SCALE in state else [])]


def read_momentum(p: Tensor, state: State, layout: Layout, name: str, dtype: torch.dtype) -> Tensor:
    """Return a copy of the entries that a momentum stands for, sharded as p is."""
    stored, M = state["momentum_buffer"], zeros_like(p, dtype)
    if stored.dtype == torch.int8:
        sharding = _sharding(p, layout, name)
        window = sharding.window if sharding else None
        convert_from_eight_bit(local(stored), local(state[SCALE]), local(M), layout, window)
    else:
        local(M).copy_(local(stored))
    return M


def momentum_of(p: Tensor, groups: Sequence[Group], states: Mapping[Tensor, State]) -> Tensor:
    """Return a copy of a parameter's momentum in the dtype of a step's arithmetic."""
    for i, group in enumerate(groups):
        for q, name in zip(group["params"], parameter_names(group, i), strict=True):
            if q is not p:
                continue
            if group["algorithm"] != "matrix":
                raise ValueError(
                    f"{name!r} is stepped by AdamW: its moments are exp_avg and exp_avg_sq in "
                    "optimizer.state"
                )
            if p not in states or "momentum_buffer" not in states[p]:
                raise ValueError(f"{name!r} has no momentum yet: take a step with its gradient")
            return read_momentum(p, states[p], Layout.of(group), name, compute_dtype(p))
    raise ValueError(
        f"a parameter of shape {tuple(p.shape)} is not one of this optimizer's: pass one of "
        "param_groups"
    )


def _sharding(p: Tensor, layout: Layout, name: str) -> Sharding | None:
    return sharding_of(p, layout, None, name) if is_sharded(p) else None


def compute_dtype(p: Tensor) -> torch.dtype:
    """Return the dtype of a step's arithmetic."""
    return torch.promote_types(p.dtype, torch.float32)


def momentum_dtype(group: Group, compute: torch.dtype) -> torch.dtype:
    return getattr(torch, str(group["state_dtype"])) if group["state_dtype"] else compute


def _reductions(sharding: Sharding | None) -> Reductions:
    if sharding is None:
        return LOCAL
    from angular_muown.distributed.reductions import ShardedReductions  # not on a single process

    sides = sharding.window.m, sharding.window.n
    return ShardedReductions(sides, sharding.row_groups, sharding.column_groups)


def state_bytes(p: Tensor, group: Group, recipe: Recipe | None) -> int:
    """Return the bytes of a parameter's state on this rank, without creating it.

    If p is sharded, this is its share of the whole state: the exact value may differ by a few rows.
    """
    shape = torch.empty(p.shape, dtype=p.dtype, device="meta")
    state: State = {}
    init_state(shape, state, group, recipe)
    whole = sum(x.nbytes for x in state.values())
    return whole * local(p).numel() // max(p.numel(), 1) if is_sharded(p) else whole
