"""Agreement: ranks that share work have the same parameters, and gradients for the same ones.

In every step each rank tells the others two numbers: a digest of its plan and one of which
parameters have gradients. More is said only where these differ.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from angular_muown.exchange import Work
from angular_muown.placement import is_sharded, local
from angular_muown.spread import Team
from angular_muown.wire import all_gather

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22  # entries of a gradient that are looked at at a time
FRESH = 1 << 40  # added to the digest of a plan that is used for the first time
HOW = (
    "give all of them the same groups in the same order, and the same monitors; or pass "
    "process_group=False to let every rank step its plain parameters alone"
)


class Answer(NamedTuple):
    """Whether ranks differed in a step, on its way to the host."""

    differs: Tensor
    event: Any
    present: list[bool]
    lines: list[str]


class Agreement:
    def __init__(self, team: Team, works: Sequence[Work]) -> None:
        self.team = team
        self.device = local(works[0].parameter).device
        self.lines = [described(work) for work in works]
        self.fresh = True
        self.pending: Answer | None = None

    def check(self, works: Sequence[Work], observed: bool) -> None:
        """Before anything moves. A host does not wait for a GPU: there the answer is looked at in
        the next step, but for a new plan at once."""
        if self.pending is not None:
            answer, self.pending = self.pending, None
            answer.event.synchronize()
            if bool(answer.differs):
                self._explain(answer.present, answer.lines, "in the last step ")
        lines = [*self.lines, "observed by a monitor" if observed else "not observed"]
        present = [work.parameter.grad is not None for work in works]
        codes = self._codes(lines, present)
        if self.device.type == "cpu" or self.fresh:
            self._look(codes, works, present, lines)
        else:
            self._look_later(codes, present, lines)
        self.fresh = False

    def _codes(self, lines: list[str], present: list[bool]) -> Tensor:
        """(ranks, 2). Filled on the device: a copy from the host would wait for it."""
        plan = zlib.crc32("\n".join(lines).encode()) + FRESH * self.fresh
        numbers = (plan, zlib.crc32(bytes(present)))
        mine = torch.cat([torch.full((1,), number, device=self.device) for number in numbers])
        found = mine.new_empty(2 * self.team.size)
        all_gather(found, mine, self.team)
        return found.view(-1, 2)

    def _look(
        self, codes: Tensor, works: Sequence[Work], present: list[bool], lines: list[str]
    ) -> None:
        plans, gradients = (codes[:, 0] % FRESH).tolist(), codes[:, 1].tolist()
        all_fresh = bool((codes[:, 0] >= FRESH).all())
        if len(set(plans)) > 1 or len(set(gradients)) > 1:
            if self.device.type != "cpu" and not all_fresh:  # the others are elsewhere already
                raise RuntimeError(f"ranks that share the optimizer's work disagree: {HOW}")
            self._explain(present, lines)
        if all_fresh:
            self._compare_gradients(works)

    def _look_later(self, codes: Tensor, present: list[bool], lines: list[str]) -> None:
        differs = torch.empty((), dtype=torch.bool, pin_memory=True)
        differs.copy_((codes % FRESH != codes[:1] % FRESH).any(), non_blocking=True)
        event = torch.Event(self.device)
        event.record()
        self.pending = Answer(differs, event, present, lines)

    def _everybody(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.team.size
        dist.all_gather_object(found, mine, group=self.team.group)
        return found

    def _explain(self, present: list[bool], lines: list[str], when: str = "") -> None:
        found = self._everybody((lines, present))
        (first, _), ranks = found[0], self.team.ranks
        for rank, (theirs, _) in zip(ranks, found, strict=True):
            for i in range(max(len(theirs), len(first))):
                a, b = (x[i] if i < len(x) else "nothing" for x in (first, theirs))
                if a != b:
                    raise RuntimeError(
                        f"{when}ranks that share the optimizer's work disagree: number {i} is {a} "
                        f"on rank {ranks[0]} and {b} on rank {rank}; {HOW}"
                    )
        for i, line in enumerate(lines[:-1]):
            having = [r for r, (_, theirs) in zip(ranks, found, strict=True) if theirs[i]]
            if having and len(having) < self.team.size:
                missing = [rank for rank in ranks if rank not in having]
                raise RuntimeError(
                    f"{when}parameter {line.split()[0]!r} has a gradient on ranks {having} and "
                    f"none on ranks {missing}: all ranks that share it step it, or none does; give "
                    "it a gradient (of zeros) everywhere, or none"
                )

    def _compare_gradients(self, works: Sequence[Work]) -> None:
        """Once for a plan: copies of a plain parameter are only copies if their gradients are."""
        plain = {
            work.name: bits(work.parameter.grad)
            for work in works
            if not is_sharded(work.parameter) and work.parameter.grad is not None
        }
        for rank, theirs in zip(self.team.ranks, self._everybody(plain), strict=True):
            for name in plain:
                if theirs[name] != plain[name]:
                    raise RuntimeError(
                        f"the gradient of parameter {name!r} is not the same on ranks "
                        f"{self.team.ranks[self.team.index]} and {rank}: average gradients first, "
                        "as DistributedDataParallel does, or pass process_group=False to let every "
                        "rank step alone"
                    )


def described(work: Work) -> str:
    """Everything that decides which collectives a step makes, and of what size."""
    p, recipe = work.parameter, work.recipe
    where = f"{p.placements} on {tuple(p.device_mesh.shape)}" if is_sharded(p) else "plain"
    stages = (recipe.chart, recipe.normalize, recipe.radius, recipe.tangent)
    how = [recipe.orthogonalize.__name__, *(name for stage in stages for name in _names(stage))]
    return (
        f"{work.name} {tuple(p.shape)} {p.dtype}, {where}, {' '.join(how)}, {work.layout}, "
        f"on the wire {work.wire}, workspace {work.group['workspace']}"
    )


def _names(stage: Any) -> list[str]:
    """Of a stage and of the one inside it, where there is one."""
    return [] if stage is None else [type(stage).__name__, *_names(getattr(stage, "inner", None))]


def bits(t: Tensor) -> int:
    """A sum that any different bit changes, nearly always."""
    words = t.detach().flatten().view(WORDS[t.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for i, chunk in enumerate(words.split(CHUNK)):
        weights = torch.arange(1, chunk.numel() + 1, device=t.device)
        total += (chunk.to(torch.int64) * weights).sum() * (i + 1)
    return int(total)
