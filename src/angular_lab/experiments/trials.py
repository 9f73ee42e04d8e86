"""Trials: changes of AngularMuown that may become part of it, on a corpus read once. No torch here.

First all of them at a quarter of the corpus, on the seed that chose the learning rates; then what
looks best over all of it, on four other seeds, together with the closest competitors.
"""

from dataclasses import replace
from typing import Any

from angular_lab.config.spec import ExtrapolateSpec, Spec
from angular_lab.experiments.definition import OURS, SEEDS, Arm, Experiment, tuning_seed
from angular_lab.experiments.one_pass import DECAYED, LINEAR, LONG, STEPS, spec_of

RATE = 2.5e-2  # AngularMuown's best under this schedule, at a quarter of the corpus and over all
LOWER = 1.6e-2  # the next one of its grid
AVERAGES = (0.03, 0.1)  # windows, as shares of the steps; evaluating them changes no run
STRENGTHS = (0.3, 0.6)  # of two published uses of EMA-Nesterov
# The auxiliary AdamW remembers longer, and the momentum rises from 0.85 and falls back.
LONGER: dict[str, Any] = {"aux_beta2": 0.99, "momentum_start": 0.85}
STACK = "extrapolation 0.6, aux_beta2 0.99, momentum from 0.85"
ALONE = tuple(f"extrapolation {strength:g}" for strength in STRENGTHS)
BASELINE = f"{OURS}, {LONG}"


def _trial(scale: str, strength: float = 0.0, **changes: Any) -> Spec:
    spec = spec_of(scale, OURS, LONG)
    if scale == "nano" and "momentum_start" in changes:
        changes |= {"momentum_ramp": 5}
    moved = ExtrapolateSpec(strength=strength)
    optim = replace(spec.optim, **changes)
    return replace(spec, optim=optim, extrapolate=moved, average=AVERAGES)


def _arms(scale: str) -> tuple[Arm, ...]:
    """Return the method as it is and its trials; those that lengthen steps also at a lower learning
    rate."""
    longer = {
        STACK: _trial(scale, STRENGTHS[1], **LONGER),
        ALONE[1]: _trial(scale, STRENGTHS[1]),
        "momentum 0.975": _trial(scale, momentum=0.975),
    }
    return (
        Arm(BASELINE, spec_of(scale, OURS, LONG), (RATE,)),
        *(Arm(label, spec, (RATE,)) for label, spec in longer.items()),
        *(Arm(f"{label}, lr {LOWER:g}", spec, (LOWER,)) for label, spec in longer.items()),
        Arm(ALONE[0], _trial(scale, STRENGTHS[0]), (RATE,)),
        Arm("aux_beta2 0.99, momentum from 0.85", _trial(scale, **LONGER), (RATE,)),
    )


def _against_baseline(arms: tuple[Arm, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((arm.label, BASELINE) for arm in arms if arm.label != BASELINE)


def trials(scale: str) -> Experiment:
    """Screen the trials on one seed: what is worth four others."""
    arms, title = _arms(scale), "Trials: changes of AngularMuown at a quarter of the corpus"
    pairs, horizon = _against_baseline(arms), STEPS[scale][:1]
    return Experiment("trials", scale, title, arms, horizon, SEEDS[scale][:1], BASELINE, pairs)


def closest(scale: str) -> Experiment:
    """Compare AngularMuown at its best schedule with the closest competitor under two, and with its
    own trials, on four seeds that chose nothing."""
    tried = _arms(scale)
    rivals = (
        Arm(f"{DECAYED}, {LINEAR}", spec_of(scale, DECAYED, LINEAR), (6e-3,)),
        Arm(f"{DECAYED}, {LONG}", spec_of(scale, DECAYED, LONG), (4e-3,)),
    )
    pairs = (*((BASELINE, rival.label) for rival in rivals), *_against_baseline(tried))
    seeds = (1, 2, 3, 4) if scale == "s" else SEEDS[scale]
    title, horizon = "Corpus read once: the closest methods and trials", STEPS[scale][-1:]
    return Experiment(
        "one-pass-closest", scale, title, (*tried[:1], *rivals, *tried[1:]), horizon, seeds,
        BASELINE, pairs, tuning_seed=tuning_seed(scale),
    )  # fmt: skip
