"""Frozen dataclasses from JSON: the other direction of `dataclasses.asdict`."""

import json
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from angular_lab.errors import UserError

T = TypeVar("T")
# what a damaged file may raise when it is read
DAMAGED = (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError)


def check_format(content: dict[str, Any], expected: int, path: Path) -> None:
    if content["format"] != expected:
        raise UserError(f"{path} has format {content['format']}; this version reads {expected}")


def from_json(kind: type[T], values: dict[str, Any]) -> T:
    """Build a dataclass: lists become tuples, objects the dataclasses that the fields declare.
    Raises TypeError for a key that is not a field, or a missing one without a default."""
    hints = _hints(kind)
    return kind(**{key: _convert(hints.get(key), value) for key, value in values.items()})


_hints = cache(get_type_hints)  # slow, and called for every run of a sweep


def _convert(hint: Any, value: Any) -> Any:
    if is_dataclass(hint) and isinstance(value, dict):
        return from_json(hint, value)  # pyrefly: ignore
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_convert(get_args(hint)[0], item) for item in value)
    if get_origin(hint) is dict and get_args(hint)[0] is int:
        return {int(key): item for key, item in value.items()}
    return value
