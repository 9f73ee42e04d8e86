"""The comparison of five optimizers at four horizons, and the closest pair on more seeds."""

from math import sqrt
from statistics import fmean

from evidence.kept import LONGER, OURS, BySeed, Kept
from evidence.measures import (
    Facts,
    best,
    by_seed,
    grids,
    is_inside,
    lead,
    outcome,
    speed_up,
    spread,
    summary,
    training_loss,
)

OTHERS = ("normuon", "muown", "muon", "adamw")
HORIZONS = ("22.5M", "45M", "67.5M", "90M", LONGER)


class Comparison:
    """The sweep `teaser`, each method at its best learning rate."""

    def __init__(self, kept: Kept) -> None:
        self.kept, self.losses = kept, kept.losses("teaser")
        self.grids = grids(self.losses, "90M")
        self.best = {name: best(grid) for name, grid in self.grids.items()}
        self.curves = {
            name: {seed: self.losses[name, lr, seed] for seed in (0, 1, 2)}
            for name, lr in self.best.items()
        }

    def at(self, method: str, horizon: str) -> BySeed:
        return by_seed(self.losses, method, self.best[method], horizon)

    def lead(self, method: str, horizon: str) -> Facts:
        return lead(self.at(OURS, horizon), self.at(method, horizon))

    def trained(self, method: str, end: int | str = "") -> BySeed:
        """Return the training losses at the end, by seed."""
        logs = {s: self.kept.log("teaser", (method, self.best[method], s), end) for s in (0, 1, 2)}
        return {seed: training_loss(metrics) for seed, metrics in logs.items()}


def facts(kept: Kept) -> Facts:
    teaser = Comparison(kept)
    methods = {name: _method(teaser, name) for name in teaser.best}
    gains = (m["loss"]["90M"]["mean"] - m["loss"][LONGER]["mean"] for m in methods.values())
    return {
        "teaser": methods | {"longer_cooldown_gain": spread(gains)} | _claims(teaser),
        "closest": _closest(kept, teaser),
        "plateau": _plateau(kept, teaser),
    }


def _method(teaser: Comparison, name: str) -> Facts:
    grid, lr = teaser.grids[name], teaser.best[name]
    half, twice = (teaser.grids[OURS][factor * teaser.best[OURS]] for factor in (0.5, 2))
    found: Facts = {
        "loss": {horizon: summary(teaser.at(name, horizon)) for horizon in HORIZONS},
        "half_lr_cost": grid[lr / 2] - grid[lr],
        "twice_lr_cost": grid[lr * 2] - grid[lr],
        "learning_rates": len(grid),
        "below_ours_at_half_lr": sum(loss < half for loss in grid.values()),
        "below_ours_at_twice_lr": sum(loss < twice for loss in grid.values()),
    }
    if name != OURS:
        found["lead"] = {horizon: teaser.lead(name, horizon) for horizon in HORIZONS}
        found["speed_up"] = speed_up(teaser.curves[OURS], teaser.at(name, "90M"))
        found["training_lead"] = lead(teaser.trained(OURS), teaser.trained(name))
    return found


def _claims(teaser: Comparison) -> Facts:
    """Statements of the documents that are true or false."""
    last = {name: teaser.lead(name, "90M") for name in OTHERS}
    longer = [teaser.lead(name, LONGER) for name in OTHERS]
    early = [teaser.lead(name, "22.5M") for name in ("muown", "normuon")]
    one_pass = lead(teaser.trained(OURS, 2747), teaser.trained("normuon", 2747))
    at_45m = outcome(teaser.at(OURS, "45M"), teaser.at("muown", "45M"))
    adamw = speed_up(teaser.curves[OURS], teaser.at("adamw", "90M"))
    half, twice = (teaser.grids[OURS][factor * teaser.best[OURS]] for factor in (0.5, 2))
    muown, normuon, muon = (min(teaser.grids[n].values()) for n in ("muown", "normuon", "muon"))
    above_zero = {name for name, x in last.items() if x["low"] > 0}
    return {
        "lowest_on_every_seed": all(x["min"] > 0 for x in last.values()),
        "lowest_after_longer_cooldown": all(x["min"] > 0 for x in longer),
        "goal_reached": min(last["muown"]["min"], last["normuon"]["min"]) >= 0.005,
        "adamw_in_half_the_tokens_missed": adamw["max"] < 2,
        "intervals_exclude_zero_for_normuon_and_adamw_only": above_zero == {"normuon", "adamw"},
        "behind_at_22.5M_on_both_seeds": all(max(x["seed1"], x["seed2"]) < 0 for x in early),
        "level_with_muown_at_45M": at_45m == "inconclusive",
        "normuon_ahead_in_training_at_45M": one_pass["max"] < 0,
        "behind_at_a_wrong_learning_rate": half > max(muown, normuon) and twice > muon,
        "best_learning_rates_inside_grids": all(map(is_inside, teaser.grids.values())),
    }


def _closest(kept: Kept, teaser: Comparison) -> Facts:
    """AngularMuown and NorMuon on seeds 1 to 4, none of which chose a learning rate."""
    losses = kept.losses("closest")
    at = {name: by_seed(losses, name, teaser.best[name], "90M") for name in (OURS, "normuon")}
    training = (
        {s: training_loss(kept.log("closest", (name, teaser.best[name], s))) for s in x}
        for name, x in at.items()
    )
    return {
        "lead": lead(at[OURS], at["normuon"]),
        "training_lead": lead(*training),
        "loss": {name: fmean(x.values()) for name, x in at.items()},
    }


def _plateau(kept: Kept, teaser: Comparison) -> Facts:
    """The angle of Muon's steps on seed 0, over millions of tokens."""
    lr, decay, momentum = teaser.best["muon"], 0.1, 0.95
    log = kept.log("teaser", ("muon", lr, 0), "trunk")
    angles = {x["tokens"] / 1e6: x["angle_mean"] for x in log if "angle_mean" in x}
    late = [angle for tokens, angle in angles.items() if tokens > 30]
    early = [angle for tokens, angle in angles.items() if tokens < 20]
    formula = sqrt(2 * lr * decay)
    return {
        "angle": late[-1],
        "fall_from_30M": 1 - late[-1] / late[0],
        "later_than_20M": min(early) == early[-1] > 1.1 * late[-1],
        "formula": formula,
        "formula_with_momentum": formula / sqrt((1 + momentum) / (1 - momentum)),
    }
