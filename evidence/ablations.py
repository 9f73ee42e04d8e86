"""What the comparison may hide, and what goes beyond the paper: one function for each sweep."""

from math import log2
from statistics import fmean

from evidence.comparison import Comparison
from evidence.kept import OURS, BySeed, Kept
from evidence.measures import (
    COOLDOWN,
    Facts,
    best,
    by_seed,
    grids,
    judged,
    lead,
    speed_up,
    spread,
    summary,
    training_loss,
)

EARLY, HALF, LATE = "22.5M", "45M", "90M"


def facts(kept: Kept) -> Facts:
    teaser = Comparison(kept)
    return {
        "aux_lr": _aux_lr(kept, teaser),
        "tuned_adamw": _tuned_adamw(kept, teaser),
        "radius": _radius(kept, teaser),
        "split": _split(kept),
        "width": _width(kept),
        "noise": _noise(kept, teaser),
        "larger": _larger(kept, teaser),
        "angles": _angles(kept),
        "variants": _variants(kept),
        "average": _average(kept, teaser),
    }


def _aux_lr(kept: Kept, teaser: Comparison) -> Facts:
    """A separate learning rate for embeddings, head and norms."""
    losses = kept.losses("aux-lr")
    chosen = {name: best(grid) for name, grid in grids(losses, EARLY).items()}
    separate = {name: by_seed(losses, name, lr, EARLY) for name, lr in chosen.items()}
    gain = {name: lead(separate[name], teaser.at(name, EARLY)) for name in chosen}

    def order(at: dict[str, BySeed]) -> list[str]:
        return sorted(at, key=lambda name: judged(at[name]))

    return {
        "separate": {name: summary(x) for name, x in separate.items()},
        "gain": gain,
        "lead_over_adamw": lead(separate[OURS], separate["adamw"]),
        "gain_over_a_quarter": gain["adamw"]["mean"] > teaser.lead("adamw", EARLY)["mean"] / 4,
        "only_adamw_gains": {n for n, x in gain.items() if x["mean"] > 0} == {"adamw"},
        "order_stays": order(separate) == order({n: teaser.at(n, EARLY) for n in chosen}),
    }


def _tuned_adamw(kept: Kept, teaser: Comparison) -> Facts:
    """The same for AdamW at 90M tokens, against AngularMuown as it was run again for it."""
    losses = kept.losses("tuned-adamw")
    grid = grids(losses, LATE)["adamw"]
    tuned = by_seed(losses, "adamw", best(grid), LATE)
    ours = by_seed(losses, OURS, teaser.best[OURS], LATE)
    return {
        "loss": summary(tuned),
        "gain": lead(tuned, teaser.at("adamw", LATE)),
        "lead": lead(ours, tuned),
        "speed_up": speed_up(teaser.curves[OURS], tuned),
        "four_times_behind": grid[0.008] - grid[0.016],
        "eight_times_is_best": best(grid) == 8 * teaser.best["adamw"],
    }


def _radius(kept: Kept, teaser: Comparison) -> Facts:
    """A separate learning rate for the row lengths."""
    losses = kept.losses("radius")
    quarter = by_seed(losses, "muown", 0.004, EARLY)
    return {
        "muown_quarter": summary(quarter),
        "muown_gain": judged(teaser.at("muown", EARLY)) - judged(quarter),
        "ours_0.016": summary(by_seed(losses, OURS, 0.016, EARLY)),
    }


def _split(kept: Kept) -> Facts:
    """How far the runs with split q, k, v and gate, up are below those with fused ones."""
    losses = kept.losses("split-qkv")
    values = {name: value for name, value, _ in losses}
    at = {name: by_seed(losses, name, value, EARLY) for name, value in values.items()}
    methods = {name.partition(",")[0] for name in at}
    return {name: lead(at[f"{name}, split"], at[f"{name}, fused"]) for name in methods}


def _width(kept: Kept) -> Facts:
    found = grids(kept.losses("width"), EARLY)
    at = {name.removeprefix("d = "): grid for name, grid in found.items()}
    vertices = {width: _vertex(grid) for width, grid in at.items()}
    return {
        "loss_384": at["384"][2**-6],
        "vertex": vertices,
        "fall": 1 - vertices["640"] / vertices["256"],
        "same_best_of_four": all(best(g) == 2**-6 and len(g) == 4 for g in at.values()),
    }


def _vertex(grid: dict[float, float]) -> float:
    """Return the vertex of the parabola through the best learning rate and its neighbours, over
    the learning rate's logarithm."""
    rates = sorted(grid)
    middle = rates.index(best(grid))
    low, lowest, high = (grid[rates[middle + i]] for i in (-1, 0, 1))
    shift = (low - high) / (2 * (low - 2 * lowest + high))
    return float(2 ** (log2(rates[middle]) + shift))


def _noise(kept: Kept, teaser: Comparison) -> Facts:
    """How far a fifth less of a learning rate moves AngularMuown on seed 0: of all, the row
    lengths', or the embeddings'."""
    usual = teaser.at(OURS, EARLY)[0]
    moved = [
        kept.losses("width")["d = 384", 2**-6, 0][EARLY] - usual,
        kept.losses("radius")[OURS, 0.016, 0][EARLY] - usual,
        kept.losses("aux-lr")[OURS, 0.016, 0][EARLY] - usual,
    ]
    return {"largest": max(map(abs, moved)), "either_direction": min(moved) < 0 < max(moved)}


