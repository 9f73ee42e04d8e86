"""Trials: changes of AngularMuown that may become part of it, on a corpus read once. No torch here.

First those that were tried, at a quarter of the corpus, on the seed that chose the learning rates;
then what looks best over all of it, on four other seeds, together with the closest competitors.
"""

from dataclasses import replace
from typing import Any

from angular_lab.config.spec import ExtrapolateSpec, Spec
from angular_lab.experiments.definition import OURS, SEEDS, Arm, Experiment, tuning_seed
from angular_lab.experiments.one_pass import (
    ADAMW_RATE,
    AT_A_QUARTER,
    DECAYED,
    LINEAR,
    LONG,
    OURS_RATE,
    STEPS,
    spec_of,
)

LOWER = 1.6e-2  # the next learning rate of AngularMuown's grid below its best
AVERAGES = (0.03, 0.1)  # windows, as shares of the steps; evaluating them changes no run
STRENGTHS = (0.3, 0.6)  # of two published uses of EMA-Nesterov
# The auxiliary AdamW remembers longer, and the momentum rises from 0.85 and falls back.
MEMORY, RAMP = {"aux_beta2": 0.99}, {"momentum_start": 0.85}
# What writes into the residual stream turns less: the attention's output, and the second of an MLP.
ROLES = ("*.attn.out.weight=0.7", "*.mlp.down.weight=0.33")
LONGER = "aux_beta2 0.99, momentum from 0.85"
FORMS = "averages on the sphere, half"
# What is tried on top of that: a slower momentum, by a share that raises the mean age of the
# gradients in a step from 20 steps to about 50, and by half of it; heads as matrices of their own;
# the learning rate of embeddings; the two that were lowest, together. The last one only
# evaluates more averages.
FURTHER: dict[str, dict[str, Any]] = {
    "slow_share 0.56": {"slow_share": 0.56},
    "slow_share 0.28": {"slow_share": 0.28},
    "split_heads": {"split_heads": True},
    "split_heads, aux_lr 0.0125": {"split_heads": True, "aux_lr": 0.0125},
    "nesterov off": {"nesterov": False},
    "aux_lr 0.0125": {"aux_lr": 0.0125},
    "aux_lr 0.05": {"aux_lr": 0.05},
    "angles of out 0.7, down 0.33": {"angles": ROLES},
    "angles of down 0.33": {"angles": ROLES[1:]},
    "equal rows": {"equal_rows": True},
    "soap for mlps": {"soap": ("*.mlp.*",)},
    FORMS: {"forms": ("sphere", "half")},
}
ALONE = tuple(f"extrapolation {strength:g}" for strength in STRENGTHS)
STACK = f"{ALONE[1]}, {LONGER}"
BASELINE = f"{OURS}, {LONG}"
# The same for AdamW, which has no momentum of matrices: for its other parameters, or for all.
FOR_ADAMW: dict[str, dict[str, Any]] = {
    "aux_beta2 0.99": MEMORY,
    "all beta2 0.99": {"beta2": MEMORY["aux_beta2"]},
}
# The closest competitors, and their best learning rates over all of the corpus.
COMPETITORS = {
    (DECAYED, LINEAR): 6e-3,
    (DECAYED, LONG): 4e-3,
    ("muon", LINEAR): 8e-3,
    ("adamw", LONG): ADAMW_RATE,
}


def _changed(
    spec: Spec, scale: str, strength: float = 0.0, forms: tuple[str, ...] = (), **changes: Any
) -> Spec:
    if scale == "nano" and "momentum_start" in changes:
        changes |= {"momentum_ramp": 5}
    moved, optim = ExtrapolateSpec(strength=strength), replace(spec.optim, **changes)
    return replace(spec, optim=optim, extrapolate=moved, average=AVERAGES, average_forms=forms)


