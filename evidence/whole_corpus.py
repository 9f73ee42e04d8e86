"""The main comparison: every method over the whole corpus, which is read once.

Arms, seeds and verdicts are those of the kept runs, whichever they are: new runs need no edit.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from angular_lab.config.spec import Spec
from angular_lab.experiments.one_pass import LINEAR, LONG, SCHEDULES
from angular_lab.experiments.statistics import (
    LEAST,
    Curve,
    Verdict,
    tokens_on_line,
    verdict,
)
from angular_lab.experiments.trials import LONGER
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

    label: str
    method: str
    schedule: str
    change: str  # what is on trial: settings that differ from the method's own; "": none
    spec: Spec
    lr: float
    in_grid: bool  # the best learning rate has neighbours on both sides
    losses: BySeed
    training: BySeed

    @property
    def name(self) -> str:
        return f"{self.method}, {self.change}" if self.change else self.method

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
        [self.tokens] = self.sweep.tokens(self.horizon)
        self.arms: dict[tuple[str, str], Arm] = {}  # by name and schedule
        others = [s for s in kept.sweeps.values() if s is not self.sweep and self._is_of_it(s)]
        for sweep in (self.sweep, *others):
            for label in sweep.best:
                arm = self._arm(sweep, label)
                key = arm.name, arm.schedule
                self.arms[key] = self.arms[key].merged(arm) if key in self.arms else arm
        self.best: dict[str, Arm] = {}  # by name, under its best schedule
        for arm in sorted(self.arms.values(), key=lambda arm: arm.choosing_loss):
            self.best.setdefault(arm.name, arm)
        self.ours, self.changed = self.best[OURS], self.best[f"{OURS}, {LONGER}"]
        self.curves = {arm.name: self._curve(kept, arm) for arm in (self.ours, self.changed)}

    def _is_of_it(self, sweep: SweepResults) -> bool:
        same_corpus = sweep.record.data == self.sweep.record.data
        return same_corpus and self.horizon in sweep.horizons

    def _arm(self, sweep: SweepResults, label: str) -> Arm:
        spec = sweep.settings(label)
        assert spec is not None
        shares = {share: name for name, share in SCHEDULES.items()}
        schedule = shares[round(spec.decay_steps / spec.steps, 2)]
        method, named, change = label.partition(f", {schedule}")
        if not named:  # an arm that is named for what it changes about AngularMuown
            method, change = OURS, label
        in_grid = sweep.has_grid(label) and not sweep.at_edge(label)
        losses = sweep.finals(label, self.horizon)
        training = training_losses(sweep, label, self.horizon)
        change, lr = change.removeprefix(", "), sweep.best[label].lr
        return Arm(label, method, schedule, change, spec, lr, in_grid, losses, training)

    def _curve(self, kept: Kept, arm: Arm) -> Curve:
        """Return an arm's cooled-down losses by steps, at every horizon that it was run to, on the
        seed that chose; over the whole corpus the mean of the others where that one was not run."""
        losses = {self.horizon: arm.choosing_loss}
        for sweep in kept.sweeps.values():
            if sweep.record.data != self.sweep.record.data or not self._has(sweep, arm):
                continue
            for horizon in sweep.horizons:
                finals = sweep.finals(arm.label, horizon)
                losses |= {horizon: finals[CHOOSER]} if CHOOSER in finals else {}
        return sorted(losses.items())

    @staticmethod
    def _has(sweep: SweepResults, arm: Arm) -> bool:
        """True if a sweep's arm of the same label is the same method on the same model."""
        spec = sweep.settings(arm.label) if arm.label in sweep.best else None
        return spec is not None and all(
            getattr(spec, name) == getattr(arm.spec, name) for name in ("model", "batch", "optim")
        )

    @property
    def others(self) -> list[Arm]:
        """The other methods, as they are and changed; not variants of AngularMuown."""
        return [arm for arm in self.best.values() if not arm.method.startswith(OURS)]

    @property
    def variants(self) -> list[Arm]:
        return [arm for arm in self.best.values() if arm.method == OURS and arm.change]

    def reference(self, arm: Arm) -> Arm:
        """Return the AngularMuown that an arm is compared with: changed if another method is. What
        is tried on other methods is what helped this one."""
        return self.changed if arm.change and arm.method != OURS else self.ours

    def verdict(self, arm: Arm, ours: Arm | None = None) -> Verdict:
        """Judge "AngularMuown is lower", each at its best schedule."""
        return verdict(judging((ours or self.reference(arm)).losses), judging(arm.losses))

    def lead(self, arm: Arm, ours: Arm | None = None) -> float:
        """Return how far AngularMuown is below, on the common seeds that judge; without any, on
        the seed that chose."""
        mean = self.verdict(arm, ours).paired.mean
        below = ours or self.reference(arm)
        return arm.losses[CHOOSER] - below.losses[CHOOSER] if mean is None else -mean

    def fewer_tokens(self, arm: Arm) -> float:
        """Return how many times fewer tokens AngularMuown needs for an arm's loss; below 1 if
        more."""
        return fewer_tokens(self.curves[self.reference(arm).name], self.lead(arm))

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
        """Return the losses of every method at its best schedule."""
        rows = []
        for arm in self._lowest_first():
            seeds = ", ".join(map(str, sorted(judging(arm.losses)) or [CHOOSER]))
            rate = f"{arm.lr:.4g}{'' if arm.in_grid else ' †'}"
            losses = [f"{arm.shown(x):.4f}" for x in (arm.losses, arm.training)]
            rows.append([title(arm.name), f"{arm.schedule}, {rate}", *losses, seeds])
        return [["method", "schedule, lr", "validation", "training", "seeds"], *rows]

    def _lowest_first(self) -> list[Arm]:
        return sorted(self.best.values(), key=lambda arm: arm.shown(arm.losses))

    def pairs(self) -> list[tuple[Arm, Arm]]:
        """Return what is compared: AngularMuown as it is with every other method, changed with
        those that are changed alike, and its variants with it."""
        others = [arm for arm in self._lowest_first() if arm not in (self.ours, *self.variants)]
        return [
            *((self.ours, arm) for arm in others),
            *((self.changed, arm) for arm in others if arm.change),
            *((arm, self.ours) for arm in self.variants),
        ]

    def pairs_table(self) -> Rows:
        head = ["AngularMuown", "against", "lower by", "95% interval", "seeds", "lower?"]
        pairs = ((a, b) for a, b in self.pairs() if a.losses.keys() & b.losses.keys())
        return [[*head, "fewer tokens"], *(self._pair(ours, other) for ours, other in pairs)]

    def _pair(self, ours: Arm, other: Arm) -> list[str]:
        result, lead = self.verdict(other, ours), self.lead(other, ours)
        interval = " to ".join(
            f"{end:.3f}" for end in sorted(-end for end in result.interval or ())
        )
        seeds = ", ".join(map(str, result.paired.seeds))
        return [
            title(ours.change) if ours.change else "as it is",
            "AngularMuown as it is" if other is self.ours else title(other.name),
            f"{lead:.3f}",
            interval or "-",
            seeds or str(CHOOSER),
            result.label if seeds else "not judged",
            self._fewer_tokens(ours, result, lead),
        ]

    def _fewer_tokens(self, ours: Arm, result: Verdict, lead: float) -> str:
        curve = self.curves.get(ours.name)
        if curve is None:
            return "-"
        judged = result.paired.mean is not None
        factors = {"mean": fewer_tokens(curve, lead)}
        return spelled(fewer_tokens_and_ends(curve, result) if judged else factors)

    def figure(self) -> str:
        rows = []
        for arm in self.arms.values():
            detail = f"{title(arm.change)}, {arm.schedule}" if arm.change else arm.schedule
            rows.append(DotRow(title(arm.method), detail, arm.losses, arm.method.startswith(OURS)))
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
        methods = {method: self.verdict(arm) for method, arm in self.best_of_others().items()}
        shown = [x for x in methods.values() if x.interval and x.interval[1] < 0]
        above = [x for x in methods.values() if x.outcome == "reversed"]
        lowest = all(self.lead(arm) > 0 for arm in self.others)
        measured = f"lowest of {len(methods) + 1} methods" if lowest else "not the lowest loss"
        measured += f"; {len(shown)} of {len(methods)} intervals exclude zero"
        not_run = sum(not method.startswith(OURS) for method in METHODS.values()) - len(methods)
        measured += f"; {not_run} methods not run" if not_run else ""
        reached = len(shown) == len(methods) and not not_run
        missed = "missed" if above else "open: not settled"
        return [text, measured, "reached" if reached else missed]

    def best_of_others(self) -> dict[str, Arm]:
        """Return the best arm of each other method, as it is or changed."""
        lowest_first = sorted(self.others, key=lambda arm: arm.shown(arm.losses))
        return {arm.method: arm for arm in reversed(lowest_first)}

    def _goal_tokens(self, name: str, methods: tuple[str, ...], goal: float) -> list[str]:
        """Return the goal, the factors without the change and with it, and whether all that have
        judging seeds reach it."""
        arms = [arm for arm in self.others if arm.method in methods]
        groups = ([arm for arm in arms if bool(arm.change) is changed] for changed in (False, True))
        best = [min(group, key=lambda arm: arm.choosing_loss) for group in groups if group]
        deciding = [arm for arm in best if arm.is_judged] or best
        is_reached = min(map(self.fewer_tokens, deciding)) >= goal
        outcome = "reached" if is_reached else "missed"
        outcome += "" if deciding[0].is_judged else " on seed 0"
        measured = "; ".join(map(self._factor, best))
        return [f"{goal:g} times fewer tokens than {name}", measured, outcome]

    def _factor(self, arm: Arm) -> str:
        """Describe how many times fewer tokens than another method's arm, with its interval."""
        result, factor = self.verdict(arm), self.fewer_tokens(arm)
        text = f"{factor:.2f}" if factor > 1 else "its loss is not reached"
        if result.interval:
            text = spelled(fewer_tokens_and_ends(self.curves[self.reference(arm).name], result))
        text += f", {title(arm.name)}, {arm.schedule}"
        seeds = len(result.paired.seeds)
        text += f", {seeds} seeds" if arm.is_judged else ", seed 0 alone"
        return text if arm.in_grid else f"{text}, its grid not closed"

    def _goal_variant(self) -> list[str]:
        text = f"a variant at least {VARIANT_GAIN:g} below AngularMuown at its best, on four seeds"
        if not self.variants:
            return [text, "none was run over the whole corpus", "missed"]
        arm = max(self.variants, key=lambda arm: -self.lead(arm))
        seeds = len(self.verdict(arm).paired.seeds)
        measured = f"{-self.lead(arm):.3f} lower on {seeds} seeds, {title(arm.name)}"
        if -self.lead(arm) < VARIANT_GAIN:
            return [text, measured, "missed"]
        return [text, measured, "reached" if seeds >= 4 else f"open: {seeds} of 4 seeds"]


