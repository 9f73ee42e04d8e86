"""Trials: changes of the training, and what they cost or gain on text read once."""

from angular_lab.config.spec import average_loss
from angular_lab.experiments import trials
from angular_lab.experiments.statistics import LEAST, verdict
from angular_lab.report.read import SweepResults
from evidence.kept import Kept, Rows
from evidence.measures import CHOOSER, Facts, judging
from evidence.noise import one_seed
from evidence.one_pass import METHODS
from evidence.titles import title
from evidence.whole_corpus import WholeCorpus, word

USUAL = "adamw, cooldown 50%"
FOR_SOME, FOR_ALL = (f"{USUAL}, {change}" for change in trials.FOR_ADAMW)
BETA2, RAMP = trials.LONGER.split(", ")  # its two parts, each of which is a trial of its own
LONGEST = f"aux_beta2 0.999, {RAMP}"
OTHERS = {"normuon_decay": "normuon, decay 0.1, linear to zero", "muon": "muon, linear to zero"}
# What was tried on top of the best trial, by outcome.
WORSE = ("nesterov off", "angles of out 0.7, down 0.33", "angles of down 0.33", "aux_lr 0.05")
LEVEL = ("aux_lr 0.0125", "equal rows", "soap for mlps")
LOWER = ("split_heads", "aux_lr 0.0125")
SAME_RUN = {trials.BASELINE, f"{trials.LONGER}, {trials.FORMS}"}  # these change no training


def facts(kept: Kept) -> Facts:
    screening, whole = kept.sweeps["trials"], _whole(kept)
    losses, noise = _losses(screening), one_seed(kept)
    gains = whole["ours"]["outcome"], whole["normuon_decay"]["outcome"]
    return {
        "trials": {
            **_alone(losses),
            **_on_top(losses, noise),
            **_others(losses, noise),
            **_averages(kept),
            "count": len(_compared(screening)),
            "beyond_noise": sum(abs(d) > noise for _, _, d in _compared(screening)),
            "chosen_holds_on_four_seeds": (gains[0], whole["ours"]["seeds"]) == ("holds", 4),
            "gains_hold_for_both": set(gains) == {"holds"},
            "whole": whole,
        }
    }


def _alone(losses: dict[str, float]) -> Facts:
    """Each change by itself, and the stacks that were planned first."""
    baseline, chosen = losses[trials.BASELINE], losses[trials.LONGER]
    stacked = [loss for arm, loss in losses.items() if arm.startswith(trials.STACK)]
    ahead = {arm: loss for arm, loss in losses.items() if arm.startswith(trials.ALONE)}
    alone = [loss for arm, loss in ahead.items() if not arm.startswith(trials.STACK)]
    later = (f"{trials.LONGER}, ", *_competitors())
    by_itself = [loss for arm, loss in losses.items() if not arm.startswith(later)]
    return {
        "gain": {"beta2": baseline - losses[BETA2]},
        "ramp_alone_gains_nothing": losses[RAMP] >= baseline,
        "beta2_is_lowest": {losses[x] for x in (BETA2, trials.LONGER, LONGEST)}
        == {*sorted(by_itself)[:3]},
        "longer_beta2_is_level": abs(losses[LONGEST] - chosen) < LEAST,
        "extrapolation_is_worse": min(alone) > baseline and min(stacked) > chosen,
        "longer_momentum_is_worse": losses["momentum 0.975, lr 0.016"] > baseline,
    }


def _on_top(losses: dict[str, float], noise: float) -> Facts:
    """What was tried on top of the best trial."""
    above = {x: losses[f"{trials.LONGER}, {x}"] - losses[trials.LONGER] for x in _tried(losses)}
    slower = above["slow_share 0.56"], above["slow_share 0.28"]
    return {
        "worse": min(above[x] for x in WORSE) >= LEAST,
        "level": max(abs(above[x]) for x in LEVEL) < LEAST,
        "separate_heads_are_lower": above["split_heads"] < 0,
        "lower_ones_are_within_noise": all(-noise < above[x] < 0 for x in LOWER),
        "slower_momentum_is_worse": slower[0] > slower[1] > 0,
    }


def _tried(losses: dict[str, float]) -> list[str]:
    return [change for change in trials.FURTHER if f"{trials.LONGER}, {change}" in losses]


