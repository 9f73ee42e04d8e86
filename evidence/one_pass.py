"""A quarter of the corpus that is read once: every method under three schedules, on one seed."""

from angular_lab.report.read import SweepResults
from evidence.kept import Kept, Rows
from evidence.measures import Facts, grid, training_losses

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

    def table(self) -> Rows:
        """Return the validation losses with their learning rates; the best schedule of a method in
        bold, † for a learning rate at the edge of its grid."""

        def cell(m: str, s: str) -> str:
            if (m, s) not in self.arms:
                return "-"
            arm = self.arms[m, s]
            edge = " †" if self.sweep.at_edge(arm) else ""
            text = f"{self.loss[m][s]:.4f} at {self.best_lr(m, s):.4g}{edge}"
            return f"**{text}**" if self.loss[m][s] == min(self.loss[m].values()) else text

        rows = ([method, *(cell(m, s) for s in SCHEDULES)] for m, method in METHODS.items())
        return [["method", *SCHEDULES.values()], *rows]

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
    edges = sum(map(sweep.at_edge, one_pass.arms.values()))
    return {
        "one_pass": {
            "runs": len(sweep.trials),
            "hyperball_runs": sum(trial.arm.startswith("hyperball") for trial in sweep.trials),
            "tokens_M": _tokens(sweep) / 1e6,
            "long_tokens_M": _tokens(whole) / 1e6,
            "long_steps": whole.horizons[0],
            "long_windows": int(_tokens(whole)) // 512,
            "planned": len(sweep.arms),
            "closed": len(one_pass.arms) - edges,
            "at_edge": edges,
            "best_lead": {m: x - least["ours"] for m, x in least.items()},
            "longer_cooldown_gain": loss["ours"]["20%"] - loss["ours"]["50%"],
            "linear_gain": loss["ours"]["50%"] - loss["ours"]["linear"],
            "decay_gain": {s: loss["normuon"][s] - loss["normuon_decay"][s] for s in SCHEDULES},
            **_kappa(one_pass),
            **_claims(one_pass),
        },
    }


def _tokens(sweep: SweepResults) -> float:
    [tokens] = sweep.tokens(sweep.horizons[0])
    return tokens


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


def _claims(one_pass: OnePass) -> Facts:
    def lowest(losses: Cells, schedule: str) -> str:
        return min((m for m in losses if schedule in losses[m]), key=lambda m: losses[m][schedule])

    best_schedule = {m: min(x, key=x.__getitem__) for m, x in one_pass.loss.items()}
    linear = {m for m, s in best_schedule.items() if s == "linear"}
    return {
        "linear_best_for_all_but_three": METHODS.keys() - linear == {"normuon", "muown", "adamw"}
        and "20%" not in best_schedule.values(),
        "training_has_the_same_lowest": all(
            lowest(one_pass.loss, s) == lowest(one_pass.training, s) for s in SCHEDULES
        ),
    }
