"""Schedules: pure functions of the step, counted from 0. There is nothing to save or load.

`wsd`, `cosine` and `linear` are factors of the learning rate; `wsd_schedule`, `cosine_schedule` and
`linear_schedule` make torch schedulers of them that fit kappa, and move the momentum by `ramp` if
they are asked to. `inverse_polynomial` is the angular multiplier kappa. `averaging` is the weight
of the newest parameters in an average.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import atan, cos, degrees, isfinite, pi, tan
from typing import Any, NamedTuple, overload
from weakref import WeakMethod

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from angular_muown.warn import warn


@overload
def inverse_polynomial(step: int, warmup_steps: int, scale: float, degree: float) -> float: ...
@overload
def inverse_polynomial(step: Tensor, warmup_steps: int, scale: float, degree: float) -> Tensor: ...
def inverse_polynomial(
    step: int | Tensor, warmup_steps: int, scale: float, degree: float
) -> float | Tensor:
    """Return kappa_t = (1 + c (t - t_w)_+)^(-p): 1 during warm-up, then decaying without an end.

    Args:
        step: t, from 0. A tensor gives a tensor on the same device.
        warmup_steps: t_w, the number of steps at 1.
        scale: c, per step.
        degree: p; 0 gives 1 at every step.
    """
    if isinstance(step, Tensor):
        return (1.0 + scale * (step - warmup_steps).clamp(min=0)) ** -degree
    return (1.0 + scale * max(step - warmup_steps, 0)) ** -degree


def wsd(step: int, total_steps: int, warmup_steps: int, decay_steps: int) -> float:
    """Return the factor of warm-up, stable, decay: linear from 0, constant 1, linear to 0.

    Args:
        step: the step, from 0.
        total_steps: number of steps of the run; the factor is 0 there.
        warmup_steps: length of the warm-up in steps.
        decay_steps: length of the cooldown in steps.
    """
    rise = (step + 1) / (warmup_steps + 1)
    fall = (total_steps - step) / (decay_steps + 1)
    return max(0.0, min(1.0, rise, fall))


def cosine(step: int, total_steps: int, warmup_steps: int = 0, floor: float = 0.0) -> float:
    """Return the factor of a linear warm-up followed by half a cosine.

    Args:
        step: the step, from 0.
        total_steps: number of steps of the run.
        warmup_steps: length of the warm-up in steps.
        floor: the factor at `total_steps`.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = _progress(step, total_steps, warmup_steps)
    return floor + (1.0 - floor) * 0.5 * (1.0 + cos(pi * progress))


