"""The main comparison: every method over the whole corpus, which is read once.

Arms, seeds and verdicts are those of the kept runs, whichever they are: new runs need no edit.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from angular_lab.experiments.one_pass import LINEAR, LONG, SCHEDULES
from angular_lab.experiments.statistics import Curve, Verdict, tokens_on_line, verdict
from angular_lab.report.read import SweepResults
from evidence.dots import DotFigure, DotRow
from evidence.kept import OURS, Kept, Rows
from evidence.measures import CHOOSER, BySeed, Facts, grid, judged, judging, training_losses
from evidence.one_pass import METHODS
from evidence.speed import time_ratio
from evidence.titles import title

FIGURE = "whole-corpus.svg"
FLAT = f"{OURS}, kappa = 1"
NORMUONS = ("normuon", "normuon, decay 0.1")
FEWER_THAN_ADAMW, FEWER_THAN_NORMUON, VARIANT_GAIN = 1.6, 1.2, 0.01  # the goals


@dataclass(frozen=True)
class Arm:
    """A method under one schedule at its best learning rate; losses by seed."""

    method: str
    schedule: str
    lr: float
    in_grid: bool  # the best learning rate has neighbours on both sides
    losses: BySeed
    training: BySeed

    @property
    def is_judged(self) -> bool:
        return bool(judging(self.losses))

    @property
    def choosing_loss(self) -> float:
        """The loss by which a method's schedule is chosen."""
        return self.losses.get(CHOOSER, self.shown(self.losses))

    def shown(self, by_seed: BySeed) -> float:
        return judged(by_seed) if self.is_judged else by_seed[CHOOSER]

    def merged(self, other: "Arm") -> "Arm":
        """Return the arm with the seeds that only another sweep has."""
        return replace(
            self, losses=other.losses | self.losses, training=other.training | self.training
        )


