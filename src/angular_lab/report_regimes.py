"""What the theory predicts for the angle per step, regime by regime (docs/theory.md).

Drawn over the constant phase of a run: the plateau and the power law are about a rate that stays.
"""

from dataclasses import dataclass
from math import sqrt
from statistics import median

from angular_lab.report_runs import Run

GROWING = ("muon", "normuon", "muown", "normuown")  # without decay nothing holds the rows' length
UNIT_STEP = ("", "fan_ratio")  # scales at which a row's step has length lr


@dataclass(frozen=True)
class Prediction:
    xs: list[float]
    ys: list[float]
    text: str


def prediction(run: Run) -> Prediction | None:
    """None where none of the three regimes is this run's."""
    optim = run.spec.optim
    steps = _constant_steps(run)
    if len(steps) < 2:
        return None
    size = run.spec.tokens_per_step
    tokens = [float(step * size) for step in steps]
    if optim.name == "angular_muown":
        if optim.scale not in UNIT_STEP:
            return None
        ys = [optim.lr * kappa(run, step) for step in steps]
        return Prediction(tokens, ys, "lr·κ_t for AngularMuown")
    if optim.weight_decay > 0:
        level = sqrt(2 * optim.lr * optim.weight_decay)
        return Prediction(tokens, [level] * len(steps), "a plateau at √(2·lr·weight decay)")
    if optim.name in GROWING:
        return _power_law(run, steps, tokens)
    return None


def kappa(run: Run, step: int) -> float:
    """As the optimizer computes it; the step counts from 0 there and from 1 in the log."""
    optim = run.spec.optim
    past = max(step - 1 - run.spec.schedule.warmup, 0)
    return (1.0 + optim.decay_scale * past) ** -optim.decay_degree


def _constant_steps(run: Run) -> list[int]:
    """Logged steps between warm-up and cool-down."""
    spec = run.spec
    cooling = spec.decay_steps if spec.schedule.kind == "wsd" else 0
    if spec.schedule.kind == "cosine":
        return []
    last = spec.steps - cooling
    return [
        line["step"]
        for line in run.metrics
        if spec.schedule.warmup < line["step"] <= last and line.get("angle_mean", 0) > 0
    ]


def _power_law(run: Run, steps: list[int], tokens: list[float]) -> Prediction:
    """The exponent is the prediction; the height is that of the measured angles."""
    angles = {line["step"]: line["angle_mean"] for line in run.metrics if "angle_mean" in line}
    height = median(angles[step] * sqrt(step) for step in steps)
    text = "t^(-1/2) where rows grow (no decay), at the measured height"
    return Prediction(tokens, [height / sqrt(step) for step in steps], text)
