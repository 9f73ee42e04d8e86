"""SIGTERM as a wish: finish the step, save, leave. And how a command ends that was not at fault."""

import signal
from types import FrameType
from typing import Any

PREEMPTED, WORKER_DIED = 75, 4  # exit codes


class Preempted(Exception):  # noqa: N818  (no error: the run goes on later)
    """SIGTERM came, or the time is over; all is saved and can be resumed."""


class WorkerDied(Exception):  # noqa: N818
    """A process that made runs for this one ended in another way than it should."""


class Sigterm:
    """Within the context, SIGTERM only sets `received`; with `interrupts`, the first Ctrl-C is a
    SIGTERM and the second one a KeyboardInterrupt.

    Contexts nest: a sweep has one, and each of its runs. The inner one knows what the outer one
    received before, and tells it at its end what came too late to be seen.
    """

    def __init__(self, interrupts: bool = False) -> None:
        self.received = False
        self._interrupts = interrupts
        self._before: dict[int, Any] = {}
        self._outer: Sigterm | None = None

    def __enter__(self) -> "Sigterm":
        before = signal.signal(signal.SIGTERM, self._note)
        self._before = {signal.SIGTERM: before}
        outer = getattr(before, "__self__", None)
        self._outer = outer if isinstance(outer, Sigterm) else None
        self.received = self._outer is not None and self._outer.received
        # Who ignores Ctrl-C, like a worker whose parent passes it on, goes on ignoring it.
        if self._interrupts and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._outer is not None and self.received:
            self._outer.received = True

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if not self._interrupts:
            raise KeyboardInterrupt
        self._interrupts = False
        signal.raise_signal(signal.SIGTERM)  # to the innermost context
