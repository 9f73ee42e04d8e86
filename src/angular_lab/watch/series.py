"""The curves of a run, as the page asks for them: all of them once, then only what is new."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from angular_lab.config.spec import Spec
from angular_lab.errors import UserError
from angular_lab.run_folder import RunFolder
from angular_lab.watch.tail import Position, number, read_after

KEYS = ("loss", "val_loss", "angle_mean", "kappa", "lr", "grad_norm", "row_norm_mean")
SPEED, TIME = "tokens_per_second", "seconds"
LIMIT = 2000  # points of a curve in one answer
DIGITS = 7  # significant

Curve = tuple[list[int], list[float]]  # steps and values


@dataclass(frozen=True)
class Cursor:
    """What the page has of a run."""

    metrics: Position = field(default_factory=Position)
    timing: Position = field(default_factory=Position)
    earlier: float = 0.0  # seconds of the attempts before the present one
    seconds: float = 0.0  # of the present attempt

    def __str__(self) -> str:
        positions = [*self.metrics.numbers, *self.timing.numbers]
        return ",".join(map(str, [*positions, self.earlier, self.seconds]))

    @staticmethod
    def parse(text: str) -> "Cursor":
        if not text or text == "0":
            return Cursor()
        try:
            a, b, c, d, e, f, earlier, seconds = text.split(",")
            metrics, timing = Position(int(a), int(b), int(c)), Position(int(d), int(e), int(f))
            return Cursor(metrics, timing, float(earlier), float(seconds))
        except ValueError:
            raise UserError(f"after={text}: give 0, or the cursor of the answer before") from None


def read_series(run: RunFolder, spec: Spec, after: Cursor, limit: int = LIMIT) -> dict[str, Any]:
    """Return the curves after a cursor: [steps, values] by name, with at most `limit` points each.

    If a log was rewritten, the answer says `restarted` and has both logs from their start.
    """
    metrics = read_after(run.metrics_path, after.metrics)
    timing = read_after(run.timing_path, after.timing)
    restarted = metrics.restarted or timing.restarted
    if restarted:
        after = Cursor()
        metrics = read_after(run.metrics_path, after.metrics)
        timing = read_after(run.timing_path, after.timing)
    curves = {key: _curve(metrics.lines, key) for key in KEYS}
    if not curves["kappa"][0]:
        curves["kappa"] = _computed_kappa(spec, metrics.lines)
    curves[SPEED] = _curve(timing.lines, SPEED)
    cursor = replace(after, metrics=metrics.end, timing=timing.end)
    curves[TIME], cursor = _training_time(timing.lines, cursor)
    thinned = {key: thin(*curve, limit) for key, curve in curves.items() if curve[0]}
    return {"restarted": restarted, "cursor": str(cursor), "series": thinned}


def _curve(lines: Iterable[dict[str, Any]], key: str) -> Curve:
    points = [
        (line["step"], float(f"{value:.{DIGITS}g}"))
        for line in lines
        if isinstance(line.get("step"), int) and (value := number(line, key)) is not None
    ]
    return [step for step, _ in points], [value for _, value in points]


def _computed_kappa(spec: Spec, lines: Iterable[dict[str, Any]]) -> Curve:
    """Return kappa where it is not logged; empty for an optimizer without one."""
    steps = [line["step"] for line in lines if isinstance(line.get("step"), int)]
    values = [spec.kappa(step) for step in steps]
    if None in values:
        return [], []
    return steps, [float(f"{value:.{DIGITS}g}") for value in values if value is not None]


def _training_time(lines: Iterable[dict[str, Any]], cursor: Cursor) -> tuple[Curve, Cursor]:
    """Return the seconds of training by step. The log of a resumed run starts again at zero."""
    earlier, last = cursor.earlier, cursor.seconds
    steps, seconds = _curve(lines, TIME)
    total = []
    for value in seconds:
        earlier += last if value < last else 0.0
        last = value
        total.append(float(f"{earlier + value:.{DIGITS}g}"))
    return (steps, total), replace(cursor, earlier=earlier, seconds=last)


def thin(steps: Sequence[int], values: Sequence[float], limit: int) -> tuple[Any, Any]:
    """Return at most `limit` points: the first, the last, and the least and the greatest of each
    interval between them."""
    if len(steps) <= limit:
        return steps, values
    inside = range(1, len(steps) - 1)
    intervals = max(1, (limit - 2) // 2)
    kept = {0, len(steps) - 1}
    for i in range(intervals):
        part = inside[i * len(inside) // intervals : (i + 1) * len(inside) // intervals]
        kept |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    order = sorted(kept)
    return [steps[i] for i in order], [values[i] for i in order]
