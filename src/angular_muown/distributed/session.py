"""The exchange session: steps that ranks share, from the plan to the last round.

Every rank goes through the same collectives whether or not it has gradients: their sizes follow
from shapes alone, and a parameter without a gradient takes part with zeros and keeps its values.
Ranks that disagree therefore raise an error instead of hanging.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from angular_muown.distributed.agreement import Agreement
from angular_muown.distributed.assignment import Assignment, ExchangePlan, MatrixTask
from angular_muown.distributed.copies import node_of_world, sharing_pays
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
from angular_muown.kernels.coverage import covers_shards, knows, runs_on
from angular_muown.params.layout import Layout
from angular_muown.params.options import Group, parameter_names, seed
from angular_muown.params.stacks import MatrixView, Stack, kind_of
from angular_muown.params.state import vector_names
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

    def run(
        self, members: Sequence[SharedParameter], observers: Sequence[Observer]
    ) -> list[Tensor]:
        """Take a step of the members; return the counters to advance."""
        if members[0].by_kernels and not observers:
            from angular_muown.kernels.sharded import advance_shards  # imports Triton

            self.fused, counters = advance_shards(self.fused, members, self.plan, self.member_of)
            return counters
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
        return [one.state["step"] for one in members if one.parameter.grad is not None]

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
            seeds = shared.noise, shared.group["step"]
            yield Stack(members, shared.group["maximize"], *seeds, over), ids


Exchanges = list[tuple[ExchangeGroup, list[SharedParameter]]]


def views_of(shared: SharedParameter) -> Iterator[MatrixView]:
    """Yield the matrices of a parameter one by one, in the order of `tasks_of`."""
    for view in shared.opened.views(vector_names(shared.recipe, shared.group)):
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
            number=e,
        )
        for b, block in enumerate(shared.blocks)
        for e in range(count)
    ]


def holders_of_copies(process_group: Any) -> RankGroup | None:
    """Return the ranks that hold copies of plain parameters and may share the work on them.

    By default these are the ranks of this node: results travel by its fast links, and buffers do
    not grow with the number of nodes.
    """
    if process_group is False or not has_ranks():
        return None
    rank_group = node_of_world() if process_group is None else rank_group_of(process_group)
    return rank_group if rank_group.size > 1 else None


def plan_of(shared: Sequence[SharedParameter]) -> ExchangePlan:
    return ExchangePlan([group.plan for group, _ in ExchangeSession().groups_of(shared)])


def rank_groups_of(p: Tensor, shared: Sequence[SharedParameter]) -> Sequence[RankGroup]:
    """Return the groups of ranks that own other matrices of p than this rank."""
    if is_sharded(p):
        return [ranks_along(p.device_mesh, [i]) for i in range(p.device_mesh.ndim)]
    return [one.sharding.replicas for one in shared if one.parameter is p]


# Settings that a plan depends on.
PLANNED = (
    "wire_dtype",
    "workspace",
    "write_back",
    "state_dtype",
    "capturable",
)


@dataclass
class SharedGroup:
    """The shared parameters of a group, and what they depend on."""

    key: Any
    params: list[Tensor]  # all of the group, kept alive: the key has their ids
    members: list[SharedParameter]


class ExchangeSession:
    """All exchange groups of an optimizer.

    It caches plans and is never saved: a step is correct without it.
    """

    def __init__(self) -> None:
        self.groups: dict[int, ExchangeGroup] = {}
        self.numbers: dict[Any, int] = {}  # of exchange groups, by their ranks
        self.ranks: list[tuple[int, ...]] = []  # the sets of ranks that shared the last step
        self.cached: dict[int, SharedGroup] = {}  # by index of the group
        self.by_placement: dict[Any, tuple[Sharding | None, bool]] = {}
        self.fitting: dict[int, list[int]] = {}  # ids of parameters and state that were seen to fit

    def shared(
        self, group: Group, index: int, recipe: Recipe, process_group: Any
    ) -> list[SharedParameter]:
        """Return the group's parameters that are sharded, or that ranks hold copies of."""
        params = group["params"]
        known = knows(recipe)
        key = (
            *(Layout.of(group), known, recipe.orthogonalize, recipe.tangent.needs_directions),
            *(group[name] for name in PLANNED),
            process_group,
            parameter_names(group, index),
            list(map(id, params)),
            [p.dtype for p in params],
            [getattr(p, "_spec", None) or p.shape for p in params],
        )
        cached = self.cached.get(index)
        if cached is None or cached.key != key:
            members = self._members(group, index, recipe, process_group, known)
            cached = self.cached[index] = SharedGroup(key, list(params), members)
        noise = seed(group)
        for member in cached.members:
            member.recipe, member.group, member.noise = recipe, group, noise
        return cached.members

    def _members(
        self, group: Group, index: int, recipe: Recipe, process_group: Any, known: bool
    ) -> list[SharedParameter]:
        layout, names = Layout.of(group), parameter_names(group, index)
        matrices = [(p, name) for p, name in zip(group["params"], names, strict=True) if p.ndim > 1]
        plain = not all(is_sharded(p) for p, _ in matrices)
        holders = holders_of_copies(process_group) if plain else None
        shapes = [
            (block.m, block.n)
            for p, _ in matrices
            for block in layout.grid(*layout.sides(p.shape))
            for _ in range(local(p).shape[:-2].numel() if layout.view == "stack" else 1)
        ]
        settings = (layout, known, recipe.orthogonalize, *(group[name] for name in PLANNED))
        members = []
        for p, name in matrices:
            place = (p.device_mesh, p.placements) if is_sharded(p) else (process_group,)
            placement = (*settings, index, p.shape, p.dtype, local(p).device, *place)
            if placement not in self.by_placement:
                sharding = sharding_of(p, layout, holders, name)
                by_kernels = (
                    sharding is not None
                    and known
                    and runs_on(local(p).device)
                    and covers_shards(p, sharding.windows, layout, group)
                )
                if sharding is not None and sharding.replicas.size > 1:
                    choice = (known, by_kernels, is_sharded(p) or process_group is None)
                    sharding = self._with_copies(sharding, p, shapes, recipe, *choice)
                self.by_placement[placement] = sharding, by_kernels
            sharding, by_kernels = self.by_placement[placement]
            if sharding is not None:
                ranks = (sharding.shards, sharding.replicas, by_kernels)
                number = self.numbers.setdefault(ranks, len(self.numbers))
                args = (name, p, sharding, layout, recipe, group, index, by_kernels, number)
                members.append(SharedParameter(*args))
        return members

    @staticmethod
    def _with_copies(
        sharding: Sharding,
        p: Tensor,
        shapes: Sequence[tuple[int, int]],
        recipe: Recipe,
        known: bool,
        by_kernels: bool,
        may_choose: bool,
    ) -> Sharding | None:
        """Return a sharding whose copies share the work, or in which each copy steps alone.

        Args:
            shapes: of all matrices of the group.
            known: True if the kernels know the recipe.
            by_kernels: True if they cover the parameter.
            may_choose: False if the user named a process group, whose ranks share.
        """
        if not may_choose or not runs_on(local(p).device):
            return sharding
        if by_kernels:
            assert isinstance(recipe.orthogonalize, Iteration), "the kernels know no other"
            parts = sharding.shards.size
            pays = sharing_pays(shapes, recipe.orthogonalize, sharding.replicas, parts)
        else:
            # The eager step shares, unless the kernels may cover a plain parameter when alone.
            pays = is_sharded(p) or not known
        return sharding if pays else sharding.alone

    def groups_of(
        self, shared: Sequence[SharedParameter]
    ) -> Iterator[tuple[ExchangeGroup, list[SharedParameter]]]:
        numbered: dict[int, list[SharedParameter]] = defaultdict(list)
        for one in shared:
            numbered[one.exchange].append(one)
        for number, members in numbered.items():
            group = self.groups.get(number)
            if group is None or group.key != [shared.key for shared in members]:
                group = self.groups[number] = ExchangeGroup(members)
            yield group, members

    def check(
        self, shared: Sequence[SharedParameter], groups: Sequence[Group], observed: bool
    ) -> Exchanges:
        """Raise if the ranks are not about to take the same step; return what `update` takes."""
        exchanges = list(self.groups_of(shared))
        for group, members in exchanges:
            group.agreement.check(members, groups, observed)
        return exchanges

    def update(self, exchanges: Exchanges, observers: Sequence[Observer] = ()) -> list[Tensor]:
        """Take the steps; return the counters to advance."""
        return [t for group, members in exchanges for t in group.run(members, observers)]
