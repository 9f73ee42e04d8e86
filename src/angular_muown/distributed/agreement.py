"""Agreement: a check that ranks that share work are about to take the same step.

They need the same parameters, the same settings, and gradients for the same parameters. In every
step each rank sends the others three digests: of its plan, of which parameters have gradients, and
of its groups' settings. Only if these differ do the ranks exchange details, for the error message.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from angular_muown.cuda_graph import PROCESS_KEYS
from angular_muown.distributed.collectives import all_gather
from angular_muown.distributed.exchange import SharedParameter
from angular_muown.distributed.mesh import RankGroup, is_sharded, local
from angular_muown.params.options import RULES, Group
from angular_muown.stages.orthogonalize import Iteration, Orthogonalizer

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22  # entries per step of a checksum, which bounds its memory
DIGESTS = 3
FRESH = 1 << 40  # added to the digest of a plan that is used for the first time
REMEDY = (
    "give all of them the same groups in the same order, and the same monitors; or pass "
    "process_group=False to let every rank step its plain parameters alone"
)
# Settings that must be equal on all ranks.
SETTINGS = tuple(name for name in RULES if name not in (*PROCESS_KEYS, "averaged"))


class Report(NamedTuple):
    """What a rank is about to do."""

    lines: list[str]  # the plan: a line for each parameter, and one for monitors
    present: list[bool]  # for each parameter, True if it has a gradient
    settings: dict[int, dict[str, Any]]  # by group index

    @property
    def tensors(self) -> list[Tensor]:
        """The settings that are tensors, which the host does not read."""
        values = (value for group in self.settings.values() for value in group.values())
        return [value for value in values if isinstance(value, Tensor)]

    def digests(self, plan: int) -> Tensor:
        """Return the three digests, without the settings that are tensors.

        Args:
            plan: the digest of the lines.
        """
        values = [value for group in self.settings.values() for value in group.values()]
        plain = [None if isinstance(value, Tensor) else value for value in values]
        digests = (plan, zlib.crc32(bytes(self.present)), zlib.crc32(repr(plain).encode()))
        return torch.tensor(digests, dtype=torch.int64, device="cpu")


class PendingCheck(NamedTuple):
    """A check whose digests are still being copied to the host."""

    event: torch.Event
    report: Report


class Agreement:
    def __init__(self, rank_group: RankGroup, members: Sequence[SharedParameter]) -> None:
        self.rank_group = rank_group
        self.device = local(members[0].parameter).device
        lines = [describe(shared) for shared in members]
        self.lines = {
            observed: [*lines, "observed by a monitor" if observed else "not observed"]
            for observed in (False, True)
        }
        self.digests = {
            observed: zlib.crc32("\n".join(lines).encode())
            for observed, lines in self.lines.items()
        }
        # One check is in flight at a time, so it can always use the same memory.
        pinned = self.device.type == "cuda"
        self.mine = torch.empty(DIGESTS, dtype=torch.int64, device="cpu", pin_memory=pinned)
        shape = (rank_group.size, DIGESTS)
        self.theirs = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.fresh = True
        self.pending: PendingCheck | None = None

    def check(
        self, members: Sequence[SharedParameter], groups: Sequence[Group], observed: bool
    ) -> None:
        """Raise if the ranks differ, before any weight changes.

        The host does not wait for a GPU: there, a difference raises in the next step. Only the
        first check of a plan waits.
        """
        if self.pending is not None:
            last, self.pending = self.pending, None
            last.event.synchronize()
            if self._differ():
                self._explain(last.report, "in the last step ")
        report = Report(
            self.lines[observed],
            [shared.parameter.grad is not None for shared in members],
            dict(enumerate(map(settings_of, groups))),
        )
        self._exchange_digests(report, self.digests[observed])
        if self.device.type == "cpu" or self.fresh:
            self._compare(members, report)
        else:
            event = torch.Event(self.device)
            event.record()
            self.pending = PendingCheck(event, report)
        self.fresh = False

    def _exchange_digests(self, report: Report, plan: int) -> None:
        """Send this rank's digests, and start to receive those of all ranks in `theirs`."""
        self.mine.copy_(report.digests(plan + FRESH * self.fresh))
        mine = self.mine.to(self.device, non_blocking=True)
        if tensors := report.tensors:
            scalars = [t.detach().to(self.device).double().reshape(()) for t in tensors]
            mine = mine.clone()
            mine[2] += checksum(torch.stack(scalars))
        theirs = mine.new_empty(self.theirs.numel())
        all_gather(theirs, mine, self.rank_group)
        self.theirs.copy_(theirs.view_as(self.theirs), non_blocking=not self.fresh)

    def _differ(self) -> bool:
        plans = self.theirs[:, 0] % FRESH
        rest = self.theirs[:, 1:]
        return not (bool((plans == plans[0]).all()) and bool((rest == rest[0]).all()))

    def _compare(self, members: Sequence[SharedParameter], report: Report) -> None:
        all_fresh = bool((self.theirs[:, 0] >= FRESH).all())
        if self._differ():
            # The ranks whose plan is not new have moved on, and would not take part.
            if self.device.type != "cpu" and not all_fresh:
                raise RuntimeError(f"ranks that share the optimizer's work disagree: {REMEDY}")
            self._explain(report)
        if all_fresh:
            self._compare_gradients(members)

    def _gather(self, mine: Any) -> list[Any]:
        """Return the object that each rank passed."""
        objects: list[Any] = [None] * self.rank_group.size
        dist.all_gather_object(objects, mine, group=self.rank_group.group)
        return objects

    def _explain(self, report: Report, when: str = "") -> None:
        """Raise an error that names the first difference between the ranks."""
        settings = {i: _on_host(group) for i, group in report.settings.items()}
        gathered = self._gather(tuple(report._replace(settings=settings)))
        reports = [Report(*values) for values in gathered]
        for check in (self._explain_plan, self._explain_settings, self._explain_gradients):
            check(reports, when)

    def _explain_plan(self, reports: list[Report], when: str) -> None:
        first, ranks = reports[0].lines, self.rank_group.ranks
        for rank, report in zip(ranks, reports, strict=True):
            for i in range(max(len(report.lines), len(first))):
                a, b = (x[i] if i < len(x) else "missing" for x in (first, report.lines))
                if a != b:
                    raise RuntimeError(
                        f"{when}ranks that share the optimizer's work disagree: entry {i} of the "
                        f"plan is {a} on rank {ranks[0]} and {b} on rank {rank}; {REMEDY}"
                    )

    def _explain_settings(self, reports: list[Report], when: str) -> None:
        first, ranks = reports[0].settings, self.rank_group.ranks
        for rank, report in zip(ranks, reports, strict=True):
            for index, group in first.items():
                theirs = report.settings.get(index, {})
                for key, value in group.items():
                    other = theirs.get(key, value)
                    if repr(other) != repr(value):
                        raise RuntimeError(
                            f"{when}group {index} has {key}={value!r} on rank {ranks[0]} and "
                            f"{key}={other!r} on rank {rank}: ranks that share a parameter's step "
                            "need the same settings"
                        )

    def _explain_gradients(self, reports: list[Report], when: str) -> None:
        ranks = self.rank_group.ranks
        for i, line in enumerate(reports[0].lines[:-1]):
            present = [rank for rank, r in zip(ranks, reports, strict=True) if r.present[i]]
            missing = [rank for rank in ranks if rank not in present]
            if present and missing:
                raise RuntimeError(
                    f"{when}parameter {line.split()[0]!r} has a gradient on ranks {present} and "
                    f"none on ranks {missing}: ranks that share a parameter step it together; set "
                    "its gradient on all of them (to zeros if need be), or on none"
                )

    def _compare_gradients(self, members: Sequence[SharedParameter]) -> None:
        """Raise if ranks have different gradients for a plain parameter, once per plan."""
        plain = {
            shared.name: int(checksum(shared.parameter.grad))
            for shared in members
            if not is_sharded(shared.parameter) and shared.parameter.grad is not None
        }
        for rank, theirs in zip(self.rank_group.ranks, self._gather(plain), strict=True):
            for name in plain:
                if theirs[name] != plain[name]:
                    raise RuntimeError(
                        f"the gradient of parameter {name!r} differs between ranks "
                        f"{self.rank_group.ranks[self.rank_group.index]} and {rank}: average "
                        "gradients first, as DistributedDataParallel does, or pass "
                        "process_group=False to let every rank step alone"
                    )


