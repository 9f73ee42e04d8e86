"""A small sweep for the tests, and what is left of it on disk.

    python -m tests.lab.sweeps.sweeps FOLDER DATA

makes it with two processes of its own, as a command would.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from angular_lab.experiments.definition import Experiment, Line, trained_by
from angular_lab.sweeps.sweep import Sweep
from angular_lab.sweeps.workers import run_in_processes
from tests.lab.runs import tiny


def small(data: Path, **changes: Any) -> Experiment:
    spec = tiny(data, save_every=0)
    rows = (
        Line("adamw", trained_by(spec, "adamw"), (1e-3, 2e-3, 4e-3)),
        Line("angular_muown, kappa = 1", trained_by(spec, "angular_muown"), (0.02,)),
    )
    return replace(Experiment("small", "nano", "A test", rows, (4, 8), (0, 1)), **changes)


def long(data: Path) -> Experiment:
    """Runs that last a second or so: time enough to do something to them."""
    return small(data, horizons=(40, 60))


def manifest(root: Path) -> dict[str, Any]:
    return json.loads((root / "sweep.json").read_text())


def metrics(root: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in root.glob("*/metrics.jsonl")}


if __name__ == "__main__":
    run_in_processes([Sweep(long(Path(sys.argv[2])), Path(sys.argv[1]), device="cpu")], 2)
