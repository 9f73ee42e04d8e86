"""Logs read from where the last reading ended, so that a long log is not read again."""

import json
import os
import zlib
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

CHECKED = 128  # bytes before the offset that must not have changed


@dataclass(frozen=True)
class Position:
    """Where a reading of a file ended, and how to recognize that the file was rewritten."""

    offset: int = 0
    inode: int = 0
    checksum: int = 0  # of the bytes before the offset: a new file may get the inode of the old one

    @property
    def numbers(self) -> list[int]:
        return [self.offset, self.inode, self.checksum]


class Chunk(NamedTuple):
    lines: list[dict[str, Any]]
    end: Position
    restarted: bool  # the lines are those of the whole file: a resumed run has rewritten it


def read_after(path: Path, start: Position) -> Chunk:
    """Return the complete lines after a position. A line that is not an object is left out:
    `doctor` reports it."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            begin = start.offset if _continues(file, status, start) else 0
            file.seek(begin)
            text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            end = begin + len(complete)
            checksum = _checksum(file, end)
    except FileNotFoundError:
        return Chunk([], Position(), restarted=start.offset > 0)
    lines = [values for line in complete.splitlines() if (values := _object(line)) is not None]
    return Chunk(lines, Position(end, status.st_ino, checksum), begin < start.offset)


def _continues(file: Any, status: os.stat_result, start: Position) -> bool:
    """True if the file still begins with what was read."""
    if status.st_size < start.offset or status.st_ino != start.inode:
        return False
    return _checksum(file, start.offset) == start.checksum


def _checksum(file: Any, offset: int) -> int:
    first = max(0, offset - CHECKED)
    file.seek(first)
    return zlib.crc32(file.read(offset - first))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def number(values: dict[str, Any], key: str) -> float | None:
    """Return a logged value; None if it is missing or not finite."""
    value = values.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and isfinite(value) else None
