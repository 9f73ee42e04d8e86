"""Trials: changes of the training, and what they cost or gain on text read once."""

from angular_lab.experiments import trials
from evidence.kept import Kept
from evidence.measures import CHOOSER, Facts, judging


def facts(kept: Kept) -> Facts:
    screening, closest = kept.sweeps["trials"], kept.sweeps["one-pass-closest"]
    [quarter], [whole] = screening.horizons, closest.horizons
    losses = {arm: screening.finals(arm, quarter)[CHOOSER] for arm in screening.best}
    baseline, chosen = losses.pop(trials.BASELINE), losses[trials.LONGER]
    extrapolated = {arm: loss for arm, loss in losses.items() if arm.startswith(trials.ALONE)}
    stacked = [loss for arm, loss in extrapolated.items() if arm.startswith(trials.STACK)]
    alone = [loss for loss in extrapolated.values() if loss not in stacked]
    runs = [screening.at_best(arm)[CHOOSER].ends[quarter].values for arm in losses]
    keys = [f"val_loss_averaged_{window}" for window in trials.AVERAGES]
    ours, trial = (judging(closest.finals(arm, whole)) for arm in (trials.BASELINE, trials.LONGER))
    return {
        "trials": {
            "gain": baseline - chosen,
            "chosen_is_lower_on_every_seed": all(trial[seed] < ours[seed] for seed in trial),
            "extrapolation_is_worse": min(alone) > baseline and min(stacked) > chosen,
            "longer_momentum_is_worse": losses["momentum 0.975, lr 0.016"] > baseline,
            "averages_are_not_lower": all(
                run(key)[quarter] > run("val_loss")[quarter] for run in runs for key in keys
            ),
        }
    }
