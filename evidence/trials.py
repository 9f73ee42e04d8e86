"""Trials: changes of the training, and what they cost or gain on text read once."""

from angular_lab.experiments import trials
from angular_lab.experiments.statistics import LEAST, verdict
from angular_lab.report.read import SweepResults
from evidence.kept import Kept, Rows
from evidence.measures import CHOOSER, Facts, judging
from evidence.noise import largest_shift
from evidence.one_pass import METHODS
from evidence.titles import title
from evidence.whole_corpus import WholeCorpus, word

USUAL = "adamw, cooldown 50%"
SLOWER = [f"{trials.LONGER}, slow_share {share}" for share in ("0.28", "0.56")]
FOR_SOME, FOR_ALL = (f"{USUAL}, {change}" for change in trials.FOR_ADAMW)
BETA2, RAMP = trials.LONGER.split(", ")  # its two parts, each of which is a trial of its own
LONGEST = f"aux_beta2 0.999, {RAMP}"
OTHERS = {"normuon_decay": "normuon, decay 0.1, linear to zero", "muon": "muon, linear to zero"}
# What was tried on top of the best trial, by outcome.
WORSE = ("nesterov off", "angles of out 0.7, down 0.33", "angles of down 0.33", "aux_lr 0.05")
LEVEL = ("aux_lr 0.0125", "equal rows", "soap for mlps")
SMALL = ("slow_share 0.28", "split_heads", "aux_lr 0.0125", "aux_lr 0.05")  # noise of one seed


def facts(kept: Kept) -> Facts:
    screening = kept.sweeps["trials"]
    losses = _losses(screening)
    baseline, chosen = losses[trials.BASELINE], losses[trials.LONGER]
    extrapolated = {arm: loss for arm, loss in losses.items() if arm.startswith(trials.ALONE)}
    stacked = [loss for arm, loss in extrapolated.items() if arm.startswith(trials.STACK)]
    later = (f"{trials.LONGER}, ", *_competitors())
    first = [loss for arm, loss in losses.items() if not arm.startswith(later)]
    alone = [loss for loss in extrapolated.values() if loss not in stacked]
    worse, level = ([losses[f"{trials.LONGER}, {x}"] - chosen for x in xs] for xs in (WORSE, LEVEL))
    averages, whole = _averages(screening), _whole(kept)
    gains = baseline - losses[BETA2], losses[USUAL] - losses[FOR_SOME]
    below = {name: chosen - losses[f"{arm}, {trials.LONGER}"] for name, arm in OTHERS.items()}
    on_top = [losses[f"{trials.LONGER}, {change}"] - chosen for change in SMALL]
    small = (*on_top, *below.values(), losses[FOR_ALL] - losses[FOR_SOME],
             losses[trials.ALONE[0]] - baseline)  # fmt: skip
    return {
        "trials": {
            "gain": {"beta2": gains[0]},
            "ramp_alone_gains_nothing": losses[RAMP] >= baseline,
            "adamw_gains_as_much": abs(gains[0] - gains[1]) < LEAST,
            "adamw_gains_less_with_all": losses[FOR_SOME] < losses[FOR_ALL] < losses[USUAL],
            "others_are_lower": min(below.values()) > 0,
            "within_noise": max(map(abs, small)) < largest_shift(kept),
            "below_ours": below,
            "beta2_alone_is_lowest": losses[BETA2] == min(first),
            "longer_beta2_is_level": abs(losses[LONGEST] - chosen) < LEAST,
            "worse": min(worse) >= LEAST,
            "level": max(map(abs, level)) < LEAST,
            "separate_heads_are_lower": losses[f"{trials.LONGER}, split_heads"] < chosen,
            "slower_momentum_is_worse": losses[SLOWER[1]] > losses[SLOWER[0]] > chosen,
            "extrapolation_is_worse": min(alone) > baseline and min(stacked) > chosen,
            "longer_momentum_is_worse": losses["momentum 0.975, lr 0.016"] > baseline,
            "averages_above": averages,
            "averages_are_not_lower": min(averages.values()) > 0,
            "half_way_is_closest": averages["half"] == min(averages.values()),
            "chosen_holds_on_four_seeds": (whole["ours"]["outcome"], whole["ours"]["seeds"])
            == ("holds", 4),
            "gains_hold_for_both": whole["ours"]["outcome"]
            == whole["normuon_decay"]["outcome"]
            == "holds",
            "averages_are_not_lower_over_all": min(above_weights(kept.sweeps["one-pass-closest"]))
            > 0,
            "whole": whole,
        }
    }


def above_weights(sweep: SweepResults, form: str = "") -> list[float]:
    """Return by how much every average of this form is above its run's weights at the end."""
    [horizon] = sweep.horizons
    runs = [
        trial.ends[horizon].values for arm in sweep.best for trial in sweep.at_best(arm).values()
    ]
    keys = [f"val_loss_averaged_{window}{form}" for window in trials.AVERAGES]
    pairs = ((run(key), run("val_loss")) for run in runs for key in keys)
    return [averaged[horizon] - weights[horizon] for averaged, weights in pairs if averaged]


def _averages(sweep: SweepResults) -> Facts:
    """Return by how much the closest average of each form is above the weights."""
    forms = {"plain": "", "sphere": "_sphere", "half": "_half"}
    return {name: min(above_weights(sweep, form)) for name, form in forms.items()}


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


def table(kept: Kept) -> Rows:
    """Return the trials at a quarter of the corpus, each with what it was compared with."""
    sweep = kept.sweeps["trials"]
    losses = _losses(sweep)
    pairs = [(arm, other) for arm, other in sweep.pairs if {arm, other} <= losses.keys()]
    same = {trials.BASELINE, f"{trials.LONGER}, {trials.FORMS}"}  # no other training
    rows = [
        [title(arm), f"{losses[arm]:.4f}", f"{title(other)}, {losses[other]:.4f}",
         f"{losses[arm] - losses[other]:+.4f}"]
        for arm, other in pairs
        if arm not in same and other in _bases(arm)
    ]  # fmt: skip
    return [["trial", "loss", "against", "difference"], *rows]


def _bases(arm: str) -> set[str]:
    """Return the arms of which this one is a change."""
    return {trials.BASELINE, trials.LONGER, *(x for x in _competitors() if arm.startswith(x))}


def _competitors() -> list[str]:
    return [f"{method}, {schedule}" for method, schedule in trials.COMPETITORS]
