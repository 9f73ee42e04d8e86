"""Angles of every matrix over the steps of a run, as a heat map."""

import re
from collections.abc import Sequence
from itertools import pairwise
from math import isnan, nan

from angular_lab.report.figures.plots import Figure, Image, Panel
from angular_lab.run_folder import Run, RunFolder, read_lines

LAYER = re.compile(r"(?:^|\.)(\d+)\.")  # the first number in a parameter's name
COLUMNS = 300  # more cannot be told apart


def angles_of(runs: Sequence[Run], warnings: list[str]) -> dict[int, dict[str, float]]:
    """Return the angles by step and parameter along runs that continue each other."""
    found: dict[int, dict[str, float]] = {}
    for run in runs:
        start = run.spec.parent_step
        found = {step: x for step, x in found.items() if step <= start or not start}
        for line in read_lines(RunFolder(run.folder).angles_path, warnings):
            angles = line.get("angles", {}).items()
            found[line["step"]] = {name: x for name, x in angles if x is not None and x > 0}
    return {step: angles for step, angles in sorted(found.items()) if angles}


def role_of(parameter: str) -> str:
    """Return a parameter's name without its layer and what all names share: attn.qkv."""
    return LAYER.split(parameter)[-1].removesuffix(".weight")


def layer_of(parameter: str) -> int:
    """Return the number of a parameter's layer; -1 if it belongs to none."""
    match = LAYER.search(parameter)
    return int(match.group(1)) if match else -1


def heat_map(runs: Sequence[Run], key: str, what: str, warnings: list[str]) -> Figure | None:
    """Return the figure of runs that continue each other; None if they measured no angles."""
    angles = angles_of(runs, warnings)
    steps = [*angles][:: 1 + len(angles) // COLUMNS]
    if len(steps) < 2:
        return None
    names = [*dict.fromkeys(name for step in steps for name in angles[step])]
    roles = [*dict.fromkeys(map(role_of, names))]
    names.sort(key=lambda name: (roles.index(role_of(name)), layer_of(name)))
    rows = [[angles[step].get(name, nan) for step in steps] for name in names]
    groups = [(role, sum(role_of(name) == role for name in names)) for role in roles]
    image = Image(_edges(steps), rows, groups, "mean angle (rad)", _lowest(rows))
    layers = sorted({layer_of(name) for name in names if layer_of(name) >= 0})
    listed = f", layers {layers[0]} to {layers[-1]} from top to bottom" if layers else ""
    caption = (
        f"Mean angle by which a step turns the rows of each matrix, on a logarithmic scale: {what}."
        f" Each band is one kind of matrix{listed}. The smallest angles, mostly of the cooldown's "
        "end, share the darkest colour."
    )
    return Figure(key, Panel((), "step", "", image=image), caption)


def _lowest(rows: Sequence[Sequence[float]]) -> float:
    """Return where the colours begin. The angles of a cooldown fall to zero, and the others would
    all look alike."""
    values = sorted(value for row in rows for value in row if not isnan(value))
    return min(values[len(values) // 20], 0.5 * values[-1])


def _edges(steps: Sequence[int]) -> list[float]:
    """Return the borders between columns: half-way between measured steps."""
    inner = [(a + b) / 2 for a, b in pairwise(steps)]
    return [steps[0] - (inner[0] - steps[0]), *inner, steps[-1] + (steps[-1] - inner[-1])]
