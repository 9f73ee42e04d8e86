"""Agreement: ranks that share work have the same parameters with the same settings, and gradients
for the same ones.

In every step each rank sends the others three digests: of its plan, of which parameters have
gradients, and of its groups' numbers. The rest follows only where these differ.
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
CHUNK = 1 << 22  # entries of a gradient that are looked at at a time
FRESH = 1 << 40  # added to the digest of a plan that is used for the first time
HOW = (
    "give all of them the same groups in the same order, and the same monitors; or pass "
    "process_group=False to let every rank step its plain parameters alone"
)


# equal on all ranks
SETTINGS = tuple(name for name in RULES if name not in (*PROCESS_KEYS, "averaged"))


class Report(NamedTuple):
    """What a rank is about to do."""

    lines: list[str]  # a line for each parameter, and one for monitors
    present: list[bool]  # whether each parameter has a gradient
    settings: dict[int, dict[str, Any]]  # of every group, by its index

    def digests(self, fresh: bool, device: torch.device) -> Tensor:
        """Filled on the device: a copy from the host would wait for it."""
        values = [value for group in self.settings.values() for value in group.values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        plain = [None if isinstance(value, Tensor) else value for value in values]
        numbers = (
            zlib.crc32("\n".join(self.lines).encode()) + FRESH * fresh,
            zlib.crc32(bytes(self.present)),
            zlib.crc32(repr(plain).encode()),
        )
        found = torch.cat([torch.full((1,), number, device=device) for number in numbers])
        if tensors:
            scalars = torch.stack([t.detach().to(device).double().reshape(()) for t in tensors])
            found[2] += bits(scalars)
        return found


class Answer(NamedTuple):
    """Whether ranks differed in a step, on its way to the host."""

    differs: Tensor
    event: Any
    report: Report


class Agreement:
    def __init__(self, rank_group: RankGroup, members: Sequence[SharedParameter]) -> None:
        self.rank_group = rank_group
        self.device = local(members[0].parameter).device
        self.lines = [described(shared) for shared in members]
        self.fresh = True
        self.pending: Answer | None = None

    def check(
        self, members: Sequence[SharedParameter], groups: Sequence[Group], observed: bool
    ) -> None:
        """Before anything moves. A host does not wait for a GPU: there the answer is looked at in
        the next step, but for a new plan at once."""
        if self.pending is not None:
            answer, self.pending = self.pending, None
            answer.event.synchronize()
            if bool(answer.differs):
                self._explain(answer.report, "in the last step ")
        report = Report(
            [*self.lines, "observed by a monitor" if observed else "not observed"],
            [shared.parameter.grad is not None for shared in members],
            dict(enumerate(map(settings_of, groups))),
        )
        mine = report.digests(self.fresh, self.device)
        codes = mine.new_empty(len(mine) * self.rank_group.size)
        all_gather(codes, mine, self.rank_group)
        codes = codes.view(self.rank_group.size, len(mine))
        if self.device.type == "cpu" or self.fresh:
            self._look(codes, members, report)
        else:
            self._look_later(codes, report)
        self.fresh = False

    def _look(self, codes: Tensor, members: Sequence[SharedParameter], report: Report) -> None:
        all_fresh = bool((codes[:, 0] >= FRESH).all())
        codes = torch.cat([codes[:, :1] % FRESH, codes[:, 1:]], dim=1)
        if bool((codes != codes[:1]).any()):
            if self.device.type != "cpu" and not all_fresh:  # the others are elsewhere already
                raise RuntimeError(f"ranks that share the optimizer's work disagree: {HOW}")
            self._explain(report)
        if all_fresh:
            self._compare_gradients(members)

    def _look_later(self, codes: Tensor, report: Report) -> None:
        differs = torch.empty((), dtype=torch.bool, pin_memory=True)
        same_plan = (codes[:, 0] % FRESH == codes[0, 0] % FRESH).all()
        same_rest = (codes[:, 1:] == codes[:1, 1:]).all()
        differs.copy_(~(same_plan & same_rest), non_blocking=True)
        event = torch.Event(self.device)
        event.record()
        self.pending = Answer(differs, event, report)

    def _everybody(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.rank_group.size
        dist.all_gather_object(found, mine, group=self.rank_group.group)
        return found

    def _explain(self, report: Report, when: str = "") -> None:
        settings = {i: _on_host(group) for i, group in report.settings.items()}
        found = [Report(*one) for one in self._everybody(tuple(report._replace(settings=settings)))]
        for check in (self._explain_plan, self._explain_settings, self._explain_gradients):
            check(found, when)

    def _explain_plan(self, found: list[Report], when: str) -> None:
        first, ranks = found[0].lines, self.rank_group.ranks
        for rank, report in zip(ranks, found, strict=True):
            for i in range(max(len(report.lines), len(first))):
                a, b = (x[i] if i < len(x) else "nothing" for x in (first, report.lines))
                if a != b:
                    raise RuntimeError(
                        f"{when}ranks that share the optimizer's work disagree: number {i} is {a} "
                        f"on rank {ranks[0]} and {b} on rank {rank}; {HOW}"
                    )

    def _explain_settings(self, found: list[Report], when: str) -> None:
        first, ranks = found[0].settings, self.rank_group.ranks
        for rank, report in zip(ranks, found, strict=True):
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

    def _explain_gradients(self, found: list[Report], when: str) -> None:
        for i, line in enumerate(found[0].lines[:-1]):
            having = [
                rank for rank, r in zip(self.rank_group.ranks, found, strict=True) if r.present[i]
            ]
            if having and len(having) < self.rank_group.size:
                missing = [rank for rank in self.rank_group.ranks if rank not in having]
                raise RuntimeError(
                    f"{when}parameter {line.split()[0]!r} has a gradient on ranks {having} and "
                    f"none on ranks {missing}: all ranks that share it step it, or none does; give "
                    "it a gradient (of zeros) everywhere, or none"
                )

    def _compare_gradients(self, members: Sequence[SharedParameter]) -> None:
        """Once for a plan: copies of a plain parameter are only copies if their gradients are."""
        plain = {
            shared.name: int(bits(shared.parameter.grad))
            for shared in members
            if not is_sharded(shared.parameter) and shared.parameter.grad is not None
        }
        for rank, theirs in zip(self.rank_group.ranks, self._everybody(plain), strict=True):
            for name in plain:
                if theirs[name] != plain[name]:
                    raise RuntimeError(
                        f"the gradient of parameter {name!r} is not the same on ranks "
                        f"{self.rank_group.ranks[self.rank_group.index]} and {rank}: average "
                        "gradients first, as DistributedDataParallel does, or pass "
                        "process_group=False to let every rank step alone"
                    )


def settings_of(group: Group) -> dict[str, Any]:
    """Lists as tuples: a state dict's are lists."""
    known = ((key, group[key]) for key in SETTINGS if key in group)
    return {key: tuple(x) if isinstance(x, list) else x for key, x in known}


