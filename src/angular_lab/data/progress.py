"""How far a preparation is: a bar on a terminal, a line now and then elsewhere."""

import importlib
import sys
import time
from datetime import timedelta
from typing import Any

EVERY = {True: 0.2, False: 10.0}  # seconds between updates, on a terminal and elsewhere


def line(tokens: int, documents: int, rate: float, goal: int | None) -> str:
    text = f"{tokens:,} tokens, {documents:,} documents, {rate:,.0f} tokens/s"
    if goal is None:
        return text
    left = timedelta(seconds=round((goal - tokens) / rate)) if rate > 0 else "unknown"
    return f"{text}, {tokens / goal:.1%}, ETA {left}"


def _bar(goal: int | None, begun: int) -> Any:
    """tqdm's, or None without tqdm."""
    try:
        tqdm = importlib.import_module("tqdm")
    except ImportError:
        return None
    shape = {"unit": " tokens", "unit_scale": True, "desc": "prepare"}
    return tqdm.tqdm(total=goal, initial=begun, mininterval=0, **shape)  # the caller has its own


class Progress:
    """Shows on stderr; the rate counts what was done since the start of this process."""

    def __init__(self, goal: int | None, begun: int, enabled: bool) -> None:
        self.goal, self.begun, self.enabled = goal, begun, enabled
        self.terminal = sys.stderr.isatty()
        self.start = self.last = time.monotonic()
        self.bar = _bar(goal, begun) if enabled and self.terminal else None
        self.state = (begun, 0)

    def __enter__(self) -> "Progress":
        return self

    def update(self, tokens: int, documents: int) -> None:
        self.state = (tokens, documents)
        now = time.monotonic()
        if self.enabled and now - self.last >= EVERY[self.terminal]:
            self.last = now
            self._show("")

    def _show(self, end: str) -> None:
        tokens, documents = self.state
        if self.bar is not None:
            self.bar.set_postfix_str(f"{documents:,} documents", refresh=False)
            self.bar.update(tokens - self.bar.n)
            return
        seconds = max(time.monotonic() - self.start, 1e-9)
        text = line(tokens, documents, (tokens - self.begun) / seconds, self.goal)
        # On a terminal the same line again, wiped first; elsewhere a new one.
        print(f"\r\x1b[K{text}" if self.terminal else f"prepare: {text}",
              end=end if self.terminal else "\n", file=sys.stderr, flush=True)  # fmt: skip

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            self._show("\n")
        if self.bar is not None:
            self.bar.close()
