"""The terminal of a run: a header, one line of status, lines that stay, a summary.

Without a terminal everything is a plain line, and lines between two evaluations are rare enough
that a log file stays readable.
"""

import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Literal, TextIO

from angular_lab.text import clock, short_number

# all: header, steps and summary; steps: without header and summary; end: one line at the end.
Shown = Literal["all", "steps", "end"]
CLEAR = "\r\033[K"
REDRAW = 0.1  # seconds between two drawings of the status
QUIET = 5.0  # seconds between two plain lines that are not evaluations
SMOOTHING = (50, 5, 100)  # steps that a mean covers: a share of the run, at least, at most
BAR = (10, 30)  # columns
FULL, EMPTY, ASCII_FULL, ASCII_EMPTY = "█", "░", "#", "-"
COMMAND = "angular-lab "
Row = tuple[str, str]


class Smoothed:
    """An exponential mean over about a fiftieth of a run, corrected for its start at zero."""

    def __init__(self, steps: int) -> None:
        share, least, most = SMOOTHING
        self.decay = 1 - 1 / min(max(steps / share, least), most)
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        self._sum = self.decay * self._sum + (1 - self.decay) * value
        self._weight = self.decay * self._weight + (1 - self.decay)

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


@dataclass
class Status:
    """What is known about a run at one moment; None: not known, or there is none."""

    step: int = 0
    steps: int = 1
    phase: str = ""
    loss: float | None = None
    finite: bool = True  # the last loss was
    validation: float | None = None
    best: float | None = None
    averages: dict[str, float] = field(default_factory=dict)  # validation losses by their windows
    angle: float | None = None  # radians
    lr: float | None = None
    kappa: float | None = None
    speed: float | None = None  # tokens per second
    mfu: float | None = None
    memory: float | None = None  # GiB
    elapsed: float = 0.0
    remaining: float | None = None

    def parts(self, averages: bool) -> list[tuple[int, str]]:
        """Return the values as text, in order. Those with the highest number are left out first
        where the terminal is narrow."""
        loss = f"loss {self.loss:.4f}" if self.loss is not None else ""
        validation = f"val {self.validation:.4f}" if self.validation is not None else ""
        best = f"best {self.best:.4f}" if self.best is not None else ""
        shown = self.averages if averages else {}
        listed = [(2, f"average {key} {value:.4f}") for key, value in shown.items()]
        found = [
            (0, self.phase),
            (1, loss if self.finite else "loss not finite"),
            (2, validation),
            (5, best),
            *listed,
            (7, f"angle {1e3 * self.angle:.3g} mrad" if self.angle is not None else ""),
            (8, f"lr {self.lr:.3g}" if self.lr is not None else ""),
            (9, f"kappa {self.kappa:.3f}" if self.kappa is not None else ""),
            (4, f"{short_number(self.speed)} tokens/s" if self.speed is not None else ""),
            (10, f"MFU {self.mfu:.0%}" if self.mfu is not None else ""),
            (11, f"{self.memory:.1f} GiB" if self.memory is not None else ""),
            (6, f"after {clock(self.elapsed)}"),
            (3, f"{clock(self.remaining)} left" if self.remaining is not None else ""),
        ]
        return [(number, text) for number, text in found if text]

    def line(self, width: int | None = None) -> str:
        """Return the status as a line that stays."""
        return _fitted(f"step {self.step}/{self.steps}", self.parts(True), width)

    def bar(self, width: int, full: str = FULL, empty: str = EMPTY) -> str:
        """Return the status in one line of at most `width` columns, with a bar."""
        start = f"{self.step:{len(str(self.steps))}}/{self.steps}"
        columns = min(max(width // 14, BAR[0]), BAR[1])  # the same for all steps
        filled = round(columns * self.step / self.steps)
        if width < 4 * BAR[0]:
            columns = filled = 0
        bar = f" {full * filled}{empty * (columns - filled)}" if columns else ""
        return _fitted(f"{start}{bar} {self.step / self.steps:4.0%}", self.parts(False), width)


def _fitted(start: str, parts: Sequence[tuple[int, str]], width: int | None) -> str:
    """Join the parts, without the least important ones if the line would be too long."""
    kept = list(parts)
    while True:
        text = "  ".join([start, *(part for _, part in kept)])
        if width is None or len(text) <= width:
            return text
        if not kept:
            return text[: max(0, width)]
        kept.remove(max(kept))


class Screen:
    """Write to the terminal, or plain lines to what is not one."""

    def __init__(self, shown: Shown = "all", stream: TextIO | None = None) -> None:
        self.shown, self.stream = shown, stream or sys.stderr
        self.terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        encoding = (self.stream.encoding or "").lower().replace("-", "")
        self._bar = (FULL, EMPTY) if encoding.startswith("utf") else (ASCII_FULL, ASCII_EMPTY)
        self._drawn, self._last = False, -1e9
        self._handlers: list[logging.Handler] = []

    @property
    def width(self) -> int:
        """Columns that a line may have: a character in the last one makes some terminals wrap."""
        try:
            columns = os.get_terminal_size(self.stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return max(1, (columns or shutil.get_terminal_size().columns) - 1)

    def open(self) -> None:
        """Make room for messages: a message clears the status line, which is drawn again later."""
        self._handlers = list(logging.getLogger("angular_lab").handlers) if self.terminal else []
        for handler in self._handlers:
            handler.addFilter(self._make_room)

    def close(self, keep: bool = False) -> None:
        """Remove the status line, or leave it where it is."""
        for handler in self._handlers:
            handler.removeFilter(self._make_room)
        if self._drawn and keep:
            self._drawn = False
            self._write("\n")
        self.clear()

    def _make_room(self, _: logging.LogRecord) -> bool:
        self.clear()
        return True

    def draw(self, status: Status, now: bool = False) -> None:
        """Draw the status line, unless it was drawn a moment ago."""
        if not self.terminal or self.shown == "end":
            return
        if now or time.monotonic() - self._last >= REDRAW:
            self._write(CLEAR + status.bar(self.width, *self._bar))
            self._drawn, self._last = True, time.monotonic()

    def log(self, status: Status, stays: bool) -> None:
        """Show a logged step. On a terminal only what `stays` becomes a line of its own; elsewhere
        the others do if the last line is some seconds old."""
        if self.terminal and not stays:
            self.draw(status, now=True)
        elif stays or time.monotonic() - self._last >= QUIET:
            self.line(status.line(self.width if self.terminal else None))
            self._last = time.monotonic()
            self.draw(status, now=True)

    def line(self, text: str) -> None:
        """Write a line that stays."""
        if self.shown != "end":
            self.clear()
            self._write(f"{text}\n")

    def table(self, rows: Sequence[Row]) -> None:
        """Write rows of a name and a text; with an empty name a row continues the one before."""
        if self.shown == "all":
            self.clear()
            indent = max(len(name) for name, _ in rows) + 2
            for name, text in rows:
                self._write(f"{name:{indent}}{self._wrapped(text, indent)}\n")

    def _wrapped(self, text: str, indent: int) -> str:
        """Break a text at the end of the terminal's line; not a command, which is to be copied."""
        if not self.terminal or text.startswith(COMMAND) or self.width < 2 * indent:
            return text
        parts = wrap(text, self.width - indent, break_long_words=False, break_on_hyphens=False)
        return f"\n{'':{indent}}".join(parts)

    def end(self, text: str) -> None:
        """Write the one line of a run that shows nothing else."""
        if self.shown == "end":
            self._write(f"{text}\n")

    def clear(self) -> None:
        if self._drawn:
            self._drawn = False
            self._write(CLEAR)

    def _write(self, text: str) -> None:
        print(text, end="", file=self.stream, flush=True)
