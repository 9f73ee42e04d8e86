"""A small experiment for the tests, and what a sweep of it leaves on disk.

    python -m tests.lab.sweeps.small OUT DATA

runs it with two worker processes, as a command would.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from angular_lab.experiments.definition import Arm, Experiment, trained_by
from angular_lab.sweeps.sweep import Sweep, run_sweeps
from angular_lab.sweeps.sweep_file import SweepRecord
from angular_lab.sweeps.workers import run_in_processes
from tests.lab.runs import tiny

KAPPA_1 = "angular_muown, kappa = 1"


def small(data: Path, **changes: Any) -> Experiment:
    """Six trials: three values, the best one on another seed, and a single value on both."""
    spec = tiny(data, save_every=None)
    arms = (
        Arm("adamw", trained_by(spec, "adamw"), (1e-3, 2e-3, 4e-3)),
        Arm(KAPPA_1, trained_by(spec, "angular_muown"), (0.02,)),
    )
    return replace(Experiment("small", "nano", "A test", arms, (4, 8), (0, 1)), **changes)


def long(data: Path) -> Experiment:
    """Runs that last a second or so: enough time to interrupt them."""
    return small(data, horizons=(40, 60))


def sweep(plan: Experiment, out: Path, **options: Any) -> Sweep:
    """Run a sweep to its end, in this process."""
    result = Sweep(plan, out, device="cpu")
    run_sweeps([result], **options)
    return result


def record(out: Path, name: str = "small-nano") -> SweepRecord:
    return SweepRecord.read(out / "sweeps" / f"{name}.json")


def metrics(out: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in out.glob("runs/*/metrics.jsonl")}


if __name__ == "__main__":
    run_in_processes([Sweep(long(Path(sys.argv[2])), Path(sys.argv[1]), device="cpu")], 2)
