"""Verdicts on two methods, by the lab's rule: `angular_lab.experiments.statistics.verdict`."""

from collections.abc import Mapping

from angular_lab.experiments import statistics
from angular_lab.experiments.published import CLAIMED_SPEED_UPS, TEASER
from angular_lab.experiments.statistics import speed_up_outcome, verdict
from angular_lab.report.read import SweepResults
from angular_lab.report.tables import tokens_form
from evidence.comparison import Comparison
from evidence.kept import OURS, Kept, Rows
from evidence.measures import speed_up
from evidence.titles import title
from evidence.whole_corpus import pairs_of_schedules


def judge(ours: Mapping[int, float], other: Mapping[int, float]) -> str:
    """Return the verdict on "ours is below other", by the losses of the seeds that judge."""
    return verdict(ours, other).label


def tables(kept: Kept) -> dict[str, Rows]:
    """Return the pairs of every sweep, `verdicts-<experiment>`, and of views of some."""
    views = {name: sweep for name, sweep in kept.sweeps.items() if sweep.pairs}
    [views["teaser-cooldown-20"]] = kept.sweeps["teaser"].variant_views()
    views["one-pass-schedules"] = pairs_of_schedules(kept.sweeps["one-pass-long"])
    rows = {f"verdicts-{name}": pairs(view) for name, view in views.items()}
    return rows | {"paper-claims": _paper(kept)}


def pairs(sweep: SweepResults) -> Rows:
    rows = []
    for (a, b), horizon in ((pair, h) for pair in sweep.pairs for h in sweep.horizons):
        result = verdict(sweep.judged(a, horizon), sweep.judged(b, horizon))
        paired, ends = result.paired, result.interval
        if paired.mean is None:
            continue
        interval = f"{ends[0]:+.4f} to {ends[1]:+.4f}" if ends else "-"
        cells = [f"{paired.mean:+.4f}", interval, ", ".join(map(str, paired.seeds))]
        tokens = tokens_form(*sweep.tokens(horizon, a, b))
        at_edge = [title(arm) for arm in (a, b) if sweep.at_edge(arm)]
        label = f"{result.label}, edge: {', '.join(at_edge)}" if at_edge else result.label
        rows.append([title(a), title(b), tokens, *cells, label, result.to_settle or "-"])
    head = ["method", "against", "tokens", "difference", "95% interval", "seeds", "lower?"]
    return [[*head, "to settle"], *rows]


def _paper(kept: Kept) -> Rows:
    """The paper's speed-ups in tokens, claimed and read off its curves, and ours."""
    teaser, rows = Comparison(kept), []
    for name, claimed in CLAIMED_SPEED_UPS.items():
        ours = speed_up(teaser.curves, teaser.at(name, "90M"))
        theirs = statistics.speed_up(TEASER[OURS].curve, TEASER[name].curve)
        interval = f"{ours['low']:.2f} to {ours['high']:.2f}"
        outcome = speed_up_outcome((ours["low"], ours["high"]), claimed)
        cells = [f"about {claimed:g}", f"{theirs:.2f}", f"{ours['mean']:.2f}", interval, outcome]
        rows.append([title(name), *cells])
    head = ["fewer tokens than", "the paper's claim", "its curves", "here", "95% interval"]
    return [[*head, "the claim is"], *rows]
