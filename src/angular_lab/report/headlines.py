"""What a reader comes for: the result of a sweep in one figure and three sentences.

Every word and number of the sentences is computed from the losses, as the verdicts are.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from angular_lab.experiments.statistics import Outcome, Verdict, verdict
from angular_lab.report.figures.differences import pair_name
from angular_lab.report.read import SweepResults
from angular_lab.report.tables import tokens_form
from angular_lab.text import counted

NAMED = 4  # names that a sentence lists before it counts
NOUNS: dict[Outcome, tuple[str, str]] = {
    "holds": ("holds", "hold"),
    "reversed": ("is reversed", "are reversed"),
    "inconclusive": ("is open", "are open"),
}


def listed(names: Sequence[str], most: int = NAMED) -> str:
    """Return "a, b and c"; names beyond `most` are counted."""
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last


def quoted(name: str) -> str:
    """Return a method's name so that it reads as one thing in a sentence."""
    return f"“{name}”" if " " in name else name


def sentences(sweep: SweepResults) -> list[str]:
    """Return who is best and by how much, what is settled, and what limits the answer."""
    second = verdicts_sentence(sweep) if sweep.pairs else "Nothing is judged: no methods compete."
    return [best_sentence(sweep), second, limits_sentence(sweep)]


# -- who is best -------------------------------------------------------------------------------


def ranking(sweep: SweepResults) -> dict[str, dict[int, float]]:
    """Return final losses by method and seed, the lowest mean first.

    If two methods or more have judging seeds, the others are not ranked.
    """
    judged = {arm: x for arm in sweep.arms if (x := sweep.judged(arm, sweep.last(arm)))}
    if len(judged) < 2:
        judged = {arm: x for arm in sweep.arms if (x := sweep.shown(arm, sweep.last(arm)))}
    return {arm: judged[arm] for arm in sorted(judged, key=lambda x: fmean(judged[x].values()))}


def best_sentence(sweep: SweepResults) -> str:
    losses = ranking(sweep)
    if not losses:
        return "No run is finished yet, so there is nothing to compare."
    ends = {arm: tokens_form(*sweep.tokens(sweep.last(arm), arm)) for arm in losses}
    if len({*ends.values()}) > 1:
        return _lowest_by_tokens(losses, ends)
    at = f"at {ends[next(iter(ends))]} tokens"
    if not sweep.pairs:
        means = [f"{fmean(x.values()):.4f} ({quoted(arm)})" for arm, x in losses.items()]
        return f"The losses {at} are {listed(means)}."
    best, *others = losses
    seeds = len(losses[best])
    mean = f"the mean of {seeds} seeds" if seeds > 1 else "one seed"
    text = f"{quoted(best)} has the lowest loss {at}: {fmean(losses[best].values()):.4f} ({mean})"
    if not others:
        return f"{text}; no other method has a finished run yet."
    return f"{text}, {_distance(sweep, losses, best, others[0])}."


def _lowest_by_tokens(losses: Mapping[str, dict[int, float]], ends: Mapping[str, str]) -> str:
    """Return the lowest loss of the methods that end at the same number of tokens."""
    lowest: dict[str, str] = {}
    for arm, by_seed in losses.items():
        loss = f"{fmean(by_seed.values()):.4f} at {ends[arm]} ({quoted(arm)})"
        lowest.setdefault(ends[arm], loss)
    return (
        "Methods end at different numbers of tokens, where losses do not compare. The lowest are "
        f"{listed([*lowest.values()])}."
    )


def _distance(
    sweep: SweepResults, losses: Mapping[str, dict[int, float]], best: str, other: str
) -> str:
    """Return how far the best method is below the other on the seeds that both have.

    The interval is that of the difference which the figures and tables show, with its sign.
    """
    mean = verdict(losses[best], losses[other]).paired.mean
    if mean is None:
        return f"but it shares no seed with {quoted(other)}, which comes next"
    where = "below" if mean <= 0 else "above"  # above: methods have different seeds
    text = f"{abs(mean):.4f} {where} {quoted(other)}"
    a, b = (other, best) if (other, best) in sweep.pairs else (best, other)
    result = verdict(losses[a], losses[b])
    if result.interval is None:
        return f"{text} (no interval: one seed)"
    low, high = result.interval
    difference = f"{quoted(a)} minus {quoted(b)}: {result.paired.mean:+.4f}"
    return f"{text} ({difference}, 95% interval {low:+.4f} to {high:+.4f})"


# -- what is settled ---------------------------------------------------------------------------


def outcomes(sweep: SweepResults) -> dict[str, Verdict]:
    """Return the verdicts by the name of the pair, each at the last horizon of both methods."""
    return {
        pair_name(sweep, quoted(a), quoted(b)): _at_the_end(sweep, a, b) for a, b in sweep.pairs
    }


def verdicts_sentence(sweep: SweepResults) -> str:
    every = outcomes(sweep)
    found = {name: result for name, result in every.items() if result.paired.seeds}
    ends = {tokens for a, b in sweep.pairs for tokens in sweep.tokens(sweep.last(a, b), a, b)}
    at = f"at {tokens_form(*sorted(ends))} tokens"
    if not found:
        return f"No comparison {at} has a seed that judges it yet."
    if len(every) == 1:
        ((name, result),) = found.items()
        text = f"The comparison with {name} {at} {NOUNS[result.outcome][0]}{_progress(result)}"
        return f"{text}{_earlier(sweep)}."
    parts = []
    for outcome, words in NOUNS.items():
        chosen = {name: x for name, x in found.items() if x.outcome == outcome}
        if chosen:
            parts.append(f"{len(chosen)} {words[len(chosen) != 1]} ({_names(chosen)})")
    if missing := len(every) - len(found):
        parts.append(f"{missing} {'has' if missing == 1 else 'have'} no judging seed yet")
    firsts = [*dict.fromkeys(a for a, _ in sweep.pairs)]
    of = f" of {quoted(firsts[0])}" if len(firsts) == 1 else ""
    text = f"Of the {counted(len(every), 'comparison')}{of} {at}, {listed(parts)}"
    return f"{text}{_earlier(sweep)}."


