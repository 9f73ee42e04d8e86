"""The concurrent methods: Hyperball and MagnitudeDirection, against AngularMuown run with them."""

from evidence.comparison import LONGER, Comparison
from evidence.kept import OURS, Kept
from evidence.measures import (
    LATE,
    Facts,
    judged,
    lead,
    outcome,
    speed_up,
    summary,
    training_losses,
)

METHODS = {
    "ours": OURS,
    "hyperball": "hyperball",
    "magnitude_direction": "magnitude_direction, falling rate",
}


def facts(kept: Kept) -> Facts:
    teaser, sweep = Comparison(kept), kept.sweeps["concurrent"]
    at = {key: sweep.finals(name, LATE) for key, name in METHODS.items()}
    trained = {key: training_losses(sweep, name, LATE) for key, name in METHODS.items()}
    methods = {
        key: {
            "loss": summary(at[key]),
            "lead": lead(at["ours"], at[key]),
            "training_lead": lead(trained["ours"], trained[key]),
            "speed_up": speed_up(teaser.curves, at[key]),
        }
        for key in METHODS
    }
    theirs = "magnitude_direction"
    longer, ahead = lead(teaser.at(OURS, LONGER), at[theirs]), methods[theirs]["lead"]
    verdict = outcome(teaser.at(OURS, LONGER), at[theirs])
    longer_training = training_losses(teaser.longer, OURS, LATE)
    muon, hyperball, adamw = map(
        judged, (teaser.at("muon", "90M"), at["hyperball"], teaser.at("adamw", "90M"))
    )
    claims = {
        "after_longer": longer,
        "after_longer_training": lead(longer_training, trained[theirs]),
        "ahead_on_every_seed": ahead["max"] < 0,
        "interval_includes_zero": ahead["low"] < 0 < ahead["high"],
        "hardly_below_after_longer": longer["min"] > 0 and verdict == "inconclusive",
        "hyperball_between_muon_and_adamw": muon < hyperball < adamw,
        "best_learning_rates_inside_grids": not any(map(sweep.at_edge, sweep.arms)),
    }
    return {"concurrent": methods | claims | _angles(kept)}


def _angles(kept: Kept) -> Facts:
    """The mean angle of a step on seed 0, by millions of tokens."""
    ours, hyperball, theirs = (
        {tokens / 1e6: angle for tokens, angle in zip(*run.series("angle_mean"), strict=True)}
        for run in (kept.sweeps["concurrent"].at_best(n)[0].ends[LATE] for n in METHODS.values())
    )
    ratios = {tokens: ours[tokens] / theirs[tokens] for tokens in ours}
    middle = [ratio for tokens, ratio in ratios.items() if 20 <= tokens <= 50]
    *_, before_cooldown = (tokens for tokens in ratios if tokens <= 81)
    flat = [angle for tokens, angle in hyperball.items() if 2 <= tokens <= 80]
    return {
        "angles_apart": max(middle) - 1,
        "its_angle_falls_faster": min(middle) > 1 and ratios[before_cooldown] > 2.5,
        "hyperball_angle": flat[0],
        "hyperball_angle_is_flat": {round(angle, 3) for angle in flat} == {0.005},
    }
