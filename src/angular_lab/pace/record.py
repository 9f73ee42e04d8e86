"""A measured pace as a file: settings, machine, every time, and the numbers that follow from them.

A pace is the only source of factors in wall-clock time: a run may have shared its device. No torch
here.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, NamedTuple

from angular_lab.config.named_runs import NAMED_RUNS
from angular_lab.config.spec import OptimSpec, Spec
from angular_lab.errors import UserError
from angular_lab.pace.disturbances import disturbances
from angular_lab.records import DAMAGED, check_format, from_json
from angular_lab.run_folder import write_atomically
from angular_lab.status.device_use import DeviceUse

FORMAT = 1
LIST = re.compile(r"\[([^\[\]{}]*)\]")  # of plain values, in JSON
PACE = "pace"  # the folder of these files in a working directory
SHARED = "-shared"  # ends the name of a file whose times are not those of one process alone
# Settings on which the time of a step does not depend: values of an optimizer, lengths, names,
# where the data is, and what happens between steps. A new setting counts unless it is added here.
OPTIM_VALUES = frozenset({
    "lr", "aux_lr", "radius_lr", "weight_decay", "aux_weight_decay", "momentum", "beta1", "beta2",
    "decay_scale", "decay_degree", "row_beta", "aux_beta2", "momentum_start", "momentum_ramp",
})  # fmt: skip
TIMELESS = frozenset({
    "name", "data", "steps", "seed", "eval_every", "eval_tokens", "save_every", "keep", "pins",
    "log_every", "sample_every", "angle_every", "on_nan", "parallel", "loggers", "parent",
    "parent_step", "optim", "schedule", "dashboard",
})  # fmt: skip


class Quartiles(NamedTuple):
    first: float
    median: float
    third: float


@dataclass(frozen=True)
class Timed:
    """An optimizer, and the seconds of each of its steps, round by round."""

    optim: OptimSpec
    seconds: tuple[tuple[float, ...], ...]
    memory_gib: float | None = None  # peak on a GPU: weights, gradients, state, activations

    @property
    def name(self) -> str:
        return self.optim.name

    @property
    def by_round(self) -> list[float]:
        """Mean seconds per step of each round."""
        return [fmean(seconds) for seconds in self.seconds]


@dataclass(frozen=True)
class Pace:
    spec: Spec
    device: str
    reference: str  # the optimizer to which the others are compared
    warmup: int  # steps of each optimizer before the first round
    lead_in: int  # steps at the start of a turn that are not timed
    order: tuple[tuple[str, ...], ...]  # of the turns, in every round
    timed: tuple[Timed, ...]
    threads: int  # cores that this process needs
    use: tuple[DeviceUse, ...]  # before the start, and after every round
    versions: dict[str, str]
    git: dict[str, Any]
    data: str  # fingerprint of the tokens
    seed: int = 0  # of the order
    format: int = FORMAT

    @cached_property
    def disturbed_by(self) -> list[str]:
        """Why the times are not those of one process alone; [] if they are."""
        return disturbances(self.use[0], self.use[1:], self.threads)

    def of(self, name: str) -> Timed:
        return next(timed for timed in self.timed if timed.name == name)

    def ratios(self, timed: Timed, to: Timed) -> Quartiles:
        """Return the time per step of one optimizer over another's, paired by round."""
        pairs = zip(timed.by_round, to.by_round, strict=True)
        return quartiles([a / b for a, b in pairs])

    def find(self, spec: Spec) -> Timed | None:
        """Return the times of the steps that this spec takes; None if they were not measured."""
        if _time_settings(spec) != _time_settings(self.spec):
            return None
        wanted = _optim_settings(spec.optim)
        return next((x for x in self.timed if _optim_settings(x.optim) == wanted), None)

    def rows(self) -> list[dict[str, Any]]:
        """Return what was measured of each optimizer, for tables and programs."""
        reference = self.of(self.reference)
        rows = []
        for timed in self.timed:
            ms = Quartiles(*(1e3 * value for value in quartiles(timed.by_round)))
            rows.append(
                {
                    "optimizer": timed.name,
                    "ms": ms._asdict(),
                    "tokens_per_second": 1e3 * self.spec.tokens_per_step / ms.median,
                    "time_ratio": self.ratios(timed, reference)._asdict(),
                    "memory_gib": timed.memory_gib,
                }
            )
        return rows

    def write(self, folder: Path) -> Path:
        """Write the file. One with undisturbed times is never replaced by one without."""
        parts = (self.spec.name, _changes(self.spec), self.device)
        name = "-".join(slug(part) for part in parts if part) + SHARED * bool(self.disturbed_by)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1)
        on_one_line = LIST.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
        write_atomically(folder / f"{name}.json", on_one_line + "\n")
        return folder / f"{name}.json"

    @staticmethod
    def read(path: Path) -> "Pace":
        try:
            content = json.loads(path.read_text())
            check_format(content, FORMAT, path)
            return from_json(Pace, content)
        except DAMAGED as error:
            raise UserError(f"{path} cannot be read as a pace: {error}") from None


def quartiles(values: Sequence[float]) -> Quartiles:
    return Quartiles(*quantiles(values, n=4, method="inclusive"))


def slug(text: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    return "-".join(words)


def _changes(spec: Spec) -> str:
    """Return a digest of the settings if steps do not take the time of the named run's; else ""."""
    usual = NAMED_RUNS[spec.name]() if spec.name in NAMED_RUNS else Spec()
    settings = [_time_settings(x) | _optim_settings(x.optim) for x in (spec, usual)]
    if settings[0] == settings[1]:
        return ""
    content = json.dumps(settings[0], sort_keys=True, default=asdict)
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def _time_settings(spec: Spec) -> dict[str, Any]:
    return {f.name: getattr(spec, f.name) for f in fields(spec) if f.name not in TIMELESS}


def _optim_settings(optim: OptimSpec) -> dict[str, Any]:
    return {f.name: getattr(optim, f.name) for f in fields(optim) if f.name not in OPTIM_VALUES}
