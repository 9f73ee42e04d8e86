"""A corpus read once: every method under three schedules, and the best of them over all of it."""

from dataclasses import replace
from math import inf

from angular_lab.report.read import SweepResults, TrialResult
from evidence.kept import Kept, Rows
from evidence.measures import (
    BySeed,
    Facts,
    grid,
    judging,
    lead,
    outcome,
    spread,
    summary,
    training_losses,
)

SCHEDULES = {"20%": "cooldown 20%", "50%": "cooldown 50%", "linear": "linear to zero"}
METHODS = {
    "ours": "angular_muown",
    "normuon": "normuon",
    "flat_kappa": "angular_muown, kappa = 1",
    "magnitude_direction": "magnitude_direction",
    "muown": "muown",
    "adamw": "adamw",
    "normuon_decay": "normuon, decay 0.1",
    "muon": "muon",
    "hyperball": "hyperball",
}
UNFINISHED = "hyperball", "20%"  # one run, which chooses nothing
Cells = dict[str, dict[str, float]]  # by method and schedule


def _arm(method: str, schedule: str) -> str:
    return f"{METHODS[method]}, {SCHEDULES[schedule]}"


class OnePass:
    """The sweep `one-pass`: the losses at the best learning rate of each grid, on seed 0."""

    def __init__(self, kept: Kept) -> None:
        self.sweep = kept.sweeps["one-pass"]
        [horizon] = self.sweep.horizons
        self.arms = {(m, s): _arm(m, s) for m in METHODS for s in SCHEDULES if (m, s) != UNFINISHED}
        self.loss: Cells = {m: {} for m in METHODS}
        self.training: Cells = {m: {} for m in METHODS}
        for (m, s), arm in self.arms.items():
            self.loss[m][s] = self.sweep.finals(arm, horizon)[0]
            self.training[m][s] = training_losses(self.sweep, arm, horizon)[0]

    def best_lr(self, method: str, schedule: str) -> float:
        return self.sweep.best[self.arms[method, schedule]].lr

    def table(self, title: str) -> Rows:
        """Return the validation losses with their learning rates, or the training losses; the
        best schedule of a method in bold, † for a learning rate at the edge of its grid."""

        def cell(m: str, s: str) -> str:
            if (m, s) not in self.arms:
                return "-"
            arm = self.arms[m, s]
            edge = " †" if self.sweep.at_edge(arm) else ""
            text = f"{self.loss[m][s]:.4f} at {self.best_lr(m, s):.4g}{edge}"
            text = f"{self.training[m][s]:.4f}" if title == "training" else text
            return f"**{text}**" if self.loss[m][s] == min(self.loss[m].values()) else text

        rows = ([method, *(cell(m, s) for s in SCHEDULES)] for m, method in METHODS.items())
        return [[title, *SCHEDULES.values()], *rows]

    def schedules_and_kappa(self) -> Rows:
        """Return AngularMuown's losses by learning rate, with κ and without."""
        kinds = {"ours": "falls", "flat_kappa": "1"}
        arms = {(s, m): self.arms[m, s] for s in SCHEDULES for m in kinds}
        grids = {key: grid(self.sweep, arm) for key, arm in arms.items()}
        rates = sorted({rate for losses in grids.values() for rate in losses})

        def cell(losses: dict[float, float], rate: float) -> str:
            text = f"{losses[rate]:.4f}" if rate in losses else "-"
            return f"**{text}**" if losses.get(rate) == min(losses.values()) else text

        rows = [
            [SCHEDULES[s], kinds[m], *(cell(losses, rate) for rate in rates)]
            for (s, m), losses in grids.items()
        ]
        return [["schedule", "κ", *(f"lr {rate:g}" for rate in rates)], *rows]


