"""Measurements of the paper's theory: run them in parallel and save each part as JSON."""

import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from angular_lab.errors import UserError
from angular_lab.theory.measure import geometry, guarantee, regimes, shortcut, solver

WORKERS = 2
log = logging.getLogger(__name__)
Task = tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]


def tasks(data: str, quick: bool) -> dict[str, list[Task]]:
    """Return the measurements of every part as (function, arguments) pairs."""
    horizons = (10, 20, 40) if quick else guarantee.HORIZONS
    return {
        "solver": [(solver.measure, (quick,))],
        "guarantee": [
            *((guarantee.measure_shape, (m, n, horizons)) for m, n in guarantee.SHAPES),
            (guarantee.measure_ranks, ((1, 2, 4), 20) if quick else ()),
        ],
        "regimes": [(regimes.measure, (300,) if quick else ())],
        "geometry": [(geometry.measure, (10, (0.01, 0.1)) if quick else ())],
        "shortcut": [(shortcut.measure, (data, quick))],
    }


def measure(parts: Sequence[str], results: Path, data: str = "stdlib", quick: bool = False) -> None:
    """Measure the named parts (default: all) and save results/PART.json.

    The part "page" measures nothing.
    """
    by_part = tasks(data, quick)
    for part in parts:
        if part not in (*by_part, "page"):
            raise UserError(f"unknown part '{part}': choose from {', '.join((*by_part, 'page'))}")
    results.mkdir(parents=True, exist_ok=True)
    # Spawn: a forked torch may hang in its threads. One thread each: idle ones would spin.
    with ProcessPoolExecutor(WORKERS, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = {
            part: [pool.submit(_timed, *task) for task in by_part[part]]
            for part in by_part
            if not parts or part in parts
        }
        for part in futures:
            _save(results / f"{part}.json", part, futures[part], quick)


def _timed(function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> dict[str, Any]:
    start = time.process_time()
    return {**function(*arguments), "seconds": round(time.process_time() - start, 1)}


def _save(path: Path, part: str, futures: Sequence[Future[dict[str, Any]]], quick: bool) -> None:
    """Merge the results of a part's tasks: add seconds, concatenate lists."""
    merged: dict[str, Any] = {}
    for future in futures:
        for key, value in future.result().items():
            adds = key == "seconds" or isinstance(value, list)
            merged[key] = merged[key] + value if adds and key in merged else value
    command = f"angular-lab theory {part}" + " --quick" * quick
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    content = {"command": command, **versions, **_rounded(merged)}
    path.write_text(json.dumps(content, indent=1) + "\n")
    log.info("%s: %.0f CPU seconds", path, merged["seconds"])


def _rounded(value: Any) -> Any:
    """Round every float to six digits: further ones are noise and differ between machines."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
