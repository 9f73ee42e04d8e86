"""Further judging seeds for pairs that are still open. No torch here.

Which seeds a pair gets follows from the finished runs alone, so processes that share a store agree
on it, and a sweep that was interrupted continues with the same seeds.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from math import isfinite

from angular_lab.experiments.statistics import FURTHER, Verdict, verdict

Losses = Callable[[int], float | None]  # by seed: infinite if it diverged, None if unfinished


def new_seeds(planned: Sequence[int], tuning_seed: int | None) -> Iterator[int]:
    """Yield the seeds after the planned ones; a seed that chose learning rates never judges."""
    return (seed for seed in count(max(planned) + 1) if seed != tuning_seed)


def judge(seeds: Sequence[int], first: Losses, second: Losses) -> Verdict | None:
    """Judge a pair by the seeds on which neither method diverged; None if a run is unfinished."""
    by_seed = {seed: (first(seed), second(seed)) for seed in seeds}
    finished = {s: (a, b) for s, (a, b) in by_seed.items() if a is not None and b is not None}
    if len(finished) < len(seeds):
        return None
    both = {s: pair for s, pair in finished.items() if all(map(isfinite, pair))}
    return verdict({s: a for s, (a, _) in both.items()}, {s: b for s, (_, b) in both.items()})


def seeds_of_pair(
    judges: Sequence[int], new: Iterator[int], first: Losses, second: Losses, most: int
) -> list[int]:
    """Return the judging seeds of a pair: more in rounds while it is open, `most` in all.

    A round adds what the estimate asks for, but at most doubles the seeds: the estimate from two
    is poor, and every look at the results is another chance to be settled by luck.
    """
    seeds = list(judges)
    while len(seeds) < most:
        result = judge(seeds, first, second)
        if result is None or result.settled:
            break
        estimate = FURTHER if result.further_seeds is None else result.further_seeds
        room = min(estimate, max(len(seeds), 2 - len(seeds)), most - len(seeds))
        seeds += islice(new, max(1, room))
    return seeds
