"""What an experiment consists of: arms, grids, horizons, seeds, at three scales. No torch here.

An arm is a curve of a figure or a row of a table. `paper` has the paper's sizes, `s` model S and
minutes on one GPU, `nano` a few minutes on a CPU: the same code, other numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from angular_lab.config.named_runs import named_run
from angular_lab.config.spec import Spec
from angular_lab.errors import UserError
from angular_lab.experiments import published

SCALES = ("paper", "s", "nano")
LEARNING_RATE = "optim.lr"
OURS = "angular_muown"
WEIGHT_DECAY = {"adamw": 0.1, "muon": 0.1}  # all others 0, as in the paper
FAMILY = ("adamw", "muon", "normuon", "muown", "angular_muown")
TEASER = ("angular_muown", "muown", "normuon", "adamw")
HORIZONS = {
    "paper": (4768, 9537, 14305, 19073),  # 2.5, 5, 7.5, 10B tokens
    "s": (1373, 2747, 4120, 5493),  # 22.5, 45, 67.5, 90M tokens
    "nano": (30, 60, 90, 120),
}
SEEDS = {"paper": (0,), "s": (0, 1, 2), "nano": (0, 1, 2)}
_SMALL: dict[str, tuple[float, ...]] = {
    "adamw": (1e-3, 2e-3, 4e-3),
    "muon": (1e-2, 2e-2, 4e-2),
    "normuon": (2e-3, 4e-3, 8e-3),
    "muown": (2e-3, 4e-3, 8e-3),
    "angular_muown": (1e-2, 2e-2, 4e-2),
}
RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "paper": {name: row.rates for name, row in published.TEASER.items()}
    | {"muon": published.SMALL_RATES},
    "s": _SMALL | {"normuon": (4e-3, 8e-3, 1.6e-2)},
    "nano": _SMALL,
}
TUNED_AT_S = {  # learning rates, by the teaser at scale s
    "adamw": 2e-3,
    "muon": 5e-3,
    "normuon": 8e-3,
    "muown": 1.6e-2,
    "angular_muown": 2e-2,
}


@dataclass(frozen=True)
class Arm:
    """One method: a spec, over the values of one of its settings.

    A variant of another arm is judged at the value chosen for that arm and appears only in tables
    about variants. Trials of an experiment that differ in nothing but their cooldown share a trunk.
    """

    label: str
    spec: Spec
    values: tuple[float, ...]
    axis: str = LEARNING_RATE
    variant_of: str | None = None
    horizons: tuple[int, ...] | None = None  # None: those of the experiment


@dataclass(frozen=True)
class Experiment:
    name: str
    scale: str
    title: str
    arms: tuple[Arm, ...]
    horizons: tuple[int, ...]  # steps; where there are several, cooldowns branch off one trunk
    seeds: tuple[int, ...]  # the first chooses an arm's value, the others judge it
    ours: str | None = None  # the arm that the experiment is about
    expected: tuple[tuple[str, str], ...] | None = None  # None: ours below every other arm
    tuning_seed: int | None = None  # the seed that chose the learning rates held here, elsewhere
    only: tuple[str, ...] | None = None  # labels of the arms to train now; None: all

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Pairs to compare: the first is expected to have the lower loss."""
        if self.expected is not None:
            return self.expected
        others = [arm.label for arm in self.arms if arm.label != self.ours and not arm.variant_of]
        return tuple((self.ours, other) for other in others) if self.ours else ()

    @property
    def trained_arms(self) -> tuple[Arm, ...]:
        """The arms that are to be trained now."""
        return tuple(arm for arm in self.arms if self.only is None or arm.label in self.only)

    @property
    def trained_pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs of which both arms are to be trained now."""
        labels = {arm.label for arm in self.trained_arms}
        return tuple(pair for pair in self.pairs if labels.issuperset(pair))

    def horizons_of(self, arm: Arm) -> tuple[int, ...]:
        return self.horizons if arm.horizons is None else arm.horizons


def only_arms(plan: Experiment, patterns: Sequence[str]) -> Experiment:
    """Return the experiment with nothing to train but the arms whose labels match a pattern, and
    the arms that these are variants of, which choose their values."""
    matched: dict[str, None] = {}
    for pattern in patterns:
        arms = [arm for arm in plan.arms if fnmatchcase(arm.label, pattern)]
        if not arms:
            hint = _hint(plan, pattern)
            raise UserError(f"--only '{pattern}': no such method in {plan.name}; {hint}")
        roots = (arm.variant_of for arm in arms if arm.variant_of)
        matched |= dict.fromkeys((*roots, *(arm.label for arm in arms)))
    return replace(plan, only=tuple(matched))


def _hint(plan: Experiment, pattern: str) -> str:
    """Return what to write instead of a pattern that matches no arm."""
    wider = f"*{pattern.strip('*')}*"
    if any(fnmatchcase(arm.label, wider) for arm in plan.arms):
        return f"a pattern matches whole names: did you mean '{wider}'?"
    return f"it has {'; '.join(arm.label for arm in plan.arms)}"


def base(scale: str, paper_run: str = "dense-124m") -> Spec:
    """Return the scale's model and batch; the evaluation that counts is the last one."""
    spec = named_run(paper_run if scale == "paper" else scale)
    # as often as any experiment needs: those that share runs share what was measured
    spec = replace(spec, angle_every={"paper": 20, "s": 50, "nano": 5}[scale])
    if scale == "paper":
        return spec
    if scale == "nano":
        spec = replace(spec, schedule=replace(spec.schedule, warmup=10))
    return replace(spec, save_every=None, eval_every={"s": 1000, "nano": 30}[scale])


def trained_by(spec: Spec, name: str, **changes: Any) -> Spec:
    """Return the spec with another optimizer, and the paper's weight decay unless given."""
    values: dict[str, Any] = {"name": name, "weight_decay": WEIGHT_DECAY.get(name, 0.0), **changes}
    return replace(spec, optim=replace(spec.optim, **values))


def tuned_rate(scale: str, name: str) -> float:
    """Return the learning rate that an ablation holds: the best of the comparison at this scale
    where it is known, else the middle of the grid."""
    if scale == "paper" and name in published.TEASER:
        return published.TEASER[name].best_rate
    if scale == "s" and name in TUNED_AT_S:
        return TUNED_AT_S[name]
    rates = RATES[scale][name]
    return rates[len(rates) // 2]


def baseline_arm(scale: str) -> Arm:
    """Return AngularMuown at its tuned learning rate: what other arms are compared with."""
    return Arm(OURS, trained_by(base(scale), OURS), (tuned_rate(scale, OURS),))


def cooldown_variant(arm: Arm, share: float, horizon: int) -> Arm:
    """Return the arm with a cooldown over another share of the steps, at one horizon."""
    spec = replace(arm.spec, schedule=replace(arm.spec.schedule, decay=share))
    label = f"{arm.label}, cooldown {share:.0%}"
    return replace(arm, label=label, spec=spec, variant_of=arm.label, horizons=(horizon,))


def with_vocabulary(plan: Experiment, vocabulary: int) -> Experiment:
    """Return the experiment with models that have at least this many tokens."""

    def fit(arm: Arm) -> Arm:
        model = arm.spec.model
        larger = replace(model, vocabulary=max(model.vocabulary, vocabulary))
        return replace(arm, spec=replace(arm.spec, model=larger))

    return replace(plan, arms=tuple(map(fit, plan.arms)))


def tuning_seed(scale: str) -> int | None:
    """Return the seed that chose the tuned learning rates: it is not a judge of what holds them."""
    return SEEDS[scale][0] if scale == "s" else None
