"""Speeds, speed-ups in tokens and in wall-clock, and why one cannot be computed."""

from statistics import median

from angular_lab.experiments import published as paper
from angular_lab.experiments.statistics import (
    Curve,
    SpeedUps,
    speed_up,
    speed_up_interval,
    wall_clock_speed_up,
)
from angular_lab.report.results import key_of, paper_note
from angular_lab.report.runs import Run
from angular_lab.report.sweeps import SweepData
from angular_lab.report.tables import Mark, Row, Table, seeds_form, tokens_form


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
        "interpolated in log tokens, reaches the other's final loss. Interval: Student's, of the "
        "mean over seeds."
    )
    if any_alone(sweep):
        note += (
            " Wall-clock: the same, times the ratio of median tokens/s, of what was logged with no "
            "other run of the lab on the device."
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
    if any_alone(sweep):
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
        return "none: one seed" if found.by_seed else None
    return f"{found.interval[0]:.2f} to {found.interval[1]:.2f}"


def lone_speed(sweep: SweepData, label: str) -> tuple[float | None, set[str]]:
    """Median tokens/s of the line at its best value, where it had the device to itself, and the
    devices that it ran on."""
    runs = _runs(sweep, label)
    speeds = [speed for run in runs for speed in run.alone]
    return (median(speeds) if speeds else None), {run.device for run in runs}


def any_alone(sweep: SweepData) -> bool:
    """Whether a run at its line's best value is known to have had its device to itself."""
    return any(run.alone for label in sweep.lines for run in _runs(sweep, label))


def _runs(sweep: SweepData, label: str) -> list[Run]:
    """Those that were made here: another sweep's may have shared its device with more."""
    found = (run for member in sweep.at_best(label).values() for run in member.normal)
    return [run for run in found if not run.made_in]


def pace_table(sweep: SweepData) -> Table | None:
    """How fast the lines ran, and what that makes of the last horizon's tokens. None where all
    shared their devices: who was beside whom would decide."""
    tokens = sweep.tokens(sweep.horizons[-1])
    rows = [_pace(sweep, label, tokens) for label in sweep.lines]
    if tokens is None or not any(row["tokens/s"] for row in rows):
        return None
    note = (
        "Median of the tokens per second that the runs at the best value logged with no other run "
        "of the lab on the device: beside others it is the speed of a share. Slowest and fastest: "
        "medians of single runs. Minutes: the tokens at the line's median, which leaves start-up "
        "and rare evaluations out."
    )
    return Table(key_of(sweep, "pace"), "Speed of training", rows, note)


def _pace(sweep: SweepData, label: str, tokens: float | None) -> Row:
    runs = _runs(sweep, label)
    by_run = [median(run.alone) for run in runs if run.alone]
    speeds = [speed for run in runs for speed in run.alone]
    speed = median(speeds) if speeds else None
    row: Row = {"line": label, "tokens/s": speed, "runs": len(by_run)}
    row["at once"] = _span({count for run in runs for count in run.at_once})
    row["slowest run"] = min(by_run, default=None)
    row["fastest run"] = max(by_run, default=None)
    minutes = tokens / speed / 60 if tokens and speed else None
    row[f"minutes to {tokens_form(tokens)} tokens"] = minutes
    if sweep.ours is not None:
        pair = _speeds(sweep, sweep.ours, label)
        relative = _cannot(pair) if isinstance(pair, str) else _relative(pair[0] / pair[1])
        row[f"time relative to {sweep.ours}"] = relative
    row["device"] = ", ".join(sorted({run.device for run in runs})) or None
    return row


def _span(counts: set[int]) -> str | None:
    if not counts:
        return None
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _relative(ratio: float) -> Mark:
    return Mark(ratio, "", f"{ratio:.3f}×")


def _speeds(sweep: SweepData, ours: str, other: str) -> tuple[float, float] | str:
    """Tokens/s of both lines, or why they cannot be compared."""
    (our_speed, our_devices), (speed, devices) = lone_speed(sweep, ours), lone_speed(sweep, other)
    if our_speed is None or speed is None:
        without = ours if our_speed is None else other
        return f"{without} has no {_lacks(sweep, without)}"
    if our_devices != devices or len(devices) > 1:
        return f"they ran on {', '.join(sorted(our_devices | devices))}"
    return our_speed, speed


def _lacks(sweep: SweepData, label: str) -> str:
    if runs := _runs(sweep, label):
        logged = any(run.speeds for run in runs)
        return "speed logged with the device to itself" if logged else "timing.jsonl"
    taken = any(member.normal for member in sweep.at_best(label).values())
    return "run that was made in this sweep" if taken else "finished run"


def _wall_clock(sweep: SweepData, ours: str, other: str, found: SpeedUps) -> Mark | str:
    if found.mean is None:
        return _cannot("there is no speed-up in tokens")
    pair = _speeds(sweep, ours, other)
    if isinstance(pair, str):
        return _cannot(pair)
    return _times(wall_clock_speed_up(found.mean, *pair), found)