def fewer_tokens(curve: Curve, lead: float) -> float:
    """Return how many times fewer tokens a curve needs for a loss that is higher than its last by
    `lead`: linear in the logarithm of tokens between horizons, and beyond."""
    (last, final), (first, _) = curve[-1], curve[0]
    for before, after in reversed([*pairwise(curve)]):
        if final + lead <= before[1] or before[0] == first:
            return last / tokens_on_line(before, after, final + lead)
    raise ValueError(f"one horizon makes no curve: {curve}")


def fewer_tokens_and_ends(curve: Curve, result: Verdict) -> dict[str, float]:
    """Return the factor for the mean difference of "this curve is lower", and for the ends of its
    interval."""
    assert result.paired.mean is not None
    differences = {"mean": result.paired.mean}
    if result.interval:
        differences |= dict(zip(("high", "low"), result.interval, strict=True))
    return {name: fewer_tokens(curve, -difference) for name, difference in differences.items()}


def spelled(factors: dict[str, float]) -> str:
    text = f"{factors['mean']:.2f}"
    return f"{text} ({factors['low']:.2f} to {factors['high']:.2f})" if "low" in factors else text


def word(result: Verdict) -> str:
    """Return the outcome as one word, for a sentence to quote."""
    if result.paired.mean is None:
        return "unjudged"
    return "unsettled" if result.outcome == "inconclusive" else str(result.outcome)