def facts(kept: Kept) -> Facts:
    one_pass, whole = OnePass(kept), kept.sweeps["one-pass-long"]
    sweep, loss = one_pass.sweep, one_pass.loss
    least = {m: min(by_schedule.values()) for m, by_schedule in loss.items()}
    return {
        "one_pass": {
            "runs": len(sweep.trials),
            "hyperball_runs": sum(trial.arm.startswith("hyperball") for trial in sweep.trials),
            "tokens_M": _tokens(sweep) / 1e6,
            "long_tokens_M": _tokens(whole) / 1e6,
            "long_steps": whole.horizons[0],
            "long_windows": int(_tokens(whole)) // 512,
            "lead": {s: _leads({m: x[s] for m, x in loss.items() if s in x}) for s in SCHEDULES},
            "best_lead": _leads(least),
            "best_schedule_gain": {m: x["20%"] - least[m] for m, x in loss.items() if "20%" in x},
            "decay_gain": {s: loss["normuon"][s] - loss["normuon_decay"][s] for s in SCHEDULES},
            "lr": {m: {s: one_pass.best_lr(m, s) for s in x} for m, x in loss.items()},
            "hyperball_20%": sweep.best[_arm(*UNFINISHED)].loss,
            "hyperball_below_adamw": least["adamw"] - least["hyperball"],
            **_grids(one_pass),
            **_kappa(one_pass),
            **_claims(one_pass, least),
        },
        "one_pass_long": _whole(whole),
    }


def _tokens(sweep: SweepResults) -> float:
    tokens = sweep.tokens(sweep.horizons[0])
    assert tokens is not None
    return tokens


def _leads(losses: dict[str, float]) -> dict[str, float]:
    return {m: loss - losses["ours"] for m, loss in losses.items()}


def _grids(one_pass: OnePass) -> Facts:
    """Which best learning rates are inside, and what the last step towards an edge brought."""
    edges = {key: arm for key, arm in one_pass.arms.items() if one_pass.sweep.at_edge(arm)}
    lowest = {f"{m}_{s}": list(grid(one_pass.sweep, x).values()) for (m, s), x in edges.items()}
    gains = {key: losses[1] - losses[0] for key, losses in lowest.items()}
    return {
        "planned": len(one_pass.sweep.arms),
        "closed": len(one_pass.arms) - len(edges),
        "at_edge": len(edges),
        "edge_gain": gains,
        "edges_are_muowns_adamws_and_hyperballs": set(gains)
        == {"muown_linear", "muown_20%", "adamw_20%", "hyperball_linear", "hyperball_50%"},
        "adamw_edge_is_flat": 0 < gains["adamw_20%"] < 1e-4,
    }


def _kappa(one_pass: OnePass) -> Facts:
    """A falling κ against κ = 1, each at its best learning rate and both at one."""
    methods = "ours", "flat_kappa"
    falling, flat = ([one_pass.best_lr(m, s) for s in SCHEDULES] for m in methods)
    at_flat_best = [grid(one_pass.sweep, one_pass.arms[m, "linear"])[flat[-1]] for m in methods]
    return {
        "kappa_gain": {
            s: one_pass.loss["flat_kappa"][s] - one_pass.loss["ours"][s] for s in SCHEDULES
        },
        f"flat_kappa_gain_at_{flat[-1]:g}": at_flat_best[0] - at_flat_best[1],
        "flat_kappa_needs_a_lower_lr": all(a < b for a, b in zip(flat, falling, strict=True)),
        "longer_falls_allow_higher_lr": falling == sorted(falling) and flat == sorted(flat),
    }


def _claims(one_pass: OnePass, least: dict[str, float]) -> Facts:
    def below_ours(schedule: str) -> list[set[str]]:
        """Return the methods below ours, of those that the documents list, by validation and by
        training losses."""
        listed = METHODS.keys() - {"hyperball", "flat_kappa"}
        both = one_pass.loss, one_pass.training
        return [{m for m in listed if x[m][schedule] < x["ours"][schedule]} for x in both]

    best_schedule = {m: min(x, key=x.__getitem__) for m, x in one_pass.loss.items()}
    linear = {m for m, s in best_schedule.items() if s == "linear"}
    return {
        "normuon_with_decay_lowest_then_ours": sorted(least, key=least.__getitem__)[:2]
        == ["normuon_decay", "ours"],
        "linear_best_for_all_but_three": METHODS.keys() - linear == {"normuon", "muown", "adamw"}
        and "20%" not in best_schedule.values(),
        "lowest_at_50%": below_ours("50%") == [set(), set()],
        "normuon_with_decay_lowest_at_linear": below_ours("linear") == [{"normuon_decay"}] * 2,
        "normuon_lowest_at_20%": below_ours("20%") == [{"normuon"}] * 2,
    }


