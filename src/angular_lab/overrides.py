"""`key=value` on the command line onto a frozen spec, with types and near misses said."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

S = TypeVar("S")

WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def override(spec: S, assignments: Iterable[str]) -> S:
    """A copy of the spec with `key=value` set; dotted keys reach into its parts."""
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"'{assignment}' is no override: write key=value")
        spec = _set(spec, key.split("."), text, key)
    return spec


def keys(spec: Any, prefix: str = "") -> list[str]:
    found = []
    for f in fields(spec):
        value = getattr(spec, f.name)
        nested = is_dataclass(value)
        found += keys(value, f"{prefix}{f.name}.") if nested else [f"{prefix}{f.name}"]
    return found


def _set(spec: Any, path: list[str], text: str, key: str) -> Any:
    name, *rest = path
    if not is_dataclass(spec) or name not in {f.name for f in fields(spec)}:
        raise _unknown(spec, key, name)
    current = getattr(spec, name)
    if rest:
        if not is_dataclass(current):
            raise ValueError(f"'{key}': {name} is a plain value, it has no parts")
        return replace(spec, **{name: _set(current, rest, text, key)})
    if is_dataclass(current):
        parts = ", ".join(f"{key}.{part}" for part in keys(current)[:4])
        raise ValueError(f"'{key}' has parts: set one of {parts}, ...")
    return replace(spec, **{name: _convert(text, type(current), key)})


def _unknown(spec: Any, key: str, name: str) -> ValueError:
    valid = keys(spec) if is_dataclass(spec) else []
    near = get_close_matches(name, valid, n=1, cutoff=0.4) or valid[:5]
    return ValueError(f"unknown key '{key}'; did you mean {' or '.join(near)}?")


def _convert(text: str, wanted: type, key: str) -> Any:
    try:
        if wanted is bool:
            return WORDS[text.lower()]
        if wanted is int:
            return count(text)
        return wanted(text)
    except (ValueError, KeyError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[wanted]
        raise ValueError(f"{key}={text}: {key} wants {kind}") from None


def count(text: str) -> int:
    """Whole numbers, also as 3B, 2.5M or 100k."""
    units = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    unit = units.get(text[-1:].lower())
    number = float(text[:-1]) * unit if unit else float(text.replace("_", ""))
    if number != int(number):
        raise ValueError(f"{text} is not a whole number")
    return int(number)