def linear(step: int, total_steps: int, warmup_steps: int = 0, floor: float = 0.0) -> float:
    """Return the factor of a linear warm-up followed by a linear decay.

    Args:
        step: the step, from 0.
        total_steps: number of steps of the run.
        warmup_steps: length of the warm-up in steps.
        floor: the factor at `total_steps`.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return 1.0 - (1.0 - floor) * _progress(step, total_steps, warmup_steps)


def ramp(step: int, total_steps: int, ramp_steps: int, start: float, highest: float) -> float:
    """Return a value that rises linearly at the start of a run and falls back at its end.

    It is start + share (highest - start). The share is 0 at the first and the last step, and 1
    between the rise and the fall.

    Args:
        step: the step, from 0.
        total_steps: number of steps of the run.
        ramp_steps: length of the rise, and that of the fall, in steps; at least 1.
        start: the value of the first and the last step, and after the run.
        highest: the value in between.
    """
    if ramp_steps < 1:
        raise ValueError(f"ramp_steps={ramp_steps!r} is not valid: it must be at least 1")
    share = max(0.0, min(1.0, step / ramp_steps, (total_steps - 1 - step) / ramp_steps))
    return start + share * (highest - start)


def _progress(step: int, total_steps: int, warmup_steps: int) -> float:
    return min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))


# Fractions of a run. In our runs over one pass of a corpus, a cooldown of 50% was better than 20%
# and than a linear fall with kappa on (docs/evidence/results.md).
WARMUP, COOLDOWN = 0.02, 0.5
MOMENTUM_RAMP = 300  # steps, in all of our runs with such a momentum: the lab's optim.momentum_ramp


def wsd_schedule(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: float = WARMUP,
    cooldown: float = COOLDOWN,
    momentum_start: float | None = None,
    momentum_ramp: float = MOMENTUM_RAMP,
) -> LambdaLR:
    """Return a scheduler for warm-up, stable, decay: the schedule that kappa is made for.

    kappa starts to fall when the warm-up ends, so this sets `warmup_steps` of the groups. Call
    `scheduler.step()` after every `optimizer.step()`.

    Args:
        optimizer: any torch optimizer; one without kappa gets the same learning rates.
        total_steps: number of optimizer steps of the run; the learning rate is 0 there.
        warmup: length of the warm-up: a fraction of the run, or a number of steps (an integer).
        cooldown: length of the linear decay at the end, likewise.
        momentum_start: the momentum of the matrices' first and last step. It rises to the group's
            own at the start of the run, and falls back at the end. None keeps it constant.
        momentum_ramp: length of that rise, and of the fall: as for warmup.
    """
    steps = check_lengths(total_steps, warmup=warmup, cooldown=cooldown)
    momentum = _checked_ramp(optimizer, total_steps, momentum_start, momentum_ramp)
    _switch_on_kappa(optimizer)
    _set_kappa(optimizer, warmup_steps=steps["warmup"])
    factor = partial(
        _within_run,
        wsd,
        total_steps=total_steps,
        warmup_steps=steps["warmup"],
        decay_steps=steps["cooldown"],
    )
    return Schedule(optimizer, factor, momentum)


def cosine_schedule(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: float = WARMUP,
    floor: float = 0.0,
    momentum_start: float | None = None,
    momentum_ramp: float = MOMENTUM_RAMP,
) -> LambdaLR:
    """Return a scheduler for a linear warm-up followed by half a cosine.

    The learning rate falls over the whole run and the angle with it, so this switches kappa off
    (`decay_degree` is 0 in all groups).

    Args:
        optimizer: any torch optimizer; one without kappa gets the same learning rates.
        total_steps: number of optimizer steps of the run.
        warmup: length of the warm-up: a fraction of the run, or a number of steps (an integer).
        floor: the last learning rate, as a fraction of the highest.
        momentum_start: the momentum of the matrices' first and last step. It rises to the group's
            own at the start of the run, and falls back at the end. None keeps it constant.
        momentum_ramp: length of that rise, and of the fall: as for warmup.
    """
    momentum = _checked_ramp(optimizer, total_steps, momentum_start, momentum_ramp)
    return _falling_schedule(cosine, optimizer, total_steps, warmup, floor, momentum)


def linear_schedule(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: float = WARMUP,
    floor: float = 0.0,
    momentum_start: float | None = None,
    momentum_ramp: float = MOMENTUM_RAMP,
) -> LambdaLR:
    """Return a scheduler for a linear warm-up followed by a linear decay over the rest of the run.

    The learning rate falls over the whole run and the angle with it, so this switches kappa off
    (`decay_degree` is 0 in all groups).

    Args:
        optimizer: any torch optimizer; one without kappa gets the same learning rates.
        total_steps: number of optimizer steps of the run.
        warmup: length of the warm-up: a fraction of the run, or a number of steps (an integer).
        floor: the last learning rate, as a fraction of the highest.
        momentum_start: the momentum of the matrices' first and last step. It rises to the group's
            own at the start of the run, and falls back at the end. None keeps it constant.
        momentum_ramp: length of that rise, and of the fall: as for warmup.
    """
    momentum = _checked_ramp(optimizer, total_steps, momentum_start, momentum_ramp)
    return _falling_schedule(linear, optimizer, total_steps, warmup, floor, momentum)


def _falling_schedule(
    factor: Callable[..., float],
    optimizer: Optimizer,
    total_steps: int,
    warmup: float,
    floor: float,
    momentum: "Ramp | None",
) -> LambdaLR:
    steps = check_lengths(total_steps, warmup=warmup)
    if not is_number(floor) or not 0 <= floor <= 1:
        raise ValueError(f"floor={floor!r} is not valid: it must be a number from 0 to 1")
    _set_kappa(optimizer, warmup_steps=steps["warmup"], decay_degree=0.0)
    length = {"total_steps": total_steps, "warmup_steps": steps["warmup"]}
    factor = partial(_within_run, factor, **length, floor=float(floor))
    return Schedule(optimizer, factor, momentum)


def _within_run(
    factor: Callable[..., float], step: int, *, total_steps: int, **lengths: Any
) -> float:
    """Return the factor of a step; warn if the run is longer than its schedule."""
    if step > total_steps:
        warn(
            f"the schedule ended after total_steps={total_steps}, but scheduler.step() was called "
            f"{step} times: count optimizer steps, over all epochs, and pass their number"
        )
    return factor(step, total_steps=total_steps, **lengths)


# The momentum of a group before any schedule, next to torch's initial_lr.
INITIAL_MOMENTUM = "initial_momentum"
BASE_MOMENTA = "base_momenta"  # that of all groups in a schedule's state, next to its base_lrs


class Ramp(NamedTuple):
    """A momentum that rises from `start` to a group's usual one, and falls back."""

    total_steps: int
    steps: int
    start: float

    def at(self, step: int, usual: float) -> float:
        return ramp(step, self.total_steps, self.steps, self.start, usual)