def _names(chosen: Mapping[str, Verdict]) -> str:
    """Return the names of pairs, together where the same is known about them."""
    groups: dict[str, list[str]] = {}
    for name, result in chosen.items():
        groups.setdefault(_progress(result), []).append(name)
    return "; ".join(f"{listed(names)}{progress}" for progress, names in groups.items())


def _progress(result: Verdict) -> str:
    """Return what an open comparison shows so far, and what would settle it."""
    if result.outcome != "inconclusive":
        return ""
    label = result.label.removeprefix("inconclusive: ")
    settle = f", {result.to_settle} to settle" if result.to_settle else ""
    return f": {label}{settle}"


def _earlier(sweep: SweepResults) -> str:
    """Return what is settled at earlier horizons of pairs that have several."""
    verdicts = [
        verdict(sweep.judged(a, horizon), sweep.judged(b, horizon))
        for a, b in sweep.pairs
        for horizon in sweep.horizons
        if horizon < sweep.last(a, b) and sweep.reaches(a, horizon) and sweep.reaches(b, horizon)
    ]
    if not verdicts:
        return ""
    if len(verdicts) == 1:
        return f"; at the earlier horizon it {NOUNS[verdicts[0].outcome][0]}"
    counts = {x: sum(v.outcome == x for v in verdicts) for x in ("holds", "reversed")}
    which = "the earlier horizon" if len(sweep.horizons) == 2 else "the earlier horizons"
    reversed_too = f", {counts['reversed']} reversed" if counts["reversed"] else ""
    verb = "holds" if counts["holds"] == 1 else "hold"
    return f"; at {which} {counts['holds']} of {len(verdicts)} {verb}{reversed_too}"


def judged_sentence(sweeps: Sequence[SweepResults]) -> str:
    """Return what is settled over all sweeps at the last horizon, where two seeds or more judge."""
    found = [
        (sweep, a, b, result)
        for sweep in sweeps
        for a, b in sweep.pairs
        if len((result := _at_the_end(sweep, a, b)).paired.seeds) > 1
    ]
    if not found:
        return ""
    if len(found) > 1:
        counts = count_outcomes([result.outcome for *_, result in found])
        compared = f"{len(found)} comparisons on two seeds or more"
        return f"At the last horizon {compared} were judged: {counts}"
    ((sweep, a, b, result),) = found
    where = f" in {sweep.experiment}" if len(sweeps) > 1 else ""
    told = {
        "holds": f"{quoted(a)} is below {quoted(b)}",
        "reversed": f"{quoted(a)} is above {quoted(b)}",
        "inconclusive": f"{quoted(a)} and {quoted(b)} cannot be told apart yet",
    }
    return f"{told[result.outcome]}{where} ({len(result.paired.seeds)} seeds)"


def _at_the_end(sweep: SweepResults, a: str, b: str) -> Verdict:
    last = sweep.last(a, b)
    return verdict(sweep.judged(a, last), sweep.judged(b, last))


def count_outcomes(verdicts: Sequence[Outcome]) -> str:
    """Return "3 hold, 1 is reversed and 2 are open"."""
    parts = []
    for outcome, words in NOUNS.items():
        number = verdicts.count(outcome)
        if number:
            parts.append(f"{number} {words[number != 1]}")
    return listed(parts)


# -- what limits the answer --------------------------------------------------------------------


def limits_sentence(sweep: SweepResults) -> str:
    """Return which seeds judge, whose best value is at an edge, and what is unfinished."""
    parts = [_seeds(sweep), _edges(sweep), _gaps(sweep)]
    text = "; ".join(part for part in parts if part)
    return f"{text[0].upper()}{text[1:]}."


def _seeds(sweep: SweepResults) -> str:
    judges = sorted({s for arm in sweep.arms for s in sweep.judged(arm, sweep.last(arm))})
    if not judges:
        return f"no judging seed is finished: only seed {sweep.choosing_seed} has losses"
    names = listed([*map(str, judges)], most=len(judges))
    chose = sweep.choosing_seed
    text = f"seeds {names} judge" if len(judges) > 1 else f"one seed ({names}) judges"
    if chose is not None and chose not in judges:
        return f"{text}, seed {chose} chose the values"
    return text if len(judges) > 1 else f"{text}, so nothing is settled"


def _edges(sweep: SweepResults) -> str:
    if not sweep.has_choice:
        return ""
    edges = [arm for arm in sweep.arms if sweep.at_edge(arm)]
    if not edges:
        return f"no best {sweep.axis} is at the edge of its grid"
    names = listed([f"{quoted(arm)} ({sweep.best[arm].lr:g})" for arm in edges])
    return (
        f"the best {sweep.axis} of {names} is at the edge of its grid, so a wider one may change "
        "the order"
    )


def _gaps(sweep: SweepResults) -> str:
    trials = [*sweep.trials, *sweep.variants]
    kinds = {kind: sum(t.status == kind for t in trials) for kind in ("unfinished", "diverged")}
    parts = [f"{number} {kind}" for kind, number in kinds.items() if number]
    of = f"of {counted(len(trials), 'trial')}"
    return f"{of} {listed(parts)}" if parts else f"all {len(trials)} trials are finished"