def _larger(kept: Kept, teaser: Comparison) -> Facts:
    """How far AngularMuown is below NorMuon, one seed: by the weights and by averages."""
    ours, other = (kept.log("larger", (n, teaser.best[n], 0)) for n in (OURS, "normuon"))
    windows = {x: f"val_loss_averaged_{x}" for x in ("0.1", "0.2", "0.4")}
    keys = {"weights": "val_loss", **windows}
    ends = [[log[-1][key] for key in keys.values()] for log in (ours, other)]

    def lead_at(key: str, steps: range) -> float:
        means = [fmean(x[key] for x in log if x["step"] in steps) for log in (ours, other)]
        return means[1] - means[0]

    return {
        "lead": {name: other[-1][key] - ours[-1][key] for name, key in keys.items()},
        "lead_at_best_window": min(ends[1]) - min(ends[0]),
        "training_lead": training_loss(other) - training_loss(ours),
        "training_lead_first_pass": lead_at("loss", range(1200, 1301)),
        "averaged_lead_32.8M": lead_at(windows["0.1"], range(1000, 1001)),
        "averaged_lead_65.5M": lead_at(windows["0.1"], range(2000, 2001)),
        "kappa": [line["kappa"] for line in ours if "kappa" in line][-1],
    }


def _angles(kept: Kept) -> Facts:
    at = {name: x[EARLY] for (name, _, _), x in kept.losses("angles").items()}
    return {
        "flat_kappa_cost": at["angular_muown, kappa = 1"] - at[OURS],
        "muon_decay_cost": at["muon, decay 0.1"] - at["muon, no decay"],
    }


def _variants(kept: Kept) -> Facts:
    """Changes of the method on seed 0, by the weights and by the average over 549 steps."""
    trials = kept.losses("leads")
    ends = {trial[0]: kept.log("leads", trial)[-1] for trial in trials}
    loss = {name: end["val_loss"] for name, end in ends.items()}
    gain = {name: loss[name] - end["val_loss_averaged_549"] for name, end in ends.items()}
    above = {name: x - loss["as published"] for name, x in loss.items() if name != "as published"}
    pairs = [name for name in above if ", " in name]
    constrained = {name: x[EARLY] for (name, _, _), x in kept.losses("constrained").items()}
    slow = "kappa half as fast"
    return {
        "loss": {_slug(name): x for name, x in loss.items()},
        "above": {_slug(name): x for name, x in above.items()},
        "above_but_column_gains": spread(x for n, x in above.items() if n != "column gains"),
        "average_gain": spread(x for name, x in gain.items() if name != slow),
        "average_gain_slow_kappa": gain[slow],
        "single_changes": len(above) - len(pairs) + len(constrained) - 1,
        "pairs": len(pairs),
        "constrained": constrained["constrained polar factor"],
        "constrained_above": constrained["constrained polar factor"] - constrained["as published"],
        "constrained_published": constrained["as published"],
    }


def _slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def _average(kept: Kept, teaser: Comparison) -> Facts:
    """Averages of the last weights over a share of the steps."""

    def at(name: str, window: str, step: int) -> BySeed:
        """Return the losses of an average, or of the weights if the window is empty."""
        key = f"val_loss_averaged_{window}" if window else "val_loss"
        end = "trunk" if step == COOLDOWN else step
        logs = {s: kept.log("average", (name, teaser.best[name], s), end) for s in (0, 1, 2)}
        return {s: next(x[key] for x in log if x["step"] == step) for s, log in logs.items()}

    methods = (OURS, "normuon", "adamw")
    weights, averages = ({n: at(n, window, 5493) for n in methods} for window in ("", "0.1"))
    early = {w: [at(n, w, 2747) for n in (OURS, "normuon")] for w in ("0.1", "0.2")}
    ours, tenth, fifth, two_fifths = (at(OURS, w, 5493) for w in ("", "0.1", "0.2", "0.4"))
    curves = {s: {HALF: early["0.1"][0][s], LATE: tenth[s]} for s in tenth}
    gain = {n: {s: weights[n][s] - averages[n][s] for s in tenth} for n in methods}
    return {
        "gain": {n: summary(x) | {"all_seeds": fmean(x.values())} for n, x in gain.items()},
        "goal_reached": min(gain[OURS].values()) >= 0.01,
        "loss": summary(tenth),
        "lead": {n: lead(tenth, averages[n]) for n in methods[1:]},
        "lead_45M": {window: lead(*pair) for window, pair in early.items()},
        "speed_up": {n: speed_up(curves, averages[n]) for n in methods[1:]},
        "fifth_behind": fmean(fifth.values()) - fmean(tenth.values()),
        "two_fifths_worse_than_none": all(two_fifths[s] > ours[s] for s in ours),
        "without_cooldown": fmean(at(OURS, "0.1", COOLDOWN).values()),
        "weights": fmean(ours.values()),
    }