def settings_of(group: Group) -> dict[str, Any]:
    """Return the settings to compare, lists as tuples: a loaded state dict has lists."""
    settings = ((key, group[key]) for key in SETTINGS if key in group)
    return {key: tuple(x) if isinstance(x, list) else x for key, x in settings}


def _on_host(group: dict[str, Any]) -> dict[str, Any]:
    return {key: x.item() if isinstance(x, Tensor) else x for key, x in group.items()}


def describe(shared: SharedParameter) -> str:
    """Return a line with everything that determines the collectives of a step and their sizes."""
    p, recipe = shared.parameter, shared.recipe
    placement = f"{p.placements} on {tuple(p.device_mesh.shape)}" if is_sharded(p) else "plain"
    stages = (recipe.chart, recipe.normalize, recipe.radius, recipe.tangent)
    names = [_name(recipe.orthogonalize), *(name for stage in stages for name in _names(stage))]
    return (
        f"{shared.name} {tuple(p.shape)} {p.dtype}, {placement}, {' '.join(names)}, "
        f"{shared.layout}, wire_dtype {shared.wire_dtype}, workspace {shared.group['workspace']}"
        + (", by kernels" if shared.by_kernels else "")
    )


def _name(polar: Orthogonalizer) -> str:
    if isinstance(polar, Iteration):
        return polar.name
    return getattr(polar, "__name__", type(polar).__name__)


def _names(stage: Any) -> list[str]:
    """Return the class names of a stage and of the stage inside it, if any."""
    return [] if stage is None else [type(stage).__name__, *_names(getattr(stage, "inner", None))]


def checksum(t: Tensor) -> Tensor:
    """Compute a position-weighted checksum of the tensor's bits, on its device."""
    words = t.detach().flatten().view(WORDS[t.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for i, chunk in enumerate(words.split(CHUNK)):
        weights = torch.arange(1, chunk.numel() + 1, device=t.device)
        total += (chunk.to(torch.int64) * weights).sum() * (i + 1)
    return total
