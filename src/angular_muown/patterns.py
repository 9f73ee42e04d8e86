"""Glob patterns over parameter names, where a pattern without effect is a mistake."""

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeVar

V = TypeVar("V")


class Patterns:
    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def matching(self, argument: str, pattern: str) -> list[str]:
        found = [name for name in self.names if fnmatchcase(name, pattern)]
        if not found:
            near = get_close_matches(pattern, self.names, n=3, cutoff=0.3) or self.names[:3]
            raise ValueError(
                f"{argument}: pattern '{pattern}' matches no trainable parameter; "
                f"names here look like {', '.join(near)}"
            )
        return found

    def lookup(self, argument: str, rules: Iterable[tuple[str, V]]) -> dict[str, V]:
        """name -> value; every pattern has to match, and no name may match twice."""
        found: dict[str, V] = {}
        owner: dict[str, str] = {}
        for pattern, value in rules:
            for name in self.matching(argument, pattern):
                if name in owner:
                    raise ValueError(
                        f"{argument}: '{name}' is matched by '{owner[name]}' and by '{pattern}'; "
                        "make the patterns disjoint"
                    )
                owner[name], found[name] = pattern, value
        return found