class Schedule(LambdaLR):
    """A scheduler of the learning rate, and of the momentum if it is given a ramp.

    As with torch's learning rates, it saves what groups had before it, but not the schedule.
    Loading an optimizer or a schedule, in any order, gives the momentum of this schedule's step,
    whatever schedule the state was saved with; of several schedules it is the newest's.
    """

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[int], float], ramp: Ramp | None
    ) -> None:
        self.ramp = ramp
        super().__init__(optimizer, factor)
        self._follow_loading()

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        self._set_momentum()

    def _set_momentum(self) -> None:
        for group in self.optimizer.param_groups:
            usual = _usual_momentum(group)
            if self.ramp is not None and usual:
                group["momentum"] = self.ramp.at(self.last_epoch, usual)
                group[INITIAL_MOMENTUM] = usual
            else:
                restore_momentum(group)

    def _follow_loading(self) -> None:
        """Set the momentum again whenever the optimizer has loaded a state."""
        set_momentum = WeakMethod(self._set_momentum)  # no cycle, which would keep the optimizer

        def after_loading(_: Optimizer) -> None:
            if (method := set_momentum()) is not None:
                method()

        optimizer = self.optimizer
        if not hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
            optimizer = getattr(optimizer, "optimizer", None)  # a wrapper, such as accelerate's
        if isinstance(optimizer, Optimizer):
            optimizer.register_load_state_dict_post_hook(after_loading)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._follow_loading()  # torch does not copy an optimizer's hooks

    def state_dict(self) -> dict[str, Any]:
        state = {key: value for key, value in super().state_dict().items() if key != "ramp"}
        if self.ramp is not None:
            state[BASE_MOMENTA] = [_usual_momentum(g) for g in self.optimizer.param_groups]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({k: x for k, x in state_dict.items() if k != BASE_MOMENTA})
        if BASE_MOMENTA in state_dict:
            pairs = zip(self.optimizer.param_groups, state_dict[BASE_MOMENTA], strict=True)
            for group, usual in pairs:
                if usual:
                    group[INITIAL_MOMENTUM] = usual
        self._set_momentum()


def restore_momentum(group: dict[str, Any]) -> None:
    """Give a group the momentum that it had before any schedule."""
    if INITIAL_MOMENTUM in group:
        group["momentum"] = group.pop(INITIAL_MOMENTUM)


def _usual_momentum(group: Mapping[str, Any]) -> float:
    """Return a group's momentum before any schedule; 0 if it has none."""
    if group.get("algorithm") == "adamw":
        return 0.0
    return group.get(INITIAL_MOMENTUM, group.get("momentum", 0.0))