class WholeCorpus:
    """All arms over the whole corpus, and each method at its best schedule."""

    def __init__(self, kept: Kept) -> None:
        self.sweep = kept.sweeps["one-pass-long"]
        [self.horizon] = self.sweep.horizons
        self.tokens = self.sweep.tokens(self.horizon) or 0.0
        self.arms: dict[tuple[str, str], Arm] = {}
        others = [s for s in kept.sweeps.values() if s is not self.sweep and self._is_of_it(s)]
        for sweep in (self.sweep, *others):
            for label in sweep.best:
                arm = self._arm(sweep, label)
                key = arm.method, arm.schedule
                self.arms[key] = self.arms[key].merged(arm) if key in self.arms else arm
        self.best: dict[str, Arm] = {}
        for arm in sorted(self.arms.values(), key=lambda arm: arm.choosing_loss):
            self.best.setdefault(arm.method, arm)
        self.ours = self.best[OURS]
        self.curve = self._curve(kept)

    def _is_of_it(self, sweep: SweepResults) -> bool:
        same_corpus = sweep.record.data == self.sweep.record.data
        return same_corpus and self.horizon in sweep.horizons

    def _arm(self, sweep: SweepResults, label: str) -> Arm:
        method, _, schedule = label.rpartition(", ")
        spec = sweep.settings(label)
        assert spec is not None
        if schedule not in SCHEDULES:
            shares = {share: name for name, share in SCHEDULES.items()}
            method, schedule = label, shares[round(spec.decay_steps / spec.steps, 2)]
        if sweep.optimizer(label) == OURS and not method.startswith(OURS):
            method = f"{OURS}, {method}"
        in_grid = sweep.has_grid(label) and not sweep.at_edge(label)
        losses = sweep.finals(label, self.horizon)
        training = training_losses(sweep, label, self.horizon)
        return Arm(method, schedule, sweep.best[label].lr, in_grid, losses, training)

    def _curve(self, kept: Kept) -> Curve:
        """Return AngularMuown's cooled-down losses by steps, at every horizon that its best
        settings were run to, on the seed that chose these."""
        label, losses = f"{OURS}, {self.ours.schedule}", {self.horizon: self.ours.losses[CHOOSER]}
        for sweep in kept.sweeps.values():
            if sweep.record.data != self.sweep.record.data or not self._is_ours(sweep, label):
                continue
            for horizon in sweep.horizons:
                finals = sweep.finals(label, horizon)
                losses |= {horizon: finals[CHOOSER]} if CHOOSER in finals else {}
        return sorted(losses.items())

    def _is_ours(self, sweep: SweepResults, label: str) -> bool:
        """True if another sweep's arm of this label is the same method on the same model."""
        spec = sweep.settings(label) if label in sweep.best else None
        ours = self.sweep.settings(label)
        return bool(spec and ours) and all(
            getattr(spec, name) == getattr(ours, name) for name in ("model", "batch", "optim")
        )

    @property
    def others(self) -> list[Arm]:
        """The other methods, not variants of AngularMuown."""
        return [arm for method, arm in self.best.items() if not method.startswith(OURS)]

    @property
    def variants(self) -> list[Arm]:
        return [
            arm
            for method, arm in self.best.items()
            if method.startswith(OURS) and method not in (OURS, FLAT)
        ]

    def verdict(self, arm: Arm) -> Verdict:
        """Judge "AngularMuown is lower", each at its best schedule."""
        return verdict(judging(self.ours.losses), judging(arm.losses))

    def lead(self, arm: Arm) -> float:
        """Return how far AngularMuown is below, on the common seeds that judge; without any, on
        the seed that chose."""
        mean = self.verdict(arm).paired.mean
        return arm.losses[CHOOSER] - self.ours.losses[CHOOSER] if mean is None else -mean

    def fewer_tokens(self, lead: float) -> float:
        """Return how many times fewer tokens AngularMuown needs for a loss that is higher by
        `lead`, below 1 if more: linear in the logarithm of tokens between horizons, and beyond."""
        (last, final), (first, _) = self.curve[-1], self.curve[0]
        for before, after in reversed([*pairwise(self.curve)]):
            if final + lead <= before[1] or before[0] == first:
                return last / tokens_on_line(before, after, final + lead)
        raise ValueError(f"one horizon makes no curve: {self.curve}")

    def neighbour_costs(self) -> dict[str, float]:
        """Return what the next lower and the next higher learning rate of AngularMuown's grid cost
        on the seed that chose."""
        losses = grid(self.sweep, f"{OURS}, {self.ours.schedule}")
        rates = list(losses)
        best = rates.index(self.ours.lr)
        costs = (losses[rates[best + i]] - losses[self.ours.lr] for i in (-1, 1))
        return dict(zip(("lower", "higher"), costs, strict=True))

    def kappa_at_the_end(self, quarter: SweepResults) -> dict[str, float]:
        """Return κ after the last step, at a quarter of the corpus and over all of it."""
        label = f"{OURS}, {self.ours.schedule}"
        trials = {"quarter": quarter.at_best(label), "whole": self.sweep.at_best(label)}
        runs = {name: x[CHOOSER].ends[max(x[CHOOSER].ends)] for name, x in trials.items()}
        return {name: run.series("kappa")[1][-1] for name, run in runs.items()}

    def table(self) -> Rows:
        head = ["method", "schedule, lr", "validation", "training", "seeds"]
        head += ["lower by", "95% interval", "lower?", "fewer tokens"]
        arms = sorted(self.best.values(), key=lambda arm: arm.shown(arm.losses))
        return [head, *map(self._row, arms)]

    def _row(self, arm: Arm) -> list[str]:
        seeds = ", ".join(map(str, sorted(judging(arm.losses)) or [CHOOSER]))
        rate = f"{arm.lr:.4g}{'' if arm.in_grid else ' †'}"
        cells = [title(arm.method), f"{arm.schedule}, {rate}"]
        cells += [f"{arm.shown(x):.4f}" for x in (arm.losses, arm.training)] + [seeds]
        if arm is self.ours:
            return [*cells, "", "", "", ""]
        result, lead = self.verdict(arm), self.lead(arm)
        ends = sorted(-end for end in result.interval or ())
        interval = " to ".join(f"{end:.3f}" for end in ends) or "-"
        label = result.label if arm.is_judged else "not judged"
        if arm in self.variants and arm.is_judged:
            own = verdict(judging(arm.losses), judging(self.ours.losses))
            label = f"variant lower: {own.label}"
        fewer = f"{self.fewer_tokens(lead):.2f}×" if lead > 0 else "not reached"
        return [*cells, f"{lead:.3f}", interval, label, fewer]

    def figure(self) -> str:
        rows = []
        for arm in self.arms.values():
            name, _, change = title(arm.method).partition(", ")
            detail = f"{change}, {arm.schedule}" if change else arm.schedule
            rows.append(DotRow(name, detail, arm.losses, arm.method.startswith(OURS)))
        return DotFigure(f"Validation loss at {self.tokens / 1e6:.0f}M tokens, nat", rows).svg()

    def goals(self) -> Rows:
        return [
            ["goal", "measured", "outcome"],
            self._goal_below_all(),
            self._goal_tokens("AdamW, tuned", ("adamw",), FEWER_THAN_ADAMW),
            self._goal_tokens("NorMuon", NORMUONS, FEWER_THAN_NORMUON),
            self._goal_variant(),
        ]

    def _goal_below_all(self) -> list[str]:
        text = "AngularMuown below every other method, each at its best schedule, with intervals "
        text += "that exclude zero"
        results = [self.verdict(arm) for arm in self.others]
        shown = [x for x in results if x.interval and x.interval[1] < 0]
        above = [x for x in results if x.outcome == "reversed"]
        lowest = all(self.lead(arm) > 0 for arm in self.others)
        measured = f"lowest of {len(results) + 1} methods" if lowest else "not the lowest loss"
        measured += f"; {len(shown)} of {len(results)} intervals exclude zero"
        not_run = sum(not method.startswith(OURS) for method in METHODS.values()) - len(results)
        measured += f"; {not_run} methods not run" if not_run else ""
        reached = len(shown) == len(results) and not not_run
        missed = "missed" if above else "open: not settled"
        return [text, measured, "reached" if reached else missed]

    def _goal_tokens(self, name: str, methods: tuple[str, ...], goal: float) -> list[str]:
        arm = min((self.best[m] for m in methods if m in self.best), key=lambda a: a.choosing_loss)
        factor = self.fewer_tokens(self.lead(arm))
        interval = self.verdict(arm).interval
        measured = f"{factor:.2f}" if factor > 1 else "its loss is not reached"
        if interval:
            ends = sorted(self.fewer_tokens(-x) for x in interval)
            measured += " ({:.2f} to {:.2f})".format(*ends)
        measured += f", {title(arm.method)}, {arm.schedule}"
        measured += "" if arm.is_judged else ", seed 0 alone"
        measured += "" if arm.in_grid else ", its grid not closed"
        text = f"{goal:g} times fewer tokens than {name}"
        outcome = "reached" if factor >= goal else "missed"
        return [text, measured, outcome if arm.is_judged else f"{outcome} on seed 0"]

    def _goal_variant(self) -> list[str]:
        text = f"a variant at least {VARIANT_GAIN:g} below AngularMuown at its best, on four seeds"
        if not self.variants:
            return [text, "none was run over the whole corpus", "missed"]
        arm = max(self.variants, key=lambda arm: -self.lead(arm))
        seeds = len(self.verdict(arm).paired.seeds)
        measured = f"{-self.lead(arm):.3f} lower on {seeds} seeds, {title(arm.method)}"
        if -self.lead(arm) < VARIANT_GAIN:
            return [text, measured, "missed"]
        return [text, measured, "reached" if seeds >= 4 else f"open: {seeds} of 4 seeds"]


