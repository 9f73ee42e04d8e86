"""The concurrent methods: Hyperball and MagnitudeDirection, against AngularMuown run with them."""

from evidence.comparison import Comparison
from evidence.kept import LONGER, OURS, BySeed, Kept, Trial
from evidence.measures import (
    Facts,
    best,
    by_seed,
    grids,
    is_inside,
    judged,
    lead,
    outcome,
    speed_up,
    summary,
    training_loss,
)

SWEEP = "rivals"
METHODS = {
    "ours": OURS,
    "hyperball": "hyperball",
    "magnitude_direction": "magnitude_direction, falling rate",
}


def facts(kept: Kept) -> Facts:
    teaser, losses = Comparison(kept), kept.losses(SWEEP)
    found = grids(losses, "90M")
    chosen = {key: (name, best(found[name])) for key, name in METHODS.items()}
    at = {key: by_seed(losses, *trial, "90M") for key, trial in chosen.items()}
    trained: dict[str, BySeed] = {
        key: {seed: training_loss(kept.log(SWEEP, (*trial, seed))) for seed in (0, 1, 2)}
        for key, trial in chosen.items()
    }
    methods = {
        key: {
            "loss": summary(at[key]),
            "lead": lead(at["ours"], at[key]),
            "training_lead": lead(trained["ours"], trained[key]),
            "speed_up": speed_up(teaser.curves[OURS], at[key]),
        }
        for key in METHODS
    }
    angles = {key: _angles(kept, (*trial, 0)) for key, trial in chosen.items()}
    theirs = "magnitude_direction"
    longer, ahead = lead(teaser.at(OURS, LONGER), at[theirs]), methods[theirs]["lead"]
    verdict = outcome(teaser.at(OURS, LONGER), at[theirs])
    muon, hyperball, adamw = map(
        judged, (teaser.at("muon", "90M"), at["hyperball"], teaser.at("adamw", "90M"))
    )
    claims = {
        "after_longer": longer,
        "after_longer_training": lead(teaser.trained(OURS, LONGER), trained[theirs]),
        "ahead_on_every_seed": ahead["max"] < 0,
        "interval_includes_zero": ahead["low"] < 0 < ahead["high"],
        "hardly_below_after_longer": longer["min"] > 0 and verdict == "inconclusive",
        "hyperball_between_muon_and_adamw": muon < hyperball < adamw,
        "best_learning_rates_inside_grids": all(
            is_inside(found[METHODS[key]]) for key in ("hyperball", theirs)
        ),
    }
    return {"concurrent": methods | claims | _angle_facts(angles)}


def _angles(kept: Kept, trial: Trial) -> dict[float, float]:
    """Return the mean angle of a step by millions of tokens."""
    log = kept.log(SWEEP, trial)
    return {x["tokens"] / 1e6: x["angle_mean"] for x in log if "angle_mean" in x}


def _angle_facts(angles: dict[str, dict[float, float]]) -> Facts:
    ours, other = angles["ours"], angles["magnitude_direction"]
    ratios = {tokens: ours[tokens] / other[tokens] for tokens in ours}
    middle = [ratio for tokens, ratio in ratios.items() if 20 <= tokens <= 50]
    *_, before_cooldown = (tokens for tokens in ratios if tokens <= 81)
    flat = [angle for tokens, angle in angles["hyperball"].items() if 2 <= tokens <= 80]
    return {
        "angles_apart": max(middle) - 1,
        "its_angle_falls_faster": min(middle) > 1 and ratios[before_cooldown] > 2.5,
        "hyperball_angle": flat[0],
        "hyperball_angle_is_flat": {round(angle, 3) for angle in flat} == {0.005},
    }
