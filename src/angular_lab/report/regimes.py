"""What the theory predicts for the angle per step, regime by regime (docs/theory.md).

The plateau and the power law are about a rate that stays: they are drawn over the constant phase.
"""

from dataclasses import dataclass
from math import sqrt
from statistics import median

from angular_lab.report.runs import Run

# Decay holds the angle only where it shortens the vector that the step is added to. Elsewhere it
# acts on a length that has no part in the direction.
DECAYING = ("adamw", "muon", "normuon")
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
    if optim.name == "angular_muown":
        return _explicit(run) if optim.scale in UNIT_STEP else None
    steps = _constant_steps(run)
    if len(steps) < 2:
        return None
    tokens = [float(step * run.spec.tokens_per_step) for step in steps]
    if optim.weight_decay > 0 and optim.name in DECAYING:
        level = sqrt(2 * optim.lr * optim.weight_decay)
        return Prediction(tokens, [level] * len(steps), "a plateau at √(2·lr·weight decay)")
    if optim.name in GROWING:
        return _power_law(run, steps, tokens)
    return None


def _explicit(run: Run) -> Prediction | None:
    """The schedule that was set: nothing is fitted, and it holds in warm-up and cool-down too."""
    lines = [line for line in run.metrics if line.get("angle_mean", 0) > 0 and line.get("lr")]
    if len(lines) < 2:
        return None
    ys = [line["lr"] * line.get("kappa", _kappa(run, line["step"])) for line in lines]
    return Prediction([float(line["tokens"]) for line in lines], ys, "lr·κ_t for AngularMuown")


def _kappa(run: Run, step: int) -> float:
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
