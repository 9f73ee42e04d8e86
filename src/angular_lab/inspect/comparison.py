"""Runs next to each other: settings that differ, losses at equal tokens, tokens to equal loss.

Between two evaluations a curve is a straight line over log(tokens). No torch here.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from string import ascii_uppercase
from textwrap import TextWrapper
from typing import Any

from angular_lab.config.overrides import as_typed
from angular_lab.config.spec import get, keys
from angular_lab.errors import UserError
from angular_lab.experiments.statistics import Curve, tokens_to_reach
from angular_lab.inspect.listing import Summary, summarize
from angular_lab.report.tables import (
    Mark,
    difference,
    form,
    loss,
    text_table,
    token_count,
)
from angular_lab.run_folder import Run, read_run
from angular_lab.text import counted, short_number

fill = TextWrapper(width=98).fill
LINES = 8  # of the table of losses; JSON has all
NOT_SETTINGS = ("parent",)  # a path


@dataclass(frozen=True)
class LossRow:
    """The validation losses at one number of tokens, by the runs' letters."""

    tokens: int
    losses: dict[str, float]
    interpolated: tuple[str, ...]  # runs that did not evaluate here


@dataclass(frozen=True)
class TokensRow:
    """The tokens at which each run first reached the best loss of one of them."""

    loss: float
    of: str
    tokens: dict[str, float | None]  # None: not reached, or before the first evaluation
    earlier: tuple[str, ...]  # runs whose first evaluation is lower


@dataclass(frozen=True)
class Comparison:
    """What is known about runs next to each other; the keys of dictionaries are their letters."""

    runs: dict[str, Summary]
    settings: dict[str, dict[str, str]]  # those that differ
    environment: dict[str, dict[str, str]]  # versions and devices that differ
    losses: list[LossRow]
    reached: list[TokensRow]
    speeds: dict[str, float | None]  # median tokens per second
    shared: dict[str, bool | None]  # other processes used the device; None: unknown
    notes: list[str]


def compare(folders: Sequence[Path], warnings: list[str]) -> Comparison:
    """Compare runs. Raises UserError if there are fewer than two or one cannot be read."""
    distinct = {path.resolve(): path for path in folders}
    if not 2 <= len(distinct) <= len(ascii_uppercase):
        raise UserError(
            f"{counted(len(distinct), 'different run')} to compare: give 2 to "
            f"{len(ascii_uppercase)}"
        )
    runs: dict[str, Run] = {}
    for letter, folder in zip(ascii_uppercase, distinct.values(), strict=False):
        run = read_run(folder, warnings)
        if run is None:
            raise UserError(warnings.pop().removesuffix(": left out"))
        runs[letter] = run
    curves = {letter: _curve(run.with_history(warnings)) for letter, run in runs.items()}
    notes = _notes(runs, curves)
    usable = _comparable(runs) and all(curves.values())
    return Comparison(
        runs={letter: summarize(run) for letter, run in runs.items()},
        settings=_settings(runs),
        environment=_environment(runs),
        losses=losses_at_equal_tokens(curves) if usable else [],
        reached=tokens_to_equal_loss(curves) if usable else [],
        speeds={letter: run.speed for letter, run in runs.items()},
        shared={letter: run.shared_device for letter, run in runs.items()},
        notes=notes,
    )


def _curve(run: Run) -> list[tuple[int, float]]:
    """Return tokens and validation losses, from the first to the last."""
    values = {m.tokens: x for m in run.evaluations if (x := m.get("val_loss")) is not None}
    return sorted((tokens, value) for tokens, value in values.items() if tokens > 0)


