"""Agreement: ranks that share work have the same parameters, and gradients for the same ones."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from angular_muown.exchange import Work
from angular_muown.placement import is_sharded, local
from angular_muown.spread import Team
from angular_muown.wire import all_gather

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Agreement:
    def __init__(self, team: Team, works: Sequence[Work]) -> None:
        self.team = team
        self.names = [work.name for work in works]
        self.device = local(works[0].parameter).device
        self.flag: tuple[Tensor, Any] | None = None  # from the last step, on its way to the host
        self.codes: dict[int, Tensor] = {}
        self.lines = [_described(work) for work in works]
        self._compare_plans()
        self._compare_gradients(works)

    def _everybody(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.team.size
        dist.all_gather_object(found, mine, group=self.team.group)
        return found

    def _compare_plans(self) -> None:
        """Once for a plan: a digest, and where it differs all of it."""
        digest = zlib.crc32("\n".join(self.lines).encode())
        if len(set(self._everybody(digest))) == 1:
            return
        lines = self._everybody(self.lines)
        for rank, theirs in zip(self.team.ranks, lines, strict=True):
            for i in range(max(len(theirs), len(lines[0]))):
                a, b = (found[i] if i < len(found) else "nothing" for found in (lines[0], theirs))
                if a != b:
                    raise RuntimeError(
                        f"ranks that share the optimizer's work disagree: parameter {i} is {a} on "
                        f"rank {self.team.ranks[0]} and {b} on rank {rank}; give all of them the "
                        "same groups in the same order, or pass process_group=False to let every "
                        "rank step its plain parameters alone"
                    )

    def _compare_gradients(self, works: Sequence[Work]) -> None:
        """Once for a plan: copies of a plain parameter are only copies if their gradients are."""
        plain = {
            work.name: _bits(work.parameter.grad)
            for work in works
            if not is_sharded(work.parameter) and work.parameter.grad is not None
        }
        found = self._everybody(plain)
        for rank, theirs in zip(self.team.ranks, found, strict=True):
            for name in plain.keys() & theirs.keys():
                if theirs[name] != plain[name]:
                    raise RuntimeError(
                        f"the gradient of parameter {name!r} is not the same on ranks "
                        f"{self.team.ranks[self.team.index]} and {rank}: average gradients first, "
                        "as DistributedDataParallel does, or pass process_group=False to let every "
                        "rank step alone"
                    )

    def check(self, present: list[bool]) -> None:
        """Whether all have gradients for the same parameters. Without a host that waits for a
        GPU: there the answer is looked at in the next step."""
        if self.flag is not None:
            answer, event = self.flag
            event.synchronize()
            if bool(answer):
                self._explain(present)
        code = zlib.crc32(bytes(present))
        if code not in self.codes:  # a number from the host makes it wait for the device
            self.codes[code] = torch.tensor([code], device=self.device)
        mine = self.codes[code]
        all_of_them = mine.new_empty(self.team.size)
        all_gather(all_of_them, mine, self.team)
        differs = (all_of_them != mine).any()
        if self.device.type == "cpu":
            if bool(differs):
                self._explain(present)
            return
        answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        answer.copy_(differs, non_blocking=True)
        event = torch.Event(self.device)
        event.record()
        self.flag = answer, event

    def _explain(self, present: list[bool]) -> None:
        found = self._everybody(present)
        for i, name in enumerate(self.names):
            having = [r for r, theirs in zip(self.team.ranks, found, strict=True) if theirs[i]]
            if having and len(having) < self.team.size:
                missing = [rank for rank in self.team.ranks if rank not in having]
                raise RuntimeError(
                    f"parameter {name!r} has a gradient on ranks {having} and none on ranks "
                    f"{missing}: all ranks that share it step it, or none does; give it a "
                    "gradient (of zeros) everywhere, or none"
                )
        raise RuntimeError(
            "in the last step ranks had gradients for different parameters; in this one they agree"
        )


def _described(work: Work) -> str:
    p = work.parameter
    place = f", {p.placements}" if is_sharded(p) else ""
    how = f"{work.recipe.orthogonalize.__name__}, {work.layout}, on the wire {work.wire}"
    return f"{work.name} {tuple(p.shape)} {p.dtype}{place}, {how}"


def _bits(t: Tensor | None) -> int:
    """A sum that any different bit changes, nearly always."""
    assert t is not None
    bits = t.detach().flatten().view(WORDS[t.element_size()]).to(torch.int64)
    return int((bits * torch.arange(1, bits.numel() + 1, device=t.device)).sum())
