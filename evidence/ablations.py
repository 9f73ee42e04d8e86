"""What the comparison may hide, and what goes beyond the paper: one function for each sweep."""

from math import log2
from statistics import fmean

from angular_lab.config.spec import average_loss
from angular_lab.report.read import SweepResults
from evidence.comparison import Comparison
from evidence.kept import OURS, Kept
from evidence.measures import (
    COOLDOWN,
    EARLY,
    LATE,
    Facts,
    grid,
    judged,
    lead,
    speed_up,
    spread,
    summary,
    training_loss,
)


def facts(kept: Kept) -> Facts:
    teaser, sweeps = Comparison(kept), kept.sweeps
    return {
        "aux_lr": _aux_lr(sweeps["aux-lr"], teaser),
        "tuned_adamw": _tuned_adamw(sweeps["tuned-adamw"], teaser),
        "radius": _radius(sweeps["radius"], teaser),
        "split": _split(sweeps["split-qkv"]),
        "width": _width(sweeps["width"]),
        "larger": _larger(sweeps["larger"]),
        "angles": _angles(sweeps["angles"]),
        "variants": _variants(sweeps["variants"], sweeps["constrained"]),
        "average": _average(sweeps["average"]),
    }


def _aux_lr(sweep: SweepResults, teaser: Comparison) -> Facts:
    """A separate learning rate for embeddings, head and norms."""
    separate = {name: sweep.finals(name, EARLY) for name in sweep.arms}
    shared = {name: teaser.at(name, "22.5M") for name in sweep.arms}
    gain = {name: lead(separate[name], shared[name]) for name in sweep.arms}
    return {
        "separate": {name: summary(x) for name, x in separate.items()},
        "gain": gain,
        "lead_over_adamw": lead(separate[OURS], separate["adamw"]),
        "gain_over_a_quarter": gain["adamw"]["mean"] > teaser.lead("adamw", "22.5M")["mean"] / 4,
        "only_adamw_gains": {n for n, x in gain.items() if x["mean"] > 0} == {"adamw"},
    }


def _tuned_adamw(sweep: SweepResults, teaser: Comparison) -> Facts:
    """The same for AdamW at 90M tokens, against AngularMuown as it was run again for it."""
    tuned = sweep.finals("adamw", LATE)
    return {
        "loss": summary(tuned),
        "gain": lead(tuned, teaser.at("adamw", "90M")),
        "lead": lead(sweep.finals(OURS, LATE), tuned),
        "speed_up": speed_up(teaser.curves, tuned),
        "eight_times_is_best": sweep.best["adamw"].lr == 8 * teaser.best["adamw"],
    }


def _radius(sweep: SweepResults, teaser: Comparison) -> Facts:
    """A separate learning rate for the row lengths: the best are 0.004 and 0.016."""
    quarter, ours = (sweep.finals(name, EARLY) for name in ("muown", OURS))
    return {
        "muown_quarter": summary(quarter),
        "muown_gain": judged(teaser.at("muown", "22.5M")) - judged(quarter),
        "ours_0.016": summary(ours),
    }


def _split(sweep: SweepResults) -> Facts:
    """How far the runs with split q, k, v and gate, up are below those with fused ones."""
    pairs = {split.partition(",")[0]: (split, fused) for split, fused in sweep.pairs}
    return {name: lead(*(sweep.finals(arm, EARLY) for arm in pair)) for name, pair in pairs.items()}


def _width(sweep: SweepResults) -> Facts:
    at = {name.removeprefix("d = "): grid(sweep, name) for name in sweep.arms}
    vertices = {width: _vertex(losses) for width, losses in at.items()}
    best = {sweep.best[name].lr for name in sweep.arms}
    return {
        "loss_384": at["384"][2**-6],
        "vertex": vertices,
        "fall": 1 - vertices["640"] / vertices["256"],
        "same_best_of_four": best == {2**-6} and {*map(len, at.values())} == {4},
    }