def facts(kept: Kept) -> Facts:
    whole = WholeCorpus(kept)
    others = _by_name(whole)
    usual = {name: arm for name, arm in others.items() if not arm.change}
    adamw = others["adamw"], others["adamw_changed"]
    return {
        "one_pass_long": {
            "runs": len(whole.sweep.trials),
            "not_started": len(whole.sweep.arms) - len(whole.sweep.best),
            "lr": {name: arm.lr for name, arm in usual.items()},
            "lead": {name: whole.lead(arm) for name, arm in others.items()},
            "outcome": {name: word(whole.verdict(arm)) for name, arm in others.items()},
            "seeds": {name: len(whole.verdict(arm).paired.seeds) for name, arm in others.items()},
            "ours_is_lowest": all(whole.lead(arm) > 0 for arm in whole.others),
            "normuon_decay_holds": whole.verdict(others["normuon_decay"]).outcome == "holds",
            "adamw_changed_holds": whole.verdict(others["adamw_changed"]).outcome == "holds",
            "normuon_decay_changed_holds": whole.verdict(others["normuon_decay_changed"]).outcome
            == "holds",
            "muon_is_above_on_all": max(whole.verdict(others["muon"]).paired.differences) < 0,
            "adamw_in_half_the_tokens_missed": max(map(whole.fewer_tokens, adamw)) < 2,
            "as_it_is": _as_it_is(whole, others["normuon_decay_changed"]),
            "against_adamw": {
                "as_it_is": _factors(whole, whole.ours, others["adamw_changed"]),
                "changed": _factors(whole, whole.changed, others["adamw_changed"]),
            },
            "neighbour_cost": whole.neighbour_costs(),
            "kappa_at_the_end": whole.kappa_at_the_end(kept.sweeps["one-pass"]),
            **_schedules(kept, whole),
        }
    }