def pairs_of_schedules(sweep: SweepResults) -> SweepResults:
    """Return the sweep of the whole corpus with these pairs: the two methods under each schedule
    and across them, and each method's schedules."""
    ours, other = (
        {schedule: _arm(method, schedule) for schedule in ("50%", "linear")}
        for method in ("ours", "normuon_decay")
    )
    pairs = (
        (ours["linear"], other["linear"]),
        (ours["50%"], other["50%"]),
        (ours["50%"], other["linear"]),
        (ours["50%"], ours["linear"]),
        (other["50%"], other["linear"]),
    )
    return replace(sweep, record=replace(sweep.record, pairs=pairs))


def _whole(sweep: SweepResults) -> Facts:
    """The whole corpus: four arms on seeds that judge, two more on the one that chose, and a
    single run."""
    [horizon] = sweep.horizons
    judged = {
        "linear": _arm("ours", "linear"),
        "normuon_decay": _arm("normuon_decay", "linear"),
        "cooldown_50%": _arm("ours", "50%"),
        "normuon_decay_50%": _arm("normuon_decay", "50%"),
    }
    chosen = judged | {"muon": _arm("muon", "linear"), "flat_kappa": _arm("flat_kappa", "linear")}
    single = _arm("adamw", "50%")
    at = {key: sweep.finals(arm, horizon) for key, arm in judged.items()}
    training = {key: training_losses(sweep, arm, horizon) for key, arm in judged.items()}
    seed_0 = {key: sweep.best[arm].loss for key, arm in chosen.items()}
    return {
        "runs": len(sweep.trials),
        "grids": len(chosen),
        "not_started": len(sweep.arms) - len(sweep.best),
        "all_grids_closed": sweep.best.keys() == {*chosen.values(), single}
        and not any(map(sweep.at_edge, chosen.values())),
        "loss": {key: summary(losses) for key, losses in at.items()},
        "seed0": seed_0 | {"adamw": sweep.best[single].loss},
        "cooldown_50%_lowest": _arm_of_the_lowest(sweep) == judged["cooldown_50%"],
        **_schedules(at, training),
        "lr": {key: sweep.best[arm].lr for key, arm in chosen.items()},
        "flat_kappa_gain": seed_0["linear"] - seed_0["flat_kappa"],
        "flat_kappa_is_between_the_schedules": seed_0["cooldown_50%"]
        < seed_0["flat_kappa"]
        < seed_0["linear"],
    }


def _arm_of_the_lowest(sweep: SweepResults) -> str:
    def loss(trial: TrialResult) -> float:
        end = trial.final(sweep.horizons[0])
        return end[1] if end else inf

    return min(sweep.trials, key=loss).arm


def _schedules(at: dict[str, BySeed], training: dict[str, BySeed]) -> Facts:
    """AngularMuown and NorMuon with decay, each linear to zero and after a cooldown of 50%."""
    linear, other = at["linear"], at["normuon_decay"]
    long, other_long = at["cooldown_50%"], at["normuon_decay_50%"]
    apart = {key: spread(judging(losses).values()) for key, losses in at.items()}
    seeds_apart = {key: x["max"] - x["min"] for key, x in apart.items()}
    gap = lead(linear, other)
    return {
        "lead": gap,
        "lead_at_50%": lead(long, other_long),
        "seeds_apart": seeds_apart,
        "training_has_the_same_signs": all(
            (training["normuon_decay"][s] > training["linear"][s]) == (other[s] > linear[s])
            for s in linear
        ),
        "inconclusive": outcome(linear, other) == "inconclusive"
        and gap["mean"] < min(0.005, seeds_apart["linear"]),
        "not_settled_under_any_schedule": all(
            outcome(ours, x) == "inconclusive"
            for ours, x in ((linear, other), (long, other), (long, other_long))
        ),
        "cooldown_50%_below_on_every_seed": all(
            long[seed] < x[seed] for x in (other, other_long) for seed in judging(long)
        ),
        "cooldown_50%_gain_holds": outcome(long, linear) == "holds",
        "normuon_decay_is_better_linear": outcome(other, other_long) == "holds",
    }