def _vertex(losses: dict[float, float]) -> float:
    """Return the vertex of the parabola through the best learning rate and its neighbours, over
    the learning rate's logarithm."""
    rates = list(losses)
    middle = rates.index(min(losses, key=losses.__getitem__))
    low, lowest, high = (losses[rates[middle + i]] for i in (-1, 0, 1))
    shift = (low - high) / (2 * (low - 2 * lowest + high))
    return float(2 ** (log2(rates[middle]) + shift))


def _larger(sweep: SweepResults) -> Facts:
    """How far AngularMuown is below NorMuon, one seed: by the weights and by averages."""
    [horizon] = sweep.horizons
    ours, other = (sweep.at_best(name)[0].ends[horizon] for name in (OURS, "normuon"))
    keys = {"weights": "val_loss"} | {str(x): average_loss(x) for x in (0.1, 0.2, 0.4)}
    best = [min(run.values(key)[horizon] for key in keys.values()) for run in (ours, other)]

    def lead_at(key: str, first: int, last: int) -> float:
        """Return the lead in the mean over these steps."""
        losses = (run.values(key).items() for run in (ours, other))
        below, above = (fmean(x for step, x in y if first <= step <= last) for y in losses)
        return above - below

    return {
        "lead": {name: lead_at(key, horizon, horizon) for name, key in keys.items()},
        "lead_at_best_window": best[1] - best[0],
        "training_lead": training_loss(other) - training_loss(ours),
        "training_lead_first_pass": lead_at("loss", 1200, 1300),
        "averaged_lead_32.8M": lead_at(keys["0.1"], 1000, 1000),
        "averaged_lead_65.5M": lead_at(keys["0.1"], 2000, 2000),
        "kappa": ours.series("kappa")[1][-1],
    }


def _angles(sweep: SweepResults) -> Facts:
    at = {name: sweep.finals(name, EARLY)[0] for name in sweep.arms}
    return {"flat_kappa_cost": at["angular_muown, kappa = 1"] - at[OURS]}


def _variants(sweep: SweepResults, constrained_sweep: SweepResults) -> Facts:
    """Changes of the method on seed 0."""
    published = "as published"
    loss = {name: sweep.finals(name, LATE)[0] for name in sweep.arms}
    above = {name: x - loss[published] for name, x in loss.items() if name != published}
    pairs = [name for name in above if ", " in name]
    constrained, short = (
        constrained_sweep.finals(name, EARLY)[0] for name in ("constrained polar factor", published)
    )
    return {
        "loss": {_slug(name): x for name, x in loss.items()},
        "above": {_slug(name): x for name, x in above.items()},
        "above_but_column_gains": spread(x for n, x in above.items() if n != "column gains"),
        "single_changes": len(above) - len(pairs) + 1,  # with the constrained polar factor
        "pairs": len(pairs),
        "constrained": constrained,
        "constrained_above": constrained - short,
        "constrained_published": short,
    }


def _slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def _average(sweep: SweepResults) -> Facts:
    """Averages of the last weights over a share of the steps."""
    methods = (OURS, "normuon", "adamw")
    tenth, fifth, two_fifths = (sweep.evaluated_by(window) for window in (0.1, 0.2, 0.4))
    weights, averages = ({n: x.finals(n, LATE) for n in methods} for x in (sweep, tenth))
    gain = {n: {s: x - averages[n][s] for s, x in weights[n].items()} for n in methods}
    trunks = [trial.trunk for trial in sweep.at_best(OURS).values() if trial.trunk]
    worse = two_fifths.finals(OURS, LATE)
    return {
        "gain": {n: summary(x) | {"all_seeds": fmean(x.values())} for n, x in gain.items()},
        "goal_reached": min(gain[OURS].values()) >= 0.01,
        "loss": summary(averages[OURS]),
        "fifth_behind": fmean(fifth.finals(OURS, LATE).values()) - fmean(averages[OURS].values()),
        "two_fifths_worse_than_none": all(worse[s] > x for s, x in weights[OURS].items()),
        "without_cooldown": fmean(x.values(average_loss(0.1))[COOLDOWN] for x in trunks),
        "weights": fmean(weights[OURS].values()),
    }