def _checked_ramp(
    optimizer: Optimizer, total_steps: int, start: float | None, length: float
) -> Ramp | None:
    """Check where the momentum of an optimizer starts, and how long it rises."""
    steps = _in_steps(total_steps, {"momentum_ramp": length})["momentum_ramp"]
    if steps < 1:
        raise ValueError(f"momentum_ramp={length!r} is not valid: it must be at least one step")
    if start is None:
        return None
    start = _python_number(start)
    if not is_number(start) or not 0 <= start < 1:
        raise ValueError(f"momentum_start={start!r} is not valid: it must be a number in [0, 1)")
    _check_momenta(optimizer, start)
    if 2 * steps > total_steps:
        advice = f"make it at most {total_steps // 2} steps"
        if total_steps < 2:
            advice = "leave out momentum_start"
        raise ValueError(
            f"momentum_ramp={length!r} ({steps} steps) does not fit into total_steps="
            f"{total_steps} twice, for the rise and the fall: {advice}"
        )
    return Ramp(int(total_steps), steps, float(start))


def _check_momenta(optimizer: Optimizer, start: float) -> None:
    """Check that the momentum of an optimizer can rise from `start`."""
    groups = [group for group in optimizer.param_groups if _usual_momentum(group)]
    if not groups:
        raise ValueError(
            f"momentum_start={start!r}: no group of {type(optimizer).__name__} has a momentum: "
            "give it one, or leave out momentum_start"
        )
    if any(group.get("capturable") for group in groups):
        raise ValueError(
            f"momentum_start={start!r} with capturable=True: a recorded step keeps the momentum "
            "that it was recorded with; leave out one of them"
        )
    least = min(map(_usual_momentum, groups))
    if start > least:
        raise ValueError(
            f"momentum_start={start!r} is above a group's momentum={least!r}: it must be at most "
            "that, because the momentum rises from it"
        )


def _switch_on_kappa(optimizer: Optimizer) -> None:
    """Undo what a falling schedule did to kappa, if this is another schedule's turn."""
    usual = optimizer.defaults.get("decay_degree")
    groups = [group for group in optimizer.param_groups if "decay_degree" in group]
    if usual and not any(group["decay_degree"] for group in groups):
        _set_kappa(optimizer, decay_degree=usual)


def _set_kappa(optimizer: Optimizer, **values: float) -> None:
    """Set values of kappa in the groups that have one."""
    for group in optimizer.param_groups:
        group.update({key: value for key, value in values.items() if key in group})


def check_lengths(total_steps: int, **lengths: float) -> dict[str, int]:
    """Return the lengths of the parts of a schedule in steps."""
    steps = _in_steps(total_steps, lengths)
    if sum(steps.values()) > total_steps:
        sizes = " and ".join(
            f"{name}={_python_number(lengths[name])!r} ({n} steps)" for name, n in steps.items()
        )
        raise ValueError(f"{sizes} do not fit into total_steps={total_steps}: shorten them")
    return steps


def _in_steps(total_steps: int, lengths: Mapping[str, float]) -> dict[str, int]:
    """Return lengths in steps; they may be fractions of the run."""
    total_steps, *parts = (_python_number(x) for x in (total_steps, *lengths.values()))
    lengths = dict(zip(lengths, parts, strict=True))
    if not is_number(total_steps) or total_steps != int(total_steps) or total_steps < 1:
        raise ValueError(f"total_steps={total_steps!r} is not valid: it must be an integer >= 1")
    steps = {}
    for name, length in lengths.items():
        if not is_number(length) or length < 0 or (length > 1 and length != int(length)):
            raise ValueError(
                f"{name}={length!r} is not valid: it must be a fraction of the run between 0 and "
                "1, or an integer number of steps"
            )
        # 1.0 is the whole run, 1 a single step
        is_fraction = isinstance(length, float) and length <= 1
        steps[name] = round(length * total_steps) if is_fraction else int(length)
    return steps


def _python_number(x: Any) -> Any:
    return x.item() if type(x).__module__ == "numpy" else x


WINDOWS = "a fraction of the steps between 0 and 1, or an integer number of steps >= 2"


