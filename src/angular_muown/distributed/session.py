"""The exchange session: steps that ranks share, from the plan to the last round.

Every rank goes through the same collectives whether or not it has gradients: their sizes follow
from shapes alone, and a parameter without a gradient takes part with zeros and keeps its values.
Ranks that disagree therefore raise an error instead of hanging.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from angular_muown.distributed.agreement import Agreement
from angular_muown.distributed.assignment import Assignment, ExchangePlan, MatrixTask
from angular_muown.distributed.exchange import Exchange, PausedStack, SharedParameter, run_rounds
from angular_muown.distributed.mesh import (
    RankGroup,
    Sharding,
    has_ranks,
    is_sharded,
    local,
    rank_group_of,
    ranks_along,
    sharding_of,
)
from angular_muown.distributed.reductions import ShardedReductions
from angular_muown.kernels.coverage import covers_shards, knows_shards, runs_on
from angular_muown.params.layout import Layout
from angular_muown.params.options import Group, parameter_names, seed
from angular_muown.params.stacks import MatrixView, Stack, kind_of
from angular_muown.stages.orthogonalize import Iteration
from angular_muown.update import Observer, Recipe, resume, update

if TYPE_CHECKING:  # imports Triton
    from angular_muown.kernels.sharded import FusedExchange

# Minimum bytes of an owner's matrices per round with kernels. A round costs the host two
# collectives and three launches: small rounds leave the GPU idle.
LEAST_FUSED_ROUND = 32 * 2**20


class ExchangeGroup:
    """Parameters that are sharded and replicated across the same ranks."""

    fused: "FusedExchange | None" = None  # made at the first step by kernels

    def __init__(self, members: Sequence[SharedParameter]) -> None:
        self.key = [shared.key for shared in members]
        self.sharding = members[0].sharding  # all members have its rank groups, not its windows
        numbered = [(task, k) for k, shared in enumerate(members) for task in tasks_of(shared)]
        self.member_of = [k for _, k in numbered]  # by task
        # Sizes of whole matrices: parts differ, and all ranks must plan the same rounds.
        sizes = [members[k].group["workspace"] * task.bytes for task, k in numbered]
        places, copies = self.sharding.shards.size, self.sharding.replicas.size
        tasks = tuple(task for task, _ in numbered)
        budget = int(sum(sizes) / places)
        if members[0].by_kernels:  # whose buffers hold up to seven rounds, in whole or in part
            budget = max(LEAST_FUSED_ROUND, budget // 4)
        self.plan = Assignment(tasks, places, copies, budget)
        self.agreement = Agreement(self.sharding.everyone, members)

    def run(self, members: Sequence[SharedParameter], observers: Sequence[Observer]) -> None:
        if members[0].by_kernels and not observers:
            from angular_muown.kernels.sharded import advance_shards  # imports Triton

            self.fused = advance_shards(self.fused, members, self.plan, self.member_of)
            return
        parameter_of = [members[k] for k in self.member_of]
        views = [view for shared in members for view in views_of(shared)]
        plan = self.plan.moved if observers else self.plan

        def start(tasks: list[int]) -> list[PausedStack]:
            stacks = list(self._stacks(tasks, views, parameter_of))
            return [
                (stack, ids, update(stack, parameter_of[ids[0]].recipe, parameter_of[ids[0]].group))
                for stack, ids in stacks
            ]

        for stack, ids, equation in start(plan.summed):
            X, _ = next(equation)
            iteration = parameter_of[ids[0]].recipe.orthogonalize
            assert isinstance(iteration, Iteration), "only iterations can sum Gram matrices"
            resume(equation, iteration.of_part(X, stack.reductions))
        run_rounds(Exchange(self.sharding, plan, parameter_of, observers, start).rounds())

    def _stacks(
        self, tasks: list[int], views: list[MatrixView], parameter_of: list[SharedParameter]
    ) -> Iterator[tuple[Stack, list[int]]]:
        """Stack views like `stacks.stacks`, in the same order and batches on every rank."""
        kinds: dict[Any, list[int]] = defaultdict(list)
        for i in tasks:
            kinds[parameter_of[i].index, self.plan.tasks[i].parts, kind_of(views[i])].append(i)
        for ids in kinds.values():
            shared = parameter_of[ids[0]]
            sharding, sides = shared.sharding, views[ids[0]].sides
            over = ShardedReductions(sides, sharding.row_groups, sharding.column_groups)
            members = [views[i] for i in ids]
            yield Stack(members, shared.group["maximize"], shared.noise, over), ids


Exchanges = list[tuple[ExchangeGroup, list[SharedParameter]]]


def views_of(shared: SharedParameter) -> Iterator[MatrixView]:
    """Yield the matrices of a parameter one by one, in the order of `tasks_of`."""
    for view in shared.opened.views(shared.recipe.state_names):
        yield from view.per_matrix


def tasks_of(shared: SharedParameter) -> list[MatrixTask]:
    """Return the tasks of a parameter's matrices, block by block."""
    sharding = shared.sharding
    count = shared.layout.canonical(local(shared.parameter)).shape[0]
    width = shared.wire_dtype.itemsize
    operands = 2 if shared.recipe.tangent.needs_directions else 1
    return [
        MatrixTask(
            f"{shared.name}[{b}, {e}]",
            block.m,
            block.n,
            sharding.parts_of(block),
            width,
            operands,
            may_sum=shared.iterates and not shared.by_kernels,
            block=b,
        )
        for b, block in enumerate(shared.blocks)
        for e in range(count)
    ]


