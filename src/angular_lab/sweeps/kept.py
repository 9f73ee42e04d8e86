"""What a sweep's folder lists as finished: a plan that does not have it must not hide it.

Names stand for what is in a folder, so the same experiment on other tokens, or after a change, has
other runs. Its manifest would be of those alone, and a report would show nothing of the rest.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angular_lab.experiments.definition import Experiment
from angular_lab.run_folder import DIVERGED, SWEEP, RunDir, trunk_name


@dataclass(frozen=True)
class Kept:
    """A finished run as the manifest has it."""

    experiment: str
    scale: str
    folder: Path  # of its trunk, where it has one
    label: str
    ends: tuple[Path, ...]


def kept(root: Path) -> list[Kept]:
    """Those that are finished, as their folders tell: the manifest may be older. A damaged one
    lists none: it is written anew."""
    try:
        content = json.loads((root / SWEEP).read_text())
        of = content["experiment"], content["scale"]
        found = [_read(root, e, *of) for e in content["entries"]]
    except NotADirectoryError:
        raise ValueError(f"--out {root}: it is a file, and a sweep takes a folder") from None
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [run for run in found if _is_finished(run)]


def _read(root: Path, entry: dict[str, Any], experiment: str, scale: str) -> Kept:
    ends = tuple(root / name for name in entry["folders"].values())
    return Kept(experiment, scale, root / trunk_name(entry), entry["label"], ends)


def _is_finished(run: Kept) -> bool:
    if (run.folder / DIVERGED).exists():
        return True
    return bool(run.ends) and all(RunDir(end).done for end in run.ends)


def would_hide(plan: Experiment, data: str, runs: Sequence[Kept]) -> ValueError:
    """That a sweep by this plan would leave these out, and why it probably does not have them."""
    first = runs[0]
    them = "1 finished run," if len(runs) == 1 else f"{len(runs)} finished runs, such as"
    them += f" {first.folder.name}"
    there = _data(first)
    here = data or next((n.spec.data for n in plan.lines if n.label == first.label), there)
    if (first.experiment, first.scale) != (plan.name, plan.scale):
        why = f"made by {first.experiment}, scale {first.scale}: give another --out"
    elif there and there != here:
        why = (
            f"made with data={there}, and this sweep has data={here}: give --data {there}, or "
            "another --out"
        )
    else:
        why = (
            "the plan has changed since: use the version of the package that had it, or give "
            "another --out"
        )
    return ValueError(f"{first.folder.parent}: its {SWEEP} would leave out {them}; {why}")


def _data(run: Kept) -> str:
    """ "" where it does not tell: it broke down at once, or another version wrote its spec."""
    try:
        return RunDir(run.ends[0]).read_spec().data
    except ValueError:
        return ""