def _others(losses: dict[str, float], noise: float) -> Facts:
    """Other methods with what helped this one."""
    chosen = losses[trials.LONGER]
    below = {name: chosen - losses[f"{arm}, {trials.LONGER}"] for name, arm in OTHERS.items()}
    gains = losses[trials.BASELINE] - losses[BETA2], losses[USUAL] - losses[FOR_SOME]
    return {
        "below_ours": below,
        "others_are_lower": min(below.values()) > 0,
        "others_are_within_noise": max(below.values()) < noise,
        "adamw_gains_as_much": abs(gains[0] - gains[1]) < LEAST,
        "adamw_gains_less_with_all": losses[FOR_SOME] < losses[FOR_ALL] < losses[USUAL],
    }


def _averages(kept: Kept) -> Facts:
    """By how much the closest average of each form is above the weights, at a quarter of the corpus
    and over all of it; of AngularMuown, whose trials all have a cooldown of 50%."""
    screening = kept.sweeps["trials"]
    closest = {form: min(above_weights(screening, form)) for form in ("", "sphere", "half")}
    whole = above_weights(kept.sweeps["one-pass-closest"])
    return {
        "averages_above": {form: closest[form] for form in ("sphere", "half")},
        "averages_are_not_lower": min(closest.values()) > 0,
        "averages_are_not_lower_over_all": min(whole) > 0,
    }


def above_weights(sweep: SweepResults, form: str = "") -> list[float]:
    """Return by how much every average of this form is above its run's weights at the end."""
    [horizon] = sweep.horizons
    arms = [arm for arm in sweep.best if not arm.startswith((*_competitors(),))]
    runs = [trial.ends[horizon].values for arm in arms for trial in sweep.at_best(arm).values()]
    keys = [average_loss(window, form) for window in trials.AVERAGES]
    pairs = ((run(key), run("val_loss")) for run in runs for key in keys)
    return [averaged[horizon] - weights[horizon] for averaged, weights in pairs if averaged]


def _losses(sweep: SweepResults) -> dict[str, float]:
    [horizon] = sweep.horizons
    return {arm: sweep.finals(arm, horizon)[CHOOSER] for arm in sweep.best}


def _whole(kept: Kept) -> Facts:
    """Return what the best trial gains over the whole corpus, for every method that was run both
    ways on common seeds."""
    whole = WholeCorpus(kept)
    names = {label: name for name, label in METHODS.items()}
    gains: Facts = {}
    for arm in (arm for arm in whole.best.values() if arm.change):
        usual = whole.arms.get((arm.method, arm.schedule))
        result = verdict(judging(arm.losses), judging(usual.losses)) if usual else None
        if result and result.paired.mean is not None:
            seeds = len(result.paired.seeds)
            gain = {"gain": -result.paired.mean, "outcome": word(result), "seeds": seeds}
            gains.setdefault(names[arm.method], gain)
    return gains


def _compared(sweep: SweepResults) -> list[tuple[str, str, float]]:
    """Return every trial with what it was compared with, and their difference."""
    losses = _losses(sweep)
    pairs = [(arm, other) for arm, other in sweep.pairs if {arm, other} <= losses.keys()]
    return [
        (arm, other, losses[arm] - losses[other])
        for arm, other in pairs
        if arm not in SAME_RUN and other in _bases(arm)
    ]


def table(kept: Kept) -> Rows:
    """Return the trials at a quarter of the corpus, each with what it was compared with."""
    sweep, noise = kept.sweeps["trials"], one_seed(kept)
    losses = _losses(sweep)
    rows = [
        [title(arm), f"{losses[arm]:.4f}", f"{title(other)}, {losses[other]:.4f}",
         f"{difference:+.4f}", "yes" if abs(difference) > noise else "no"]
        for arm, other, difference in _compared(sweep)
    ]  # fmt: skip
    return [["trial", "loss", "against", "difference", "more than noise?"], *rows]


def _bases(arm: str) -> set[str]:
    """Return the arms of which this one is a change."""
    return {trials.BASELINE, trials.LONGER, *(x for x in _competitors() if arm.startswith(x))}


def _competitors() -> list[str]:
    return [f"{method}, {schedule}" for method, schedule in trials.COMPETITORS]
