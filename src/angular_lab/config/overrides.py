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
        if key not in keys(spec) and not is_dataclass(_part(spec, key)):
            raise ValueError(f"unknown key '{key}'; did you mean {_nearest(key, keys(spec))}?")
        spec = _set(spec, key.split("."), text, key)
    return spec


def _part(spec: Any, key: str) -> Any:
    for name in key.split("."):
        spec = getattr(spec, name, None)
    return spec


def _nearest(key: str, valid: list[str]) -> str:
    """The valid key with the same last part, else the one that looks most alike."""
    last = key.rpartition(".")[2]
    same = [name for name in valid if name.rpartition(".")[2] == last]
    return (same or get_close_matches(key, valid, n=1, cutoff=0.0))[0]


def keys(spec: Any, prefix: str = "") -> list[str]:
    found = []
    for f in fields(spec):
        value = getattr(spec, f.name)
        nested = is_dataclass(value)
        found += keys(value, f"{prefix}{f.name}.") if nested else [f"{prefix}{f.name}"]
    return found


def _set(spec: Any, path: list[str], text: str, key: str) -> Any:
    name, *rest = path
    current = getattr(spec, name)
    if rest:
        return replace(spec, **{name: _set(current, rest, text, key)})
    if is_dataclass(current):
        parts = ", ".join(f"{key}.{part}" for part in keys(current)[:4])
        raise ValueError(f"'{key}' has parts: set one of {parts}, ...")
    return replace(spec, **{name: _convert(text, type(current), key)})


def _convert(text: str, wanted: type, key: str) -> Any:
    try:
        if wanted is bool:
            return WORDS[text.lower()]
        if wanted is int:
            return count(text)
        return wanted(text)
    except (ValueError, KeyError, OverflowError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[wanted]
        raise ValueError(f"{key}={text}: {key} wants {kind}") from None


def count(text: str) -> int:
    """Whole numbers, also as 3B, 2.5M or 100k."""
    if text.lstrip("-").isdigit():
        return int(text)
    units = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    unit = units.get(text[-1:].lower())
    number = float(text[:-1]) * unit if unit else float(text.replace("_", ""))
    if number != int(number):
        raise ValueError(f"{text} is not a whole number")
    return int(number)