def _differing(values: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    return {key: by_run for key, by_run in values.items() if len({*by_run.values()}) > 1}


def _settings(runs: dict[str, Run]) -> dict[str, dict[str, str]]:
    """Return the settings that differ, as they are typed; the tokens by their fingerprint."""
    specs = {letter: run.spec for letter, run in runs.items()}
    names = [key for key in keys(next(iter(specs.values()))) if key not in NOT_SETTINGS]
    values = {
        key: {letter: as_typed(get(spec, key)) for letter, spec in specs.items()} for key in names
    }
    tokens = {letter: run.info.data[:12] or "unknown" for letter, run in runs.items()}
    return _differing(values | {"fingerprint of the data": tokens})


def _environment(runs: dict[str, Run]) -> dict[str, dict[str, str]]:
    names = dict.fromkeys(name for run in runs.values() for name in run.info.versions)
    values = {
        name: {letter: run.info.versions.get(name, "-") for letter, run in runs.items()}
        for name in names
    }
    commits = {
        letter: f"{run.info.git.get('commit', '')[:12]}{'+' * bool(run.info.git.get('changed'))}"
        for letter, run in runs.items()
    }
    return _differing(values | {"commit": commits})


def _comparable(runs: dict[str, Run]) -> bool:
    return len({run.comparable for run in runs.values()}) == 1


def _notes(runs: dict[str, Run], curves: dict[str, list[tuple[int, float]]]) -> list[str]:
    """Return what a reader has to know before a loss is compared with another."""
    notes = []
    if not _comparable(runs):
        notes.append("Losses are not compared: the runs have other tokens or vocabularies.")
    if missing := [letter for letter, curve in curves.items() if not curve]:
        notes.append(f"Losses are not compared: {', '.join(missing)} has no evaluation yet.")
    if len({run.spec.eval_tokens for run in runs.values()}) > 1:
        notes.append("eval_tokens differs: the losses are means over different validation tokens.")
    if len({run.spec.steps * run.spec.tokens_per_step for run in runs.values()}) > 1:
        notes.append(
            "The runs have different lengths: a loss before a run's cooldown is higher than that "
            "of a run which ends there."
        )
    if len({run.spec.seed for run in runs.values()}) > 1:
        notes.append("The seeds differ: part of each difference is noise.")
    elif not notes:
        notes.append("One seed each: a sweep with further seeds says whether a difference holds.")
    return notes


def losses_at_equal_tokens(curves: dict[str, list[tuple[int, float]]]) -> list[LossRow]:
    """Return the losses at the evaluations of the run with the fewest, as far as all runs got."""
    end = min(curve[-1][0] for curve in curves.values())
    start = max(curve[0][0] for curve in curves.values())
    grids = [[x for x, _ in curve if start <= x <= end] for curve in curves.values()]
    grid = min((g for g in grids if g), key=len, default=[])
    rows = []
    for tokens in sorted({*grid, *([end] if start <= end else [])}):
        exact = {letter: dict(curve).get(tokens) for letter, curve in curves.items()}
        values = {letter: _loss_at(curve, tokens) for letter, curve in curves.items()}
        interpolated = tuple(letter for letter, value in exact.items() if value is None)
        rows.append(LossRow(tokens, values, interpolated))
    return rows


def _loss_at(curve: Sequence[tuple[int, float]], tokens: int) -> float:
    """Return the loss on the line between the two evaluations around `tokens`."""
    i = bisect_left(curve, (tokens, float("-inf")))
    if curve[i][0] == tokens:
        return curve[i][1]
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 + (y1 - y0) * log(tokens / x0) / log(x1 / x0)


def tokens_to_equal_loss(curves: dict[str, list[tuple[int, float]]]) -> list[TokensRow]:
    """Return, for the best loss of every run, the tokens at which each run first reached it."""
    rows = []
    for letter, curve in curves.items():
        best = min(value for _, value in curve)
        reached = {other: _reach(c, best) for other, c in curves.items()}
        earlier = tuple(other for other, c in curves.items() if c[0][1] < best)
        rows.append(TokensRow(best, letter, reached, earlier))
    return sorted(rows, key=lambda row: -row.loss)


def _reach(curve: Curve, value: float) -> float | None:
    """Return the tokens at which the curve first falls to a loss; one point is not a curve yet."""
    if len(curve) > 1:
        return tokens_to_reach(curve, value)
    return curve[0][0] if curve[0][1] == value else None


# -- as text -----------------------------------------------------------------------------------


def to_json(result: Comparison) -> str:
    return json.dumps(asdict(result), indent=2)


def to_text(result: Comparison) -> str:
    """Return the comparison as tables, with a letter for each run."""
    parts = [_legend(result)]
    for title, values in (
        ("Settings that differ", result.settings),
        ("Versions and devices that differ", result.environment),
    ):
        if values:
            rows = [{"": key, **by_run} for key, by_run in values.items()]
            parts.append(f"{title}\n{_indent(text_table(rows))}")
        elif values is result.settings:
            parts.append("No setting differs.")
    if result.losses:
        parts.append(f"Validation loss at equal tokens\n{_indent(_loss_table(result))}")
    if result.reached:
        parts.append(f"Tokens to equal validation loss\n{_indent(_tokens_table(result))}")
    if any(result.speeds.values()):
        parts.append(f"Tokens per second, median\n{_indent(_speed_table(result))}")
    return "\n\n".join([*parts, "\n".join(map(fill, result.notes))])


def _indent(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _legend(result: Comparison) -> str:
    width = max(len(run.folder) for run in result.runs.values())
    return "\n".join(
        f"{letter}  {run.folder:{width}}  {run.state}, step {run.step:,} of {run.steps:,}"
        for letter, run in result.runs.items()
    )


def _loss_table(result: Comparison) -> str:
    first, *others = result.runs
    shown = _spread(result.losses)
    rows: list[dict[str, Any]] = []
    for line in shown:
        row: dict[str, Any] = {"tokens": token_count(line.tokens)}
        for letter, value in line.losses.items():
            row[letter] = loss(value, suffix="~" if letter in line.interpolated else "")
        rows.append(row | {f"{x} - {first}": difference(line.losses[x] - line.losses[first])
                           for x in others})  # fmt: skip
    table = text_table(rows)
    notes = []
    if any(line.interpolated for line in shown):
        notes.append("~ interpolated between two evaluations")
    if len(shown) < len(result.losses):
        notes.append(f"{len(shown)} of {len(result.losses)} points; --json has all")
    return "\n".join([table, *notes])


def _spread(rows: list[LossRow]) -> list[LossRow]:
    """Return at most LINES rows at equal distances, the last one included."""
    if len(rows) <= LINES:
        return rows
    step = len(rows) / LINES
    return [rows[round((i + 1) * step) - 1] for i in range(LINES)]


def _tokens_table(result: Comparison) -> str:
    rows: list[dict[str, Any]] = []
    for line in result.reached:
        row: dict[str, Any] = {"loss": loss(line.loss), "best of": line.of}
        for letter, tokens in line.tokens.items():
            row[letter] = None if tokens is None else Mark(tokens, "", _against(line, letter))
            if letter in line.earlier:
                row[letter] = Mark(None, "", "earlier")
        rows.append(row)
    cells = {value for line in result.reached for value in line.tokens.values()}
    notes = ["(x) tokens relative to the run whose best loss it is"]
    notes += ["- not reached"] if None in cells else []
    notes += (
        ["earlier: before the first evaluation"] if any(x.earlier for x in result.reached) else []
    )
    return f"{text_table(rows)}\n{'; '.join(notes)}"


def _speed_table(result: Comparison) -> str:
    row = {
        letter: value and Mark(value, "", form(value) + " shared" * bool(result.shared[letter]))
        for letter, value in result.speeds.items()
    }
    notes = []
    if any(result.shared.values()):
        notes.append("shared: other processes used the device; compare no times with this one")
    if unknown := [x for x, shared in result.shared.items() if shared is None]:
        notes.append(f"whether {', '.join(unknown)} had the device alone was not recorded")
    return "\n".join([text_table([row]), *notes])


def _against(line: TokensRow, letter: str) -> str:
    """Return the tokens of a run, and relative to those of the run whose best loss it is."""
    tokens, own = line.tokens[letter], line.tokens[line.of]
    assert tokens is not None
    assert own is not None  # every run reaches its own best loss
    return short_number(tokens) + (f" ({tokens / own:.2f}x)" if letter != line.of else "")