def is_number(x: Any) -> bool:
    """True if x is a finite Python number that torch accepts; integers must fit into 64 bits."""
    if isinstance(x, int):
        return not isinstance(x, bool) and -(2**63) <= x < 2**63
    return isinstance(x, float) and isfinite(x)


def is_window(x: Any) -> bool:
    return is_number(x) and (0 < x < 1 or (x >= 2 and x == int(x)))


def averaging(window: float) -> Callable[[Any], Any]:
    """Return share(k), the weight of the newest parameters w in a running average a.

    After step k = 1, 2, ...: a <- a + share(k) (w - a). The first share is 1, so that nothing is
    left of the initial a. share() takes an integer, or a tensor and then returns a tensor on the
    same device.

    Args:
        window: below 1, a fraction of the steps so far: share(k) = 1 / max(1, window k). Step k
            counts as k^(1/window - 1) whatever the length n of the run, so the mean age is about
            window n / (1 + window): for 0.1, roughly the last tenth. This is polynomial-decay
            averaging (Shamir, Zhang: Stochastic Gradient Descent for Non-smooth Optimization,
            ICML 2013). From 2 on, a number of steps: share(k) = 1 / min(window, k), a plain mean
            that turns into an exponential average with decay 1 - 1/window.
    """
    if not is_window(window):
        raise ValueError(f"window={window!r} is not valid: it must be {WINDOWS}")

    def share(step: int | Tensor) -> float | Tensor:
        if isinstance(step, Tensor):  # in float64, like a Python number
            k = step.double()
            return 1 / ((window * k).clamp(min=1) if window < 1 else k.clamp(max=window))
        return 1 / (max(1, window * step) if window < 1 else min(window, step))

    return share


def angle_degrees(lr: float, kappa: float) -> float:
    """Return the angle by which a tangent step of length lr * kappa turns a unit row."""
    return degrees(atan(lr * kappa))


class DoubleDecay:
    """Notice a learning rate that falls over most of the run while kappa falls as well."""

    LEAST_FALLS = 5  # fewer are single drops, not a schedule that falls all the way
    LEAST_CONSTANT = 0.4  # share of the steps so far; a cooldown over half of a run leaves more

    def __init__(self) -> None:
        self.peak = self.last = 0.0
        self.left_peak: int | None = None  # the last step near the highest lr
        self.falls = 0  # steps that lowered lr since the peak
        self.noticed = False

    def notice(self, lr: float, base_lr: float, step: int, kappa: Callable[[], float]) -> bool:
        """Return True, once, if lr fell to half over most of the run so far and kappa fell too.

        Args:
            lr: of this step.
            base_lr: the lr that the group started with, before any schedule: the highest one, as
                far as a resumed run can know.
            step: number of this step, from 0.
            kappa: returns kappa of this step; called only if lr has fallen.
        """
        if self.left_peak is None and step > 0:
            self.peak = base_lr
        self.falls += lr < self.last
        self.last = lr
        if lr > self.peak:
            self.peak, self.falls = lr, 0
        if self.left_peak is None or lr >= 0.9 * self.peak:
            self.left_peak = step
        has_fallen = lr <= 0.5 * self.peak and self.falls >= self.LEAST_FALLS
        if self.noticed or not has_fallen or self.left_peak >= self.LEAST_CONSTANT * step:
            return False
        self.noticed = kappa() <= 0.8
        return self.noticed


def matching_lr(reading: Mapping[str, float]) -> float:
    """Return the AngularMuown lr whose step, at kappa = 1, turns rows as far as a measured step.

    Measure a run with AdamW or Muon at the learning rate's plateau, then continue with the same
    angle, or start a new run there:

        monitor = AngleMonitor(model, adamw, every=50)
        ...
        lr = matching_lr(monitor.read())

    Args:
        reading: what `AngleMonitor.read` returned.
    """
    angle = reading.get("angle_mean")
    if angle is None or not 0 < angle < pi / 2:
        raise ValueError(
            f"angle_mean={angle!r} is not an angle of a step: pass what AngleMonitor.read() "
            "returned after a measured step that moved the weights"
        )
    return tan(angle)
