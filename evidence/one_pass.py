"""A corpus read once: every method under three schedules, one seed."""

from evidence.kept import Kept, Rows
from evidence.measures import Facts, best, grids, is_inside, training_loss

SCHEDULES = {"20%": "cool-down 20%", "50%": "cool-down 50%", "linear": "linear to zero"}
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
Cells = dict[str, dict[str, float]]  # by method and schedule


class OnePass:
    """The sweep `one-pass`: grids, and the loss at the best learning rate of each."""

    def __init__(self, kept: Kept) -> None:
        found = grids(kept.losses("one-pass"), "53.2M")
        self.planned = len(found)
        self.grids = {
            (m, s): found[f"{method}, {schedule}"]
            for m, method in METHODS.items()
            for s, schedule in SCHEDULES.items()
        }
        [self.unfinished] = self.grids.pop(("hyperball", "20%")).values()  # chooses nothing
        self.loss: Cells = {m: {} for m in METHODS}
        self.training: Cells = {m: {} for m in METHODS}
        for (m, s), grid in self.grids.items():
            trial = f"{METHODS[m]}, {SCHEDULES[s]}", best(grid), 0
            self.loss[m][s] = min(grid.values())
            self.training[m][s] = training_loss(kept.log("one-pass", trial))

    def table(self, title: str) -> Rows:
        """Return the validation losses with their learning rates, or the training losses; the
        best schedule of a method in bold, † for a learning rate at the edge of its grid."""

        def cell(m: str, s: str) -> str:
            if s not in self.loss[m]:
                return "-"
            grid = self.grids[m, s]
            edge = "" if is_inside(grid) else " †"
            shown = f"{self.loss[m][s]:.4f} at {best(grid):.4g}{edge}"
            shown = f"{self.training[m][s]:.4f}" if title == "training" else shown
            return f"**{shown}**" if self.loss[m][s] == min(self.loss[m].values()) else shown

        rows = ([method, *(cell(m, s) for s in SCHEDULES)] for m, method in METHODS.items())
        return [[title, *SCHEDULES.values()], *rows]


def facts(kept: Kept) -> Facts:
    one_pass = OnePass(kept)
    loss = one_pass.loss
    least = {m: min(found.values()) for m, found in loss.items()}
    shorter = {m: loss[m]["20%"] - least[m] for m in loss if "20%" in loss[m]}
    return {
        "one_pass": {
            "lead": {s: _leads({m: x[s] for m, x in loss.items() if s in x}) for s in SCHEDULES},
            "best_lead": _leads(least),
            "best_schedule_gain": shorter,
            "decay_gain": {s: loss["normuon"][s] - loss["normuon_decay"][s] for s in SCHEDULES},
            "hyperball_20%": one_pass.unfinished,
            "hyperball_below_adamw": least["adamw"] - least["hyperball"],
            "highest_lr": {
                f"{m}_{s}": list(one_pass.grids[m, s].values())[-1]
                for m in ("normuon", "normuon_decay")
                for s in ("20%", "linear")
            },
            **_grids(one_pass),
            **_claims(one_pass, least),
            **_lengths(kept),
        },
        "one_pass_long": _long(kept),
    }


def _leads(losses: dict[str, float]) -> dict[str, float]:
    return {m: loss - losses["ours"] for m, loss in losses.items()}


def _grids(one_pass: OnePass) -> Facts:
    """Which best learning rates are inside, and what the last step towards an edge brought."""
    edges = [key for key, grid in one_pass.grids.items() if not is_inside(grid)]
    steps = {key: list(one_pass.grids[key].values())[:2] for key in edges}
    gains = {f"{m}_{s}": second - first for (m, s), (first, second) in steps.items()}
    return {
        "planned": one_pass.planned,
        "closed": len(one_pass.grids) - len(edges),
        "at_edge": len(edges),
        "edge_gain": gains,
        "edges_are_muowns_adamws_and_hyperballs": set(gains)
        == {"muown_linear", "muown_20%", "adamw_20%", "hyperball_linear", "hyperball_50%"},
        "adamw_edge_is_flat": 0 < gains["adamw_20%"] < 1e-4,
    }


def _claims(one_pass: OnePass, least: dict[str, float]) -> Facts:
    def order(cells: Cells, schedule: str) -> list[str]:
        """Return the methods that the documents list, the lowest first."""
        left = [m for m in cells if m not in ("hyperball", "flat_kappa")]
        return sorted(left, key=lambda m: cells[m][schedule])

    def ours_and_below(schedule: str) -> list[set[str]]:
        """Return the methods that are below ours, by validation and by training losses."""
        both = (order(cells, schedule) for cells in (one_pass.loss, one_pass.training))
        return [set(listed[: listed.index("ours")]) for listed in both]

    best_schedule = {m: min(x, key=x.__getitem__) for m, x in one_pass.loss.items()}
    linear = {m for m, s in best_schedule.items() if s == "linear"}
    ordered = sorted((m for m in least if m != "hyperball"), key=least.__getitem__)
    return {
        "normuon_with_decay_lowest_then_ours": ordered[:2] == ["normuon_decay", "ours"],
        "linear_best_for_all_but_three": set(METHODS) - linear == {"normuon", "muown", "adamw"}
        and "20%" not in best_schedule.values(),
        "lowest_at_50%": ours_and_below("50%") == [set(), set()],
        "normuon_with_decay_lowest_at_linear": ours_and_below("linear") == [{"normuon_decay"}] * 2,
        "normuon_lowest_at_20%": ours_and_below("20%") == [{"normuon"}] * 2,
    }


def _lengths(kept: Kept) -> Facts:
    """How many runs there are, and how many tokens, steps and windows of 512 tokens each read."""
    trials, long_trials = kept.losses("one-pass"), kept.losses("one-pass-long")
    [tokens] = {kept.log("one-pass", trial)[-1]["tokens"] for trial in trials}
    [(long_tokens, steps)] = {
        (end["tokens"], end["step"])
        for end in (kept.log("one-pass-long", trial)[-1] for trial in long_trials)
    }
    return {
        "runs": len(trials),
        "hyperball_runs": sum(name.startswith("hyperball") for name, _, _ in trials),
        "tokens_M": tokens / 1e6,
        "long_tokens_M": long_tokens / 1e6,
        "long_steps": steps,
        "long_windows": long_tokens // 512,
    }


def _long(kept: Kept) -> Facts:
    """The two best over the whole corpus, with a learning rate that falls to zero."""
    found = grids(kept.losses("one-pass-long"), "213M")
    names = [f"{METHODS[m]}, {SCHEDULES['linear']}" for m in ("ours", "normuon_decay")]
    ours, other = (found[name] for name in names)
    trained = [training_loss(kept.log("one-pass-long", (n, best(found[n]), 0))) for n in names]
    return {
        "runs": len(ours) + len(other),
        "lead": min(other.values()) - min(ours.values()),
        "training_lead": trained[1] - trained[0],
        "only_normuon_at_edge": is_inside(ours) and best(other) == min(other),
    }
