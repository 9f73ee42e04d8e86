"""The state of a parameter, at zero: made before the first step, spread over ranks as it is."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from angular_muown import adamw
from angular_muown.distributed.mesh import is_sharded, local, zero_vector, zeros_like
from angular_muown.params.layout import Layout
from angular_muown.params.options import Group
from angular_muown.stages.context import State
from angular_muown.update import Recipe


def has_state(p: Tensor) -> bool:
    """With a gradient; or spread over ranks, of which others may have one: a checkpoint over ranks
    needs the same keys from all of them."""
    return p.grad is not None or is_sharded(p)


def is_state_probe(groups: Sequence[Group], active: Sequence[Sequence[Tensor]]) -> bool:
    """torch's distributed checkpoint makes a fresh optimizer's state by a step with lr = 0 and zero
    gradients. It shall create the state and change nothing: no counter, no weight."""
    if any(float(group["lr"]) != 0 for group in groups):
        return False
    grads = [p.grad for params in active for p in params if p.grad is not None]
    moves = any(bool(local(grad).any()) for grad in grads)
    # Also those without a gradient here: a collective is entered by all ranks or by none.
    sharded = [p for group in groups for p in group["params"] if is_sharded(p)]
    if not sharded:
        return not moves
    from angular_muown.distributed.reductions import any_rank  # only where there are ranks

    return not any_rank([moves], sharded)[0]


def ensure_states(
    known: Mapping[Tensor, State],
    params: Sequence[Tensor],
    group: Group,
    recipe: Recipe | None,
) -> list[State]:
    """One for each parameter, with all that a step needs. Every step asks, and the hash of a tensor
    costs the host more than all the rest of it: hence once."""
    wanted, master = (
        {"step", *(recipe.state_names if recipe else ())},
        group["write_back"] == "master",
    )
    if group["average"] is not None:
        wanted.add("average")
    states = [known[p] for p in params]
    for p, state in zip(params, states, strict=True):
        if master or not wanted <= state.keys():
            init_state(p, state, group, recipe)
    return states


def states_of(
    states: list[State], owners: Sequence[Tensor], params: Sequence[Tensor]
) -> list[State]:
    """Those of some of the owners."""
    if params is owners:
        return states
    known = dict(zip(map(id, owners), states, strict=True))
    return [known[id(p)] for p in params]


def init_state(p: Tensor, state: State, group: Group, recipe: Recipe | None) -> None:
    """Add what is missing. `recipe` is None for AdamW's parameters."""
    compute = torch.promote_types(p.dtype, torch.float32)
    if recipe is None:
        adamw.init_state(p, group, state)
    else:
        _init_matrices(p, state, group, recipe, compute)
    if group["average"] is not None and "average" not in state:
        # The weights before the step: the share of the first step leaves nothing of them, and for
        # one whose gradient comes later they are what there was at every step before.
        state["average"] = zeros_like(p, compute).copy_(state.get("master", p))


def _init_matrices(
    p: Tensor, state: State, group: Group, recipe: Recipe, compute: torch.dtype
) -> None:
    if "step" not in state:
        # float32 on the host: a bf16 counter stops at 256, one on the device costs a sync
        device = p.device if group["capturable"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        dtype = getattr(torch, str(group["state_dtype"])) if group["state_dtype"] else compute
        state["momentum_buffer"] = zeros_like(p, dtype)
    for name in recipe.state_names:
        if name not in state:
            state[name] = zero_vector(p, Layout.of(group), name, compute)
    if group["write_back"] == "master" and p.dtype != compute and "master" not in state:
        state["master"] = zeros_like(p, compute).copy_(p)
