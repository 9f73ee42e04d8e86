"""Noise: how far the loss of one seed moves when nothing that matters is changed."""

from statistics import stdev

from evidence.comparison import Comparison
from evidence.kept import OURS, Kept
from evidence.measures import Facts, grid, judging, spread
from evidence.whole_corpus import WholeCorpus

FEWEST = 3  # seeds whose standard deviation is worth a number


def facts(kept: Kept) -> Facts:
    return {"noise": {"largest": largest_shift(kept), **_signs(kept), **_of_seeds(kept)}}


def largest_shift(kept: Kept) -> float:
    return max(map(abs, _shifts(kept)))


def _signs(kept: Kept) -> Facts:
    shifts = _shifts(kept)
    return {"either_direction": min(shifts) < 0 < max(shifts)}


def _shifts(kept: Kept) -> list[float]:
    """Return how far a fifth less of a learning rate moves AngularMuown on seed 0: of all, the row
    lengths', or the embeddings'."""
    values = {("width", "d = 384"): 2**-6, ("radius", OURS): 0.016, ("aux-lr", OURS): 0.016}
    usual = Comparison(kept).at(OURS, "22.5M")[0]
    return [grid(kept.sweeps[s], arm)[value] - usual for (s, arm), value in values.items()]


def _of_seeds(kept: Kept) -> Facts:
    """Return standard deviations over the judging seeds of the whole corpus: of losses, and of
    differences between AngularMuown and what is compared with it."""
    whole = WholeCorpus(kept)
    losses = {arm.name: [*judging(arm.losses).values()] for arm in whole.best.values()}
    of_losses = {name: stdev(x) for name, x in losses.items() if len(x) >= FEWEST}
    ours = of_losses.pop(OURS)
    others = [arm for arm in whole.best.values() if arm is not whole.ours]
    pairs = (whole.verdict(arm).paired.differences for arm in others)
    return {
        "ours": ours,
        "others": spread(of_losses.values()),
        "ours_is_largest": ours > max(of_losses.values()),
        "settings_halve_it": of_losses[whole.changed.name] < ours / 2,
        "differences": spread(stdev(x) for x in pairs if len(x) >= FEWEST),
    }