def _ours(scale: str) -> tuple[Arm, ...]:
    """Return the method as it is and its trials; those that lengthen steps also at a lower learning
    rate."""
    usual = spec_of(scale, OURS, LONG)
    longer = {
        STACK: _changed(usual, scale, STRENGTHS[1], **MEMORY, **RAMP),
        ALONE[1]: _changed(usual, scale, STRENGTHS[1]),
        "momentum 0.975": _changed(usual, scale, momentum=0.975),
    }
    others = {
        ALONE[0]: _changed(usual, scale, STRENGTHS[0]),
        LONGER: _changed(usual, scale, **MEMORY, **RAMP),
        "aux_beta2 0.99": _changed(usual, scale, **MEMORY),
        "momentum from 0.85": _changed(usual, scale, **RAMP),
        "aux_beta2 0.999, momentum from 0.85": _changed(usual, scale, aux_beta2=0.999, **RAMP),
    }
    return (
        Arm(BASELINE, usual, (OURS_RATE,)),
        *(Arm(label, spec, (OURS_RATE,)) for label, spec in longer.items()),
        *(Arm(f"{label}, lr {LOWER:g}", spec, (LOWER,)) for label, spec in longer.items()),
        *(Arm(label, spec, (OURS_RATE,)) for label, spec in others.items()),
    )


def _further(scale: str) -> tuple[Arm, ...]:
    """Return what is tried on top of the best trial."""
    usual = spec_of(scale, OURS, LONG)
    return tuple(
        Arm(f"{LONGER}, {name}", _changed(usual, scale, **MEMORY, **RAMP, **changes), (OURS_RATE,))
        for name, changes in FURTHER.items()
    )


def _competitors(scale: str, whole: bool) -> list[tuple[Arm, list[Arm]]]:
    """Return competitors as they are, each with what helped ours: it may help them as well."""
    arms = []
    for (method, schedule), lr in COMPETITORS.items():
        spec, label = spec_of(scale, method, schedule), f"{method}, {schedule}"
        values = (lr if whole else AT_A_QUARTER[method, schedule],)
        changes = FOR_ADAMW if method == "adamw" else {LONGER: MEMORY | RAMP}
        changed = [
            Arm(f"{label}, {name}", _changed(spec, scale, **settings), values)
            for name, settings in changes.items()
        ]
        arms.append((Arm(label, spec, values), changed))
    return arms


def _reference(label: str) -> str:
    """Return the arm that a trial is compared with: what it changes further, or the method."""
    return LONGER if LONGER in label and label != LONGER else BASELINE


def _plan(name: str, scale: str, title: str, seeds: tuple[int, ...], whole: bool) -> Experiment:
    ours = _ours(scale) if whole else (*_ours(scale), *_further(scale))
    competitors = _competitors(scale, whole)
    as_usual = [usual for usual, _ in competitors]
    changed = [(arm, usual) for usual, arms in competitors for arm in arms]
    pairs = (
        *((BASELINE, usual.label) for usual in as_usual),
        *((arm.label, _reference(arm.label)) for arm in ours[1:]),
        *((arm.label, usual.label) for arm, usual in changed),
        *((LONGER, arm.label) for arm, _ in changed),
    )
    arms = (ours[0], *as_usual, *ours[1:], *(arm for arm, _ in changed))
    horizon = STEPS[scale][-1 if whole else 0]
    chosen_on = tuning_seed(scale) if whole else None
    return Experiment(
        name, scale, title, arms, (horizon,), seeds, BASELINE, pairs, tuning_seed=chosen_on
    )


def trials(scale: str) -> Experiment:
    """Screen the trials on one seed: what is worth four others."""
    title = "Trials: changes of AngularMuown at a quarter of the corpus"
    return _plan("trials", scale, title, SEEDS[scale][:1], whole=False)


def closest(scale: str) -> Experiment:
    """Compare AngularMuown at its best schedule with its closest competitors, and with its own
    trials, on four seeds that chose nothing."""
    seeds = (1, 2, 3, 4) if scale == "s" else SEEDS[scale]
    title = "Corpus read once: the closest methods and trials"
    return _plan("one-pass-closest", scale, title, seeds, whole=True)