def _by_name(whole: WholeCorpus) -> dict[str, Arm]:
    """Return all arms but AngularMuown's variants by the names of facts; of several changed arms of
    a method, the best."""
    names = {label: name for name, label in METHODS.items()}
    arms: dict[str, Arm] = {}
    for arm in whole.best.values():  # the lowest loss first
        if arm.method in names and arm not in whole.variants:
            arms.setdefault(names[arm.method] + ("_changed" if arm.change else ""), arm)
    return arms


def _as_it_is(whole: WholeCorpus, normuon: Arm) -> Facts:
    """AngularMuown without the change against NorMuon with it."""
    result = verdict(judging(whole.ours.losses), judging(normuon.losses))
    assert result.paired.mean is not None
    return {"above_normuon": {"mean": result.paired.mean, "outcome": word(result)}}


def _factors(whole: WholeCorpus, ours: Arm, adamw: Arm) -> Facts:
    """Return how many times fewer tokens than AdamW one of AngularMuown's arms needs and how many
    times less time, as its steps take longer; both with the ends of the interval."""
    result = verdict(judging(ours.losses), judging(adamw.losses))
    fewer = fewer_tokens_and_ends(whole.curves[ours.name], result)
    less = {name: factor * time_ratio("adamw") for name, factor in fewer.items()}
    return {"fewer_tokens": fewer, "less_time": less}


def _schedules(kept: Kept, whole: WholeCorpus) -> Facts:
    """Schedules and κ of AngularMuown."""
    long, linear = (whole.arms[OURS, s] for s in (LONG, LINEAR))
    flat, quarter = whole.arms[FLAT, LINEAR], kept.sweeps["one-pass"].best
    gain = verdict(judging(long.losses), judging(linear.losses))
    normuon = verdict(judging(linear.losses), judging(whole.arms[NORMUONS[1], LINEAR].losses))
    assert gain.paired.mean is not None
    assert normuon.paired.mean is not None
    return {
        "no_lead_under_linear": abs(normuon.paired.mean) < LEAST,
        "cooldown_gain": {"mean": -gain.paired.mean, "outcome": word(gain)},
        "flat_kappa_outcome": word(verdict(judging(flat.losses), judging(linear.losses))),
        "flat_kappa_gain": linear.losses[CHOOSER] - flat.losses[CHOOSER],
        "flat_kappa_lr_falls_to_0.01": flat.lr == 0.01 and quarter[f"{FLAT}, {LINEAR}"].lr == 0.016,
        "ours_lr_is_0.025": whole.ours.lr == 0.025,
        "best_schedule_is_50%": whole.ours.schedule == LONG,
        "ours_keeps_its_lr": all(
            quarter[f"{OURS}, {s}"].lr == whole.arms[OURS, s].lr for s in (LONG, LINEAR)
        ),
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
