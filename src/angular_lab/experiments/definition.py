"""What an experiment consists of: lines, grids, horizons, seeds, at three scales. No torch here.

A line is a curve of a figure or a row of a table. `paper` has the paper's sizes, `s` model S and
minutes on one GPU, `nano` a few minutes on a CPU: the same code, other numbers.
"""

from dataclasses import dataclass, replace
from typing import Any

from angular_lab.config.named_runs import recipe
from angular_lab.config.spec import Spec
from angular_lab.experiments import published as paper

SCALES = ("paper", "s", "nano")
RATE = "optim.lr"
WEIGHT_DECAY = {"adamw": 0.1, "muon": 0.1}  # all others 0, as in the paper
FAMILY = ("adamw", "muon", "normuon", "muown", "angular_muown")
TEASER = ("angular_muown", "muown", "normuon", "adamw")
HORIZONS = {
    "paper": (4768, 9537, 14305, 19073),  # 2.5, 5, 7.5, 10B tokens
    "s": (1373, 2747, 4120, 5493),  # 22.5, 45, 67.5, 90M tokens
    "nano": (30, 60, 90, 120),
}
SEEDS = {"paper": (0,), "s": (0, 1, 2), "nano": (0, 1, 2)}
LONGER = {"paper": 0.0, "s": 0.2, "nano": 0.0}
_SMALL: dict[str, tuple[float, ...]] = {
    "adamw": (1e-3, 2e-3, 4e-3),
    "muon": (1e-2, 2e-2, 4e-2),
    "normuon": (2e-3, 4e-3, 8e-3),
    "muown": (2e-3, 4e-3, 8e-3),
    "angular_muown": (1e-2, 2e-2, 4e-2),
}
RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "paper": {name: row.rates for name, row in paper.TEASER.items()} | {"muon": paper.SMALL_RATES},
    "s": _SMALL | {"normuon": (4e-3, 8e-3, 1.6e-2)},
    "nano": _SMALL,
}
SETTLED = {  # at scale s, by its teaser
    "adamw": 2e-3,
    "muon": 5e-3,
    "normuon": 8e-3,
    "muown": 1.6e-2,
    "angular_muown": 2e-2,
}


@dataclass(frozen=True)
class Line:
    """One way of training, over the values of one setting."""

    label: str
    spec: Spec
    values: tuple[float, ...]
    axis: str = RATE


@dataclass(frozen=True)
class Experiment:
    name: str
    scale: str
    title: str
    lines: tuple[Line, ...]
    horizons: tuple[int, ...]  # steps; where there are several, cool-downs off one trunk
    seeds: tuple[int, ...]  # the first chooses a line's value, the others judge it
    longer: float = 0.0  # share of one more cool-down to the last horizon, off the same trunk
    settled_by: int | None = None  # the seed that chose the rates held here, in another experiment

    def __post_init__(self) -> None:
        shares = [line.spec.schedule.decay for line in self.lines]
        if self.longer and self.longer <= max(shares):
            raise ValueError(
                f"longer={self.longer:g}: the normal cool-downs take {max(shares):g} of the steps "
                "already; give more, or set longer=0"
            )
        if self.longer and len(self.horizons) < 2:  # or its runs would never be done
            raise ValueError(
                f"longer={self.longer:g} with the one horizon {self.horizons}: only several "
                "horizons have a trunk to leave; give more, or set longer=0"
            )


def base(scale: str, paper_recipe: str = "dense-124m") -> Spec:
    """The scale's model and batch; every evaluation that counts is the last one."""
    if scale == "paper":
        return recipe(paper_recipe)
    spec = recipe(scale)
    if scale == "nano":
        spec = replace(spec, schedule=replace(spec.schedule, warmup=10))
    return replace(spec, save_every=0, eval_every={"s": 1000, "nano": 30}[scale])


def trained_by(spec: Spec, name: str, **changes: Any) -> Spec:
    """By another optimizer, with the paper's weight decay unless told otherwise."""
    values: dict[str, Any] = {"name": name, "weight_decay": WEIGHT_DECAY.get(name, 0.0), **changes}
    return replace(spec, optim=replace(spec.optim, **values))


def held(scale: str, name: str) -> float:
    """The rate that an ablation holds: the best of the comparison at this scale where it is known,
    or the middle of the grid."""
    if scale == "paper" and name in paper.TEASER:
        return paper.TEASER[name].best_rate
    if scale == "s" and name in SETTLED:
        return SETTLED[name]
    rates = RATES[scale][name]
    return rates[len(rates) // 2]


def settled(scale: str) -> Line:
    """AngularMuown at that rate: what others are set against."""
    name = "angular_muown"
    return Line(name, trained_by(base(scale), name), (held(scale, name),))


def with_tokens(plan: Experiment, vocabulary: int) -> Experiment:
    """For a text with so many kinds of tokens: models that lack some get them."""

    def fitted(line: Line) -> Line:
        model = line.spec.model
        larger = replace(model, vocabulary=max(model.vocabulary, vocabulary))
        return replace(line, spec=replace(line.spec, model=larger))

    return replace(plan, lines=tuple(map(fitted, plan.lines)))


def settler(scale: str) -> int | None:
    """The seed that chose those rates: it is no judge of what holds them."""
    return SEEDS[scale][0] if scale == "s" else None