def word(result: Verdict) -> str:
    """Return the outcome as one word, for a sentence to quote."""
    if result.paired.mean is None:
        return "unjudged"
    return "unsettled" if result.outcome == "inconclusive" else str(result.outcome)


def facts(kept: Kept) -> Facts:
    whole = WholeCorpus(kept)
    names = {label: name for name, label in METHODS.items()}
    others = {names[arm.method]: arm for arm in whole.best.values() if arm.method in names}
    long, linear = (whole.arms[OURS, s] for s in (LONG, LINEAR))
    flat = whole.arms[FLAT, LINEAR]
    gain = verdict(judging(long.losses), judging(linear.losses))
    fewer = {name: whole.fewer_tokens(whole.lead(arm)) for name, arm in others.items()}
    assert gain.paired.mean is not None
    return {
        "one_pass_long": {
            "runs": len(whole.sweep.trials),
            "not_started": len(whole.sweep.arms) - len(whole.sweep.best),
            "lr": {names[m]: arm.lr for m, arm in whole.best.items() if m in names},
            "lead": {name: whole.lead(arm) for name, arm in others.items()},
            "outcome": {name: word(whole.verdict(arm)) for name, arm in others.items()},
            "methods": len(whole.others) + 1,
            "ours_is_lowest": all(whole.lead(arm) > 0 for arm in whole.others),
            "normuon_decay_holds": whole.verdict(others["normuon_decay"]).outcome == "holds",
            "fewer_tokens": fewer,
            "less_time_than_adamw": fewer["adamw"] * time_ratio("adamw"),
            "adamw_in_half_the_tokens_missed": fewer["adamw"] < 2,
            "cooldown_gain": {"mean": -gain.paired.mean, "outcome": word(gain)},
            "flat_kappa_outcome": word(verdict(judging(flat.losses), judging(linear.losses))),
            "flat_kappa_gain": linear.losses[CHOOSER] - flat.losses[CHOOSER],
            "flat_kappa_lr_falls_to_0.01": flat.lr == 0.01
            and kept.sweeps["one-pass"].best[f"{FLAT}, {LINEAR}"].lr == 0.016,
            "ours_lr_is_0.025": whole.ours.lr == 0.025,
            "best_schedule_is_50%": whole.ours.schedule == LONG,
            "ours_keeps_its_lr": all(
                kept.sweeps["one-pass"].best[f"{OURS}, {s}"].lr == whole.arms[OURS, s].lr
                for s in (LONG, LINEAR)
            ),
            "neighbour_cost": whole.neighbour_costs(),
            "kappa_at_the_end": whole.kappa_at_the_end(kept.sweeps["one-pass"]),
        }
    }


