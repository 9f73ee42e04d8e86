"""The command: measure what was asked for on two processes, keep it as JSON, make the page."""

import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from angular_lab.theory import geometry, guarantee, regimes, shortcut, solver
from angular_lab.theory.page import PARTS, make_page

WORKERS = 2
Task = tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]


def tasks(part: str, data: str, quick: bool) -> list[Task]:
    """What is measured for a part; results of several tasks are joined, lists one after another."""
    horizons = (10, 20, 40) if quick else guarantee.HORIZONS
    ranks = ((1, 2, 4), 20) if quick else ()
    spec = shortcut.tiny_spec(data) if quick else shortcut.nano_spec(data)
    planned: dict[str, list[Task]] = {
        "guarantee": [
            *((guarantee.shape_cells, (m, n, horizons)) for m, n in guarantee.SHAPES),
            (guarantee.rank_cells, ranks),
        ],
        "shortcut": [(shortcut.measure, (spec, (1, 3, 6) if quick else shortcut.LOOKS))],
        "regimes": [(regimes.measure, (300,) if quick else ())],
        "geometry": [(geometry.measure, (10, (0.01, 0.1)) if quick else ())],
        "solver": [(solver.measure, (quick,))],
    }
    return planned[part]


def run_theory(
    parts: Sequence[str], results: Path, out: Path, data: str = "stdlib", quick: bool = False
) -> Path:
    """Measures the parts (all, if none is named), writes results/PART.json and the page from all
    the files that there are. The part "page" measures nothing."""
    wanted = [part for part in PARTS if not parts or part in parts]
    for word in parts:
        if word not in (*PARTS, "page"):
            raise ValueError(f"unknown part '{word}': there are {', '.join((*PARTS, 'page'))}")
    results.mkdir(parents=True, exist_ok=True)
    # Spawned, with one thread each: threads of a forked torch may hang, and waiting ones spin.
    with ProcessPoolExecutor(WORKERS, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        started = {
            part: [pool.submit(_timed, *task) for task in tasks(part, data, quick)]
            for part in wanted
        }
        for part, futures in started.items():
            _keep(results / f"{part}.json", part, futures, quick)
    return make_page(results, out)


def _timed(measure: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> dict[str, Any]:
    start = time.process_time()
    return {**measure(*arguments), "seconds": round(time.process_time() - start, 1)}


def _keep(path: Path, part: str, futures: Sequence[Future[dict[str, Any]]], quick: bool) -> None:
    joined: dict[str, Any] = {}
    for future in futures:
        for key, value in future.result().items():
            adds = key == "seconds" or isinstance(value, list)
            joined[key] = joined[key] + value if adds and key in joined else value
    command = f"angular-lab theory {part}" + " --quick" * quick
    made = {"command": command, "torch": torch.__version__, "python": platform.python_version()}
    path.write_text(json.dumps({**made, **_short(joined)}, indent=1) + "\n")
    print(f"{path}: {joined['seconds']:.0f} CPU seconds", file=sys.stderr)


def _short(value: Any) -> Any:
    """Six digits: more is noise, and it would change with every machine."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
