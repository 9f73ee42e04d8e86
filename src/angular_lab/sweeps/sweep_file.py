"""The file of a sweep, `sweeps/<name>.json`: its arms, its trials, and the runs that they refer to.

Runs live in `runs/` next to `sweeps/`, and several sweeps may refer to the same one. No torch here.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from angular_lab.errors import UserError
from angular_lab.records import DAMAGED, check_format, from_json
from angular_lab.run_folder import CONVERT, write_atomically

FORMAT = 2
SWEEPS = "sweeps"  # the folder of all sweeps of a store
OLD_FILE = "sweep.json"  # of the first edition, in a folder together with the sweep's runs


class DamagedFileError(UserError):
    """A sweep's file is not what this package writes."""


@dataclass(frozen=True)
class ArmRecord:
    label: str
    optimizer: str
    axis: str  # the setting that `values` are of
    values: tuple[float, ...]  # with those added at an edge of the grid
    variant_of: str | None = None


@dataclass(frozen=True)
class TrialRecord:
    """An arm at a value with a seed, and the names of its runs."""

    arm: str
    value: float
    seed: int
    runs: dict[int, str]  # by horizon
    trunk: str | None = None  # the run that these branch from

    @property
    def all_runs(self) -> list[str]:
        return [*([self.trunk] if self.trunk else []), *self.runs.values()]


@dataclass(frozen=True)
class SweepRecord:
    experiment: str
    scale: str
    title: str
    data: str  # fingerprint of the tokens
    horizons: tuple[int, ...]
    seeds: tuple[int, ...]  # the first one chooses values, the others judge
    arms: tuple[ArmRecord, ...]
    trials: tuple[TrialRecord, ...]
    chosen: dict[str, float]  # best value by arm, once all of its values are done
    ours: str | None = None  # the arm that the others are compared with
    pairs: tuple[tuple[str, str], ...] = ()  # which arm is expected below which
    tuning_seed: int | None = None  # the seed that chose the learning rates held, in another sweep
    added_seeds: tuple[int, ...] = ()  # judging seeds that open pairs got in addition
    format: int = FORMAT

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> "SweepRecord":
        try:
            content = json.loads(path.read_text())
            if "format" not in content and "entries" in content:
                raise UserError(
                    f"{path} was written by an earlier version: convert it and its runs with "
                    f"{CONVERT} {path.parent} --out STORE"
                )
            check_format(content, FORMAT, path)
            return from_json(SweepRecord, content)
        except DAMAGED as error:
            raise DamagedFileError(f"{path} cannot be read ({error!r})") from None
