"""Speed-ups in tokens and in wall-clock, and why one cannot be computed."""

from statistics import median

from angular_lab import paper
from angular_lab.report_results import key_of, paper_note
from angular_lab.report_sweeps import SweepData
from angular_lab.report_tables import Mark, Row, Table, seeds_form
from angular_lab.statistics import Curve, SpeedUps, speed_up, speed_up_interval, wall_clock_speed_up


def curves(sweep: SweepData, label: str) -> dict[int, Curve]:
    """(tokens, cooled-down loss) over the horizons, by judging seed."""
    found: dict[int, Curve] = {}
    for seed, member in sweep.at_best(label).items():
        ends = [end for h in sweep.horizons if (end := member.final(h)) is not None]
        if seed in sweep.judges and ends:
            found[seed] = [(float(tokens), loss) for tokens, loss in ends]
    return found


def speed_table(sweep: SweepData) -> Table | None:
    """How many times fewer tokens, and seconds, our line needs for another's final loss."""
    if sweep.ours is None or len(sweep.horizons) < 2:
        return None
    others = [label for label in sweep.lines if label != sweep.ours]
    rows = [_row(sweep, sweep.ours, label) for label in others]
    if not rows:
        return None
    note = (
        f"Tokens of the other line over the tokens at which {sweep.ours}'s cooled-down curve, "
        "interpolated in log tokens, reaches the other's final loss. Interval: 95% bootstrap over "
        "seeds, which covers less than it says with two or three. Wall-clock: the same, times the "
        "ratio of median tokens/s."
    )
    note += f" {paper_note(sweep)}, computed in the same way." if _has_paper(sweep) else ""
    return Table(key_of(sweep, "speed-up"), f"Speed-up of {sweep.ours}", rows, note)


def _has_paper(sweep: SweepData) -> bool:
    return sweep.experiment == "teaser"


def _row(sweep: SweepData, ours: str, other: str) -> Row:
    found = speed_up_interval(curves(sweep, ours), curves(sweep, other))
    row: Row = {"over": other}
    row["in tokens"] = _times(found.mean, found) if found.mean else _cannot(_reasons(found))
    row["95% interval"] = _interval(found)
    row["seeds"] = seeds_form(sorted(found.by_seed))
    row["by seed"] = ", ".join(f"{s}: {x:.2f}" for s, x in found.by_seed.items()) or None
    row["seeds without one"] = _reasons(found) if found.mean and found.missing else None
    row["in wall-clock"] = _wall_clock(sweep, ours, other, found)
    if _has_paper(sweep) and other in paper.TEASER and ours in paper.TEASER:
        ratio = speed_up(paper.TEASER[ours].curve, paper.TEASER[other].curve)
        claimed = paper.CLAIMED_SPEED_UPS.get(other)
        row["the paper's figure, in tokens"] = Mark(ratio, "paper", f"{ratio:.2f}×")
        row["the paper's claim"] = Mark(claimed, "paper", f"about {claimed:g}×")
    return row


def _times(ratio: float, found: SpeedUps) -> Mark:
    """Without the seeds that never get there a mean is too high: it says how many it is of."""
    n, missing = len(found.by_seed), len(found.missing)
    return Mark(ratio, "", f"{ratio:.2f}×" + (f" ({n} of {n + missing} seeds)" if missing else ""))


def _cannot(why: str) -> str:
    return f"cannot be computed: {why}"


def _reasons(found: SpeedUps) -> str:
    return "; ".join(f"seed {seed}: {why}" for seed, why in found.missing.items()) or "no seed"


def _interval(found: SpeedUps) -> str | None:
    if found.interval is None:
        return None
    if len(found.by_seed) < 2:
        return "none: one seed"
    return f"{found.interval[0]:.2f} to {found.interval[1]:.2f}"


def line_speed(sweep: SweepData, label: str) -> tuple[float | None, set[str]]:
    """Median tokens/s of the line at its best value, and the devices that it ran on."""
    runs = [run for member in sweep.at_best(label).values() for run in member.runs]
    speeds = [speed for run in runs for speed in run.speeds]
    return (median(speeds) if speeds else None), {run.device for run in runs}


def _wall_clock(sweep: SweepData, ours: str, other: str, found: SpeedUps) -> Mark | str:
    if found.mean is None:
        return _cannot("there is no speed-up in tokens")
    (our_speed, our_devices), (speed, devices) = line_speed(sweep, ours), line_speed(sweep, other)
    for label, known in ((ours, our_speed), (other, speed)):
        if known is None:
            return _cannot(f"{label} has no timing.jsonl")
    if our_devices != devices or len(devices) > 1:
        return _cannot(f"they ran on {', '.join(sorted(our_devices | devices))}")
    assert our_speed is not None
    assert speed is not None
    return _times(wall_clock_speed_up(found.mean, our_speed, speed), found)
