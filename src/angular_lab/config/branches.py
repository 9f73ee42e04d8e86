"""Specs of a trunk, a run at a constant learning rate, and of the cooldowns that branch off it."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from angular_lab.config.overrides import count
from angular_lab.config.spec import Spec
from angular_lab.errors import UserError


def branch_point(horizon: int, share: float) -> int:
    """Return the step at which a cooldown over a share of the steps to `horizon` starts."""
    if not 0 < share < 1:
        raise UserError(f"a cooldown over {share:g} of the steps: it must be between 0 and 1")
    start = horizon - round(share * horizon)
    if not 0 < start < horizon:
        raise UserError(
            f"a cooldown over {share:g} of {horizon} steps has {horizon - start}: it must have at "
            "least one and leave some to the trunk"
        )
    return start


def steps_or_share(text: str) -> int | Fraction:
    """Parse a number of steps, or with % a share of them. Raises ValueError."""
    if not text.endswith("%"):
        return count(text)
    share = Fraction(text[:-1]) / 100
    if not 0 < share <= 1:
        raise ValueError(f"{text} is not between 0 and 100%")
    return share


def step_at(point: int | Fraction, steps: int) -> int:
    """Return the step that a number or a share of the run's steps stands for."""
    return point if isinstance(point, int) else round(point * steps)


def horizon_from(start: int, share: float) -> int:
    """Return the length of a run whose cooldown over a share of its steps begins at `start`: the
    inverse of `branch_point`."""
    if not 0 < share < 1:
        raise UserError(f"a cooldown over {share:g} of the steps: it must be between 0 and 1")
    exact = start / (1 - share)
    near = sorted(range(int(exact) - 1, int(exact) + 3), key=lambda steps: abs(steps - exact))
    fitting = (steps for steps in near if steps > start == steps - round(share * steps))
    return next(fitting, start + 1)


def trunk_spec(spec: Spec, starts: Sequence[int]) -> Spec:
    """Return the run at a constant learning rate that keeps checkpoints at all branch points."""
    s = spec.schedule
    if s.kind == "cosine":
        raise UserError(
            "schedule.kind=cosine: every learning rate depends on the length, so runs of several "
            "lengths have no steps in common; set schedule.kind=wsd"
        )
    if s.decay_steps is not None:
        raise UserError(
            f"schedule.decay_steps={s.decay_steps}: runs of several lengths cool down over a share "
            "of their steps; set schedule.decay instead"
        )
    schedule = replace(spec.schedule, kind="constant")
    return replace(spec, steps=max(starts), pins=tuple(sorted({*starts})), schedule=schedule)


def extended_spec(spec: Spec, steps: int, pins: Sequence[int] = ()) -> Spec:
    """Return the spec of a run at a constant learning rate that continues to `steps`. The step at
    which it ended becomes a branch point."""
    if steps < spec.steps:
        raise UserError(f"--to {steps}: the run has {spec.steps} steps already, and may only grow")
    longer = replace(spec, steps=steps)
    if min(spec.full_rate_until - spec.steps, longer.full_rate_until - steps) < 0:
        raise UserError(
            f"schedule.kind={spec.schedule.kind}: the learning rate falls towards the last of "
            f"{spec.steps} steps, and a longer run would have another one before that; only a run "
            "with schedule.kind=constant can be extended"
        )
    ends = {spec.steps} if steps > spec.steps else set()
    return replace(longer, pins=tuple(sorted({*spec.pins, *pins, *ends})))


def cooldown_spec(trunk: Spec, parent: str, start: int, horizon: int) -> Spec:
    """Return the cooldown that leaves the run `parent` at a step and ends at `horizon`."""
    return replace(
        trunk,
        steps=horizon,
        pins=(),
        parent=parent,
        parent_step=start,
        schedule=replace(trunk.schedule, kind="wsd", decay_steps=horizon - start),
    )
