"""The values of a setting as they are typed: `0.01,0.02`, `0.005:0.04:x2`, `0:1:+0.25`, `0..4`.

A word is KEY=VALUES, or KEY@VALUE=VALUES where it is only for methods that have that value. No
torch here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, get_args, get_origin, get_type_hints

from angular_lab.config.overrides import as_typed, count, override
from angular_lab.config.spec import CHANGEABLE, Spec, get, keys
from angular_lab.errors import UserError

MOST = 1000  # values of a range
DIGITS = 6  # of a range's values: what is shown is what is trained
CLOSE = Fraction(1, 1000)  # of a step: this close to the end of a range is the end
WHOLE = ("name", "data", "parent")  # a comma in these is a part of the text
# No loss depends on these, or there is a better place for them.
NOT_AXES = {
    "name": "it only names the run folders",
    "data": "the losses of different corpora cannot be compared",
    "steps": "write --horizons 1000,2000",
    **dict.fromkeys(("parent", "parent_step"), "branch sets it"),
    **dict.fromkeys(CHANGEABLE, "no loss depends on it, so its values would be the same run"),
}
INTEGERS = re.compile(r"(-?\d+)\.\.(-?\d+)")


@dataclass(frozen=True)
class Setting:
    """A word of the command line: a setting, its values, and which methods it is for."""

    word: str
    key: str
    values: tuple[Any, ...]
    where: tuple[str, ...] = ()  # values that a method must have

    def applies(self, chosen: Mapping[str, Any]) -> bool:
        """True for a method with these settings."""
        return all(any(is_value(x, text) for x in chosen.values()) for text in self.where)


def parse_setting(spec: Spec, word: str) -> Setting:
    """Parse a word. Raises UserError, which shows the word."""
    left, equals, text = word.partition("=")
    key, *where = left.split("@")
    if not equals:
        raise UserError(f"'{word}': write KEY=VALUE, or KEY=VALUES for an axis, as in seed=0..2")
    if not all(where):
        raise UserError(f"{word}: after @ comes a value, as in optim.lr@muon=0.01,0.02")
    if key not in keys(spec) or is_tuple(spec, key) or key in WHOLE:
        values = (get(override(spec, [f"{key}={text}"]), key),)
    else:
        texts = list(_texts(word, text, _is_number(spec, key)))
        values = tuple(get(override(spec, [f"{key}={part}"]), key) for part in texts)
    for i, value in enumerate(values):
        if value in values[:i]:
            raise UserError(f"{word}: {as_typed(value)} is given twice")
    if len(values) > 1 and key in NOT_AXES:
        raise UserError(f"{word}: {key} cannot be an axis; {NOT_AXES[key]}")
    return Setting(word, key, values, tuple(where))


def is_value(value: Any, text: str) -> bool:
    """True if the text stands for the value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return as_typed(value) == text


def is_tuple(spec: Spec, key: str) -> bool:
    return get_origin(_hint(spec, key)) is tuple


def _is_number(spec: Spec, key: str) -> bool:
    hint = _hint(spec, key)
    return bool({int, float} & {hint, *get_args(hint)})


def _hint(spec: Any, key: str) -> Any:
    """Return the type of a setting."""
    part, _, name = key.rpartition(".")
    return get_type_hints(type(get(spec, part) if part else spec))[name]


# -- lists and ranges ----------------------------------------------------------------------------


def _texts(word: str, text: str, is_number: bool) -> Iterator[str]:
    """Yield every value as a text that an override takes."""
    for part in text.split(","):
        part = part.strip()
        if not part:
            raise UserError(f"{word}: a value is missing; separate values by single commas")
        if is_number and (match := INTEGERS.fullmatch(part)):
            yield from _integers(word, int(match[1]), int(match[2]))
        elif is_number and ":" in part:
            yield from _range(word, part)
        else:
            yield part


def _integers(word: str, first: int, last: int) -> Iterator[str]:
    if last < first:
        raise UserError(f"{word}: {first}..{last} is empty; write the smaller number first")
    if last - first >= MOST:
        raise UserError(f"{word}: {last - first + 1} values; {MOST} are the most")
    return map(str, range(first, last + 1))


def _range(word: str, text: str) -> Iterator[str]:
    """Yield low, ..., high; `high` itself where the steps reach it."""
    parts = text.split(":")
    if len(parts) != 3 or parts[2][:1] not in ("x", "+"):
        raise UserError(
            f"{word}: write a range as LOW:HIGH:x2, each value twice the one before, or as "
            "LOW:HIGH:+2"
        )
    is_ratio = parts[2][0] == "x"
    low, high, step = (_number(word, part) for part in (parts[0], parts[1], parts[2][1:]))
    if high < low:
        raise UserError(f"{word}: {text} is empty; write the smaller number first")
    if is_ratio and low <= 0:
        raise UserError(f"{word}: a range with x must start above 0; use LOW:HIGH:+STEP")
    if step <= is_ratio:
        least = "a factor must be above 1" if is_ratio else "a step must be above 0"
        raise UserError(f"{word}: {parts[2]} never gets from {parts[0]} to {parts[1]}; {least}")
    value = low
    for i in range(MOST + 1):
        following = value * step if is_ratio else value + step
        if abs(value - high) <= CLOSE * (following - value):
            yield parts[1] if i else parts[0]
            return
        if value > high:
            return
        yield _shortest(value) if i else parts[0]
        value = following
    raise UserError(f"{word}: more than {MOST} values; take larger steps")


def _number(word: str, text: str) -> Fraction:
    """Parse exactly: 0.1 three times is 0.3, as it is typed elsewhere."""
    try:
        return Fraction(count(text)) if text[-1:].isalpha() else Fraction(text)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise UserError(f"{word}: '{text}' is not a number") from None


def _shortest(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.{DIGITS}g}"
