"""The comparison of five optimizers at four horizons, and the closest pair on more seeds."""

from math import sqrt

from angular_lab.report.results import curves
from evidence.kept import OURS, Kept
from evidence.measures import (
    EARLY,
    HALF,
    LATE,
    BySeed,
    Facts,
    grid,
    lead,
    outcome,
    speed_up,
    spread,
    summary,
    training_losses,
)

OTHERS = ("normuon", "muown", "muon", "adamw")
LONGER = "longer"  # 90M tokens after a cooldown of 20%
HORIZONS = {"22.5M": EARLY, "45M": HALF, "90M": LATE}


class Comparison:
    """The sweep `teaser`, each method at its best learning rate."""

    def __init__(self, kept: Kept) -> None:
        self.sweep = kept.sweeps["teaser"]
        [self.longer] = self.sweep.variant_views()
        self.best = {name: best.lr for name, best in self.sweep.best.items()}
        self.grids = {name: grid(self.sweep, name) for name in self.best}
        self.curves = curves(self.sweep, OURS)

    def at(self, method: str, horizon: str) -> BySeed:
        if horizon == LONGER:
            return self.longer.finals(method, LATE)
        return self.sweep.finals(method, HORIZONS[horizon])

    def lead(self, method: str, horizon: str) -> Facts:
        return lead(self.at(OURS, horizon), self.at(method, horizon))


def facts(kept: Kept) -> Facts:
    teaser = Comparison(kept)
    methods = {name: _method(teaser, name) for name in teaser.best}
    gains = (m["loss"]["90M"]["mean"] - m["loss"][LONGER]["mean"] for m in methods.values())
    return {
        "teaser": methods | {"longer_cooldown_gain": spread(gains)} | _claims(teaser),
        "closest": _closest(kept),
        "plateau": _plateau(teaser),
    }


def _method(teaser: Comparison, name: str) -> Facts:
    grid, lr = teaser.grids[name], teaser.best[name]
    half, twice = _ours_at_a_wrong_learning_rate(teaser)
    facts: Facts = {
        "loss": {horizon: summary(teaser.at(name, horizon)) for horizon in (*HORIZONS, LONGER)},
        "half_lr_cost": grid[lr / 2] - grid[lr],
        "twice_lr_cost": grid[lr * 2] - grid[lr],
        "learning_rates": len(grid),
        "below_ours_at_half_lr": sum(loss < half for loss in grid.values()),
        "below_ours_at_twice_lr": sum(loss < twice for loss in grid.values()),
    }
    if name != OURS:
        trained = (training_losses(teaser.sweep, method, LATE) for method in (OURS, name))
        facts["lead"] = {horizon: teaser.lead(name, horizon) for horizon in (*HORIZONS, LONGER)}
        facts["speed_up"] = speed_up(teaser.curves, teaser.at(name, "90M"))
        facts["training_lead"] = lead(*trained)
    return facts


def _ours_at_a_wrong_learning_rate(teaser: Comparison) -> tuple[float, float]:
    """Return AngularMuown's loss at half and at twice its best learning rate, on seed 0."""
    grid, lr = teaser.grids[OURS], teaser.best[OURS]
    return grid[lr / 2], grid[lr * 2]


def _claims(teaser: Comparison) -> Facts:
    """Statements of the documents that are true or false."""
    last = {name: teaser.lead(name, "90M") for name in OTHERS}
    early = [teaser.lead(name, "22.5M") for name in ("muown", "normuon")]
    one_pass = lead(*(training_losses(teaser.sweep, name, HALF) for name in (OURS, "normuon")))
    half, twice = _ours_at_a_wrong_learning_rate(teaser)
    muown, normuon, muon = (min(teaser.grids[n].values()) for n in ("muown", "normuon", "muon"))
    return {
        "lowest_after_longer_cooldown": all(teaser.lead(n, LONGER)["min"] > 0 for n in OTHERS),
        "goal_reached": min(last["muown"]["min"], last["normuon"]["min"]) >= 0.005,
        "adamw_in_half_the_tokens_missed": speed_up(teaser.curves, teaser.at("adamw", "90M"))["max"]
        < 2,
        "intervals_exclude_zero_for_normuon_and_adamw_only": {
            name for name, x in last.items() if x["low"] > 0
        }
        == {"normuon", "adamw"},
        "behind_at_22.5M_on_both_seeds": all(max(x["seed1"], x["seed2"]) < 0 for x in early),
        "level_with_muown_at_45M": outcome(teaser.at(OURS, "45M"), teaser.at("muown", "45M"))
        == "inconclusive",
        "normuon_ahead_in_training_at_45M": one_pass["max"] < 0,
        "behind_at_a_wrong_learning_rate": half > max(muown, normuon) and twice > muon,
        "best_learning_rates_inside_grids": not any(map(teaser.sweep.at_edge, teaser.best)),
    }


def _closest(kept: Kept) -> Facts:
    """AngularMuown and NorMuon on seeds 1 to 4, none of which chose a learning rate."""
    sweep = kept.sweeps["closest"]
    at = {name: sweep.finals(name, LATE) for name in (OURS, "normuon")}
    return {
        "lead": lead(*at.values()),
        "training_lead": lead(*(training_losses(sweep, name, LATE) for name in at)),
    }


def _plateau(teaser: Comparison) -> Facts:
    """The angle of Muon's steps on seed 0."""
    lr, decay, momentum = teaser.best["muon"], 0.1, 0.95
    trunk = teaser.sweep.at_best("muon")[0].trunk
    assert trunk is not None
    points = list(zip(*trunk.series("angle_mean"), strict=True))
    late = [angle for tokens, angle in points if tokens > 30e6]
    early = [angle for tokens, angle in points if tokens < 20e6]
    formula = sqrt(2 * lr * decay)
    return {
        "angle": late[-1],
        "fall_from_30M": 1 - late[-1] / late[0],
        "later_than_20M": min(early) == early[-1] > 1.1 * late[-1],
        "formula": formula,
        "formula_with_momentum": formula / sqrt((1 + momentum) / (1 - momentum)),
    }
