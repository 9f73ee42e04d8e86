"""Noise: how much losses, and the differences between two methods, vary from seed to seed."""

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import stdev, variance

from evidence.kept import OURS, Kept
from evidence.measures import Facts, judging, spread
from evidence.whole_corpus import WholeCorpus

FEWEST = 3  # seeds whose standard deviation is worth a number


def facts(kept: Kept) -> Facts:
    """Return standard deviations over the judging seeds of the whole corpus: of losses, and of
    differences between AngularMuown and what is compared with it."""
    whole = WholeCorpus(kept)
    losses = {arm.name: [*judging(arm.losses).values()] for arm in whole.best.values()}
    of_losses = {name: stdev(x) for name, x in losses.items() if len(x) >= FEWEST}
    ours, pairs = of_losses.pop(OURS), _differences(whole)
    return {
        "noise": {
            "ours": ours,
            "others": spread(of_losses.values()),
            "ours_is_largest": ours > max(of_losses.values()),
            "settings_halve_it": of_losses[whole.changed.name] < ours / 2,
            "differences": spread(map(stdev, pairs)),
            "difference": pooled(pairs),
            "one_seed": 2 * pooled(pairs),
        }
    }


def one_seed(kept: Kept) -> float:
    """Return what a difference on one seed must exceed to be more than noise: two standard
    deviations of such differences."""
    return float(facts(kept)["noise"]["one_seed"])


def _differences(whole: WholeCorpus) -> list[Sequence[float]]:
    """Return the paired differences of every arm from what it is compared with."""
    others = [arm for arm in whole.best.values() if arm is not whole.ours]
    pairs = (whole.verdict(arm).paired.differences for arm in others)
    return [differences for differences in pairs if len(differences) >= FEWEST]


def pooled(samples: Iterable[Sequence[float]]) -> float:
    """Return the standard deviation within samples that have means of their own."""
    listed = list(samples)
    freedom = sum(len(x) - 1 for x in listed)
    return sqrt(sum((len(x) - 1) * variance(x) for x in listed) / freedom)