def pairs_of_schedules(sweep: SweepResults) -> SweepResults:
    """Return the sweep of the whole corpus with these pairs: AngularMuown and every other method
    under each schedule, and each method's schedules."""
    methods = [*dict.fromkeys(arm.rpartition(", ")[0] for arm in sweep.arms)]
    same = [(f"{OURS}, {s}", f"{m}, {s}") for s in SCHEDULES for m in methods if m != OURS]
    own = [(f"{m}, {LONG}", f"{m}, {LINEAR}") for m in methods]
    pairs = (pair for pair in same + own if set(pair) <= sweep.best.keys())
    more = sorted({trial.seed for trial in sweep.trials} - {*sweep.record.seeds})
    record = replace(sweep.record, pairs=tuple(pairs), added_seeds=tuple(more))
    return replace(sweep, record=record)


def advice(kept: Kept) -> Rows:
    """Return AngularMuown's best learning rates and losses by schedule, with κ and without, at a
    quarter of the corpus and over all of it."""
    quarter, whole = kept.sweeps["one-pass"], WholeCorpus(kept)
    rows = []
    for schedule in SCHEDULES:
        for method, kappa in ((OURS, "falls"), (FLAT, "1")):
            first, arm = quarter.best[f"{method}, {schedule}"], whole.arms.get((method, schedule))
            cells = [f"{first.lr:g}", f"{first.loss:.4f}", "-", "-", "-"]
            if arm:
                mean = f"{judged(arm.losses):.4f}" if arm.is_judged else "-"
                cells[2:] = [f"{arm.lr:g}", f"{arm.choosing_loss:.4f}", mean]
            rows.append([schedule, kappa, *cells])
    head = ["schedule", "κ", "lr at 53M tokens", "loss, seed 0", "lr at 213M tokens"]
    return [[*head, "loss, seed 0", "loss, judged"], *rows]


def grids(kept: Kept) -> Rows:
    """Return the losses of the seed that chose by learning rate, at a quarter of the corpus and
    over all of it, the best in bold."""
    sweeps = kept.sweeps["one-pass"], kept.sweeps["one-pass-long"]

    def cell(sweep: SweepResults, arm: str) -> str:
        losses = dict(sorted(sweep.first_losses(arm).items()))
        pairs = ((lr, f"{lr:.3g}: {loss:.4f}") for lr, loss in losses.items())
        best = sweep.best[arm].lr if losses else None
        return ", ".join(f"**{text}**" if lr == best else text for lr, text in pairs) or "-"

    known = [f"{method}, {schedule}" for method in METHODS.values() for schedule in SCHEDULES]
    labels = dict.fromkeys([*known, *sweeps[1].best])
    rows = [[title(label), *(cell(sweep, label) for sweep in sweeps)] for label in labels]
    return [["method", "a quarter of the corpus", "the whole corpus"], *rows]
