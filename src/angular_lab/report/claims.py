"""Verdicts: every claim of the paper, and our line against each other one, on what the runs say."""

from collections.abc import Sequence
from dataclasses import dataclass

from angular_lab.experiments import published as paper
from angular_lab.experiments.extensions import PUBLISHED
from angular_lab.experiments.intervals import student_interval
from angular_lab.experiments.statistics import Outcome, verdict
from angular_lab.report.checks import CHECKS, NEARLY
from angular_lab.report.results import key_of
from angular_lab.report.sweeps import SweepData
from angular_lab.report.tables import Mark, Row, Table, seeds_form, tokens_form

WIDTH = "width transfer"  # paper.py's name for the sweep "width"


@dataclass(frozen=True)
class Ruling:
    claim: str
    outcome: Outcome
    reason: str


def rulings(sweep: SweepData) -> list[Ruling]:
    """The paper's claims about this experiment."""
    name = WIDTH if sweep.experiment == "width" else sweep.experiment
    claims = [claim for claim in paper.CLAIMS if claim.experiment == name]
    checks = CHECKS.get(name, ())
    return [Ruling(c.text, *check(sweep)) for c, check in zip(claims, checks, strict=True)]


def pairs(sweep: SweepData) -> list[tuple[str, str]]:
    """What is compared: our line with each other; and what an ablation was made for."""
    if sweep.experiment == "width":
        return []  # models of other sizes: their losses are not meant to be equal
    if PUBLISHED in sweep.lines:
        return [(label, PUBLISHED) for label in sweep.lines if label != PUBLISHED]
    if sweep.ours is None:
        return []
    found = [(sweep.ours, label) for label in sweep.lines if label != sweep.ours]
    if sweep.experiment == "split-qkv":
        split = [label for label in sweep.lines if label.endswith(", split")]
        found = [(x, x.replace(", split", ", fused")) for x in split]
    return found


PAIRS_NOTE = (
    "Seed by seed, each line at its best value; negative is better for the first line. "
    "Interval: Student's, of the mean over seeds; the verdict does not ask for it."
)


def pair_table(sweep: SweepData) -> Table | None:
    rows = [_compared(sweep, a, b, h) for a, b in pairs(sweep) for h in sweep.horizons]
    return Table(key_of(sweep, "pairs"), "Line against line", rows, PAIRS_NOTE) if rows else None


def all_pairs_table(sweeps: Sequence[SweepData], key: str) -> Table | None:
    """Also what no claim of the paper is about: at the last horizon, where seeds can judge."""
    rows: list[Row] = []
    for sweep in sweeps:
        last = sweep.horizons[-1]
        for a, b in pairs(sweep):
            if len(sweep.judged(a, last).keys() & sweep.judged(b, last).keys()) > 1:
                row = _compared(sweep, a, b, last)
                del row["reason"]
                rows.append({"experiment": sweep.name, **row})
    title = "Line against line, at the last horizon, where two seeds or more judge"
    return Table(key, title, rows, PAIRS_NOTE) if rows else None


def _compared(sweep: SweepData, a: str, b: str, horizon: int) -> Row:
    result = verdict(sweep.judged(a, horizon), sweep.judged(b, horizon))
    mean = result.paired.mean
    return {
        "claim": f"{a} is below {b}",
        "tokens": Mark(sweep.tokens(horizon), "", tokens_form(sweep.tokens(horizon))),
        "verdict": Mark(result.outcome, result.outcome),
        "mean difference": None if mean is None else Mark(mean, "", f"{mean:+.4f}"),
        "95% interval": _interval(result.paired.differences),
        "seeds": seeds_form(result.paired.seeds),
        "reason": result.reason,
    }


def _interval(differences: Sequence[float]) -> str | None:
    found = student_interval(differences) if differences else None
    return None if found is None else f"{found[0]:+.4f} to {found[1]:+.4f}"


def claims_table(found: Sequence[tuple[SweepData, Ruling]], key: str) -> Table | None:
    rows: list[Row] = [
        {
            "experiment": sweep.name,
            "the paper's claim": ruling.claim,
            "verdict": Mark(ruling.outcome, ruling.outcome),
            "reason": ruling.reason,
        }
        for sweep, ruling in found
    ]
    note = (
        "Judged on our runs at their scale: an inconclusive verdict is no verdict on the paper. "
        f"“About” so many tokens holds where every seed has at least {NEARLY:g} of the claimed "
        "speed-up, is reversed where none has a speed-up at all, and is missed where every seed "
        "has one and all have less than that."
    )
    return Table(key, "The paper's claims", rows, note) if rows else None