def _on_host(group: dict[str, Any]) -> dict[str, Any]:
    return {key: x.item() if isinstance(x, Tensor) else x for key, x in group.items()}


def described(shared: SharedParameter) -> str:
    """Everything that decides which collectives a step makes, and of what size."""
    p, recipe = shared.parameter, shared.recipe
    where = f"{p.placements} on {tuple(p.device_mesh.shape)}" if is_sharded(p) else "plain"
    stages = (recipe.chart, recipe.normalize, recipe.radius, recipe.tangent)
    how = [_name(recipe.orthogonalize), *(name for stage in stages for name in _names(stage))]
    return (
        f"{shared.name} {tuple(p.shape)} {p.dtype}, {where}, {' '.join(how)}, {shared.layout}, "
        f"on the wire {shared.wire_dtype}, workspace {shared.group['workspace']}"
    )


def _name(polar: Orthogonalizer) -> str:
    return polar.name if isinstance(polar, Iteration) else polar.__name__


def _names(stage: Any) -> list[str]:
    """Of a stage and of the one inside it, where there is one."""
    return [] if stage is None else [type(stage).__name__, *_names(getattr(stage, "inner", None))]


def bits(t: Tensor) -> Tensor:
    """A position-weighted checksum of the tensor's bits, on its device."""
    words = t.detach().flatten().view(WORDS[t.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for i, chunk in enumerate(words.split(CHUNK)):
        weights = torch.arange(1, chunk.numel() + 1, device=t.device)
        total += (chunk.to(torch.int64) * weights).sum() * (i + 1)
    return total
