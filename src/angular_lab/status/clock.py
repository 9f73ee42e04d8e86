"""Where the time of a run goes: training, and the phases that interrupt it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from angular_lab.config.spec import Spec

PHASES = ("compiling", "evaluating", "sampling", "saving")
COMPILING, EVALUATING, SAMPLING, SAVING = PHASES
EVALUATION_SHARE = 1 / 3  # of a training step's time per token: a forward pass alone


class Clock:
    """Divide the time since the start of a process into training and phases.

    A device works asynchronously: `synchronize` waits for it, before and after each phase, so that
    no work is counted in the wrong place. Steps themselves are never waited for.
    """

    def __init__(self, spec: Spec, synchronize: Callable[[], None] = lambda: None) -> None:
        self.spec, self.synchronize = spec, synchronize
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.counts = dict.fromkeys(PHASES, 0)
        self.training, self.steps = 0.0, 0  # without compiling
        self.speeds: list[float] = []  # tokens per second, of each lap
        self.start(0)

    def start(self, step: int) -> None:
        self.began = self._lap_began = time.perf_counter()
        self._lap_step = step
        self._lap_phases = dict(self.phases)
        self._untimed = 0  # steps of this lap that were taken in a phase

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    @contextmanager
    def phase(self, name: str, steps: int = 0) -> Iterator[None]:
        """Count the time of the block as that of a phase; `steps` are taken inside it."""
        self.synchronize()
        began = time.perf_counter()
        try:
            yield
            self.synchronize()
        finally:
            self.phases[name] += time.perf_counter() - began
            self.counts[name] += 1
            self._untimed += steps

    def lap(self, step: int) -> float | None:
        """Return the tokens per second of training since the last call; None if no step was
        timed."""
        now = time.perf_counter()
        in_phases = sum(self.phases[name] - self._lap_phases[name] for name in PHASES)
        seconds = max(0.0, now - self._lap_began - in_phases)
        steps = step - self._lap_step - self._untimed
        self.training += seconds
        self._lap_began, self._lap_step, self._untimed = now, step, 0
        self._lap_phases = dict(self.phases)
        if steps < 1:
            return None
        self.steps += steps
        self.speeds.append(steps * self.spec.tokens_per_step / max(seconds, 1e-9))
        return self.speeds[-1]

    @property
    def speed(self) -> float | None:
        """The median tokens per second."""
        return median(self.speeds) if self.speeds else None

    def remaining(self, step: int) -> float | None:
        """Return the seconds that are left, evaluations, samples and checkpoints included; None
        before the first timed step."""
        if not self.steps:
            return None
        spec, left = self.spec, self.spec.steps - step
        per_step = self.training / self.steps
        guess = per_step * EVALUATION_SHARE * spec.eval_tokens / spec.tokens_per_step
        evaluation = self._mean(EVALUATING, guess * spec.evaluations)
        return (
            per_step * left
            + evaluation * evaluations_left(spec, step)
            + self._mean(SAMPLING, 0.0) * samples_left(spec, step)
            + self._mean(SAVING, 0.0) * saves_left(spec, step)
        )

    def _mean(self, name: str, guess: float) -> float:
        return self.phases[name] / self.counts[name] if self.counts[name] else guess


def evaluations_left(spec: Spec, step: int) -> int:
    """Return how often a run evaluates after `step`."""
    return _due(spec.eval_every, step, spec.steps) if spec.eval_every else 0


def samples_left(spec: Spec, step: int) -> int:
    """Return how often a run writes samples after `step`."""
    return _due(spec.sample_every, step, spec.steps) if spec.sample_every else 0


def saves_left(spec: Spec, step: int) -> int:
    """Return how many checkpoints a run writes after `step`; the last step always has one."""
    every, pinned = spec.save_every, {x for x in spec.pinned if step < x < spec.steps}
    if not every:
        return len(pinned) + (step < spec.steps)
    return _due(every, step, spec.steps) + sum(x % every != 0 for x in pinned)


def _due(every: int, step: int, steps: int) -> int:
    """Count the multiples of `every` after `step`; the last step counts in any case."""
    return steps // every - step // every + (steps % every != 0 and step < steps)