def holders_of_copies(p: Tensor, process_group: Any) -> RankGroup | None:
    """Return the ranks that share the work on a plain parameter, if they hold copies of it."""
    if process_group is False or not has_ranks():
        return None
    if process_group is None and runs_on(p.device):
        return None  # the kernels step each copy faster than a result arrives from another rank
    rank_group = rank_group_of(dist.group.WORLD if process_group is None else process_group)
    return rank_group if rank_group.size > 1 else None


def plan_of(shared: Sequence[SharedParameter]) -> ExchangePlan:
    return ExchangePlan([group.plan for group, _ in ExchangeSession().groups_of(shared)])


def rank_groups_of(p: Tensor, process_group: Any) -> Sequence[RankGroup]:
    """Return the groups of ranks that own other matrices of p than this rank."""
    if is_sharded(p):
        return [ranks_along(p.device_mesh, [i]) for i in range(p.device_mesh.ndim)]
    rank_group = holders_of_copies(p, process_group)
    return () if rank_group is None else (rank_group,)


def _runs_by_kernels(p: Tensor, sharding: Sharding, layout: Layout, group: Group) -> bool:
    """True if the kernels step a parameter that is sharded by rows and has no copies."""
    return (
        sharding.shards.communicates
        and sharding.replicas.size == 1
        and runs_on(local(p).device)
        and covers_shards(p, sharding.windows, layout, group)
    )


# Settings that a plan depends on.
PLANNED = (
    "wire_dtype",
    "workspace",
    "write_back",
    "state_dtype",
    "capturable",
)


class ExchangeSession:
    """All exchange groups of an optimizer.

    It caches plans and is never saved: a step is correct without it.
    """

    def __init__(self) -> None:
        self.groups: dict[Any, ExchangeGroup] = {}
        self.ranks: list[tuple[int, ...]] = []  # the sets of ranks that shared the last step
        # by group and position in it: what the sharding depends on, and the parameter if shared
        self.cached: dict[tuple[int, int], tuple[Any, SharedParameter | None]] = {}
        self.by_placement: dict[Any, Sharding | None] = {}  # one for all equal placements

    def shared(
        self, group: Group, index: int, recipe: Recipe, process_group: Any
    ) -> list[SharedParameter]:
        """Return the group's parameters that are sharded, or that ranks hold copies of."""
        layout, result = Layout.of(group), []
        names = parameter_names(group, index)
        known, noise = knows_shards(recipe), seed(group)
        settings = (
            *(layout, known, recipe.orthogonalize, recipe.tangent.needs_directions),
            *(group[key] for key in PLANNED),
        )
        for position, (p, name) in enumerate(zip(group["params"], names, strict=True)):
            copies = None if is_sharded(p) else holders_of_copies(p, process_group)
            if (copies is None and not is_sharded(p)) or p.ndim < 2:  # flattened: refused later
                continue
            place = (p.device_mesh, p.placements) if is_sharded(p) else (copies,)
            key = (id(p), name, p.shape, p.dtype, *place, *settings)
            cached = self.cached.get((index, position))
            if cached is None or cached[0] != key:
                placement = (layout, p.shape, *place, local(p).shape)
                if placement not in self.by_placement:
                    self.by_placement[placement] = sharding_of(p, layout, copies, name)
                sharding = self.by_placement[placement]
                member = None
                if sharding is not None:
                    member = SharedParameter(name, p, sharding, layout, recipe, group, index)
                    member.by_kernels = known and _runs_by_kernels(p, sharding, layout, group)
                cached = self.cached[index, position] = (key, member)
            member = cached[1]
            if member is not None:
                member.recipe, member.group, member.noise = recipe, group, noise
                result.append(member)
        return result

    def groups_of(
        self, shared: Sequence[SharedParameter]
    ) -> Iterator[tuple[ExchangeGroup, list[SharedParameter]]]:
        by_ranks: dict[Any, list[SharedParameter]] = defaultdict(list)
        for one in shared:
            by_ranks[one.sharding.shards, one.sharding.replicas, one.by_kernels].append(one)
        for ranks, members in by_ranks.items():
            group = self.groups.get(ranks)
            if group is None or group.key != [shared.key for shared in members]:
                group = self.groups[ranks] = ExchangeGroup(members)
            yield group, members

    def check(
        self, shared: Sequence[SharedParameter], groups: Sequence[Group], observed: bool
    ) -> Exchanges:
        """Raise if the ranks are not about to take the same step; return what `update` takes."""
        exchanges = list(self.groups_of(shared))
        for group, members in exchanges:
            group.agreement.check(members, groups, observed)
        return exchanges

    def update(self, exchanges: Exchanges, observers: Sequence[Observer] = ()) -> None:
        for group, members in exchanges:
            group.run(members, observers)
