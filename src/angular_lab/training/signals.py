"""Graceful shutdown: SIGTERM or Ctrl-C finishes the step, saves and exits."""

import os
import signal
from types import FrameType
from typing import Any

PREEMPTED, WORKER_DIED, INTERRUPTED = 75, 4, 130  # exit codes; 130 is 128 + SIGINT
UNSAVED = "not saved; the last checkpoint is untouched"
TORCHRUN = "TORCHELASTIC_RUN_ID"  # torchrun sets it for the processes that it starts


class Preempted(Exception):  # noqa: N818  (not an error: the run can continue)
    """SIGTERM arrived, or the time is over; everything is saved and can be resumed."""


class WorkerDied(Exception):  # noqa: N818
    """A worker process ended with an error or a signal."""


class Sigterm:
    """Within the context, SIGTERM and the given signals only set `received`. The first Ctrl-C
    (SIGINT) also prints `notice`; the second one raises KeyboardInterrupt. Under torchrun the
    second one arrives as SIGTERM.

    Contexts nest: a command has one, and so has each of its runs. The inner one starts with what
    the outer one received, and at its end forwards what it received itself.
    """

    def __init__(self, *others: signal.Signals, notice: str = "") -> None:
        self.received = False
        self._others, self._notice = others, notice
        self._interrupted = False
        self._before: dict[int, Any] = {}
        self._outer: Sigterm | None = None

    def __enter__(self) -> "Sigterm":
        before = signal.signal(signal.SIGTERM, self._note)
        self._before = {signal.SIGTERM: before}
        outer = getattr(before, "__self__", None)
        self._outer = outer if isinstance(outer, Sigterm) else None
        self.received = self._outer is not None and self._outer.received
        for number in self._others:
            # A process that ignores it, like a worker whose parent forwards Ctrl-C, keeps doing so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._outer is not None and self.received:
            self._outer.received = True

    @property
    def interrupted(self) -> bool:
        """True if this context or an outer one received Ctrl-C."""
        return self._interrupted or (self._outer is not None and self._outer.interrupted)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self.interrupted and TORCHRUN in os.environ:
            raise KeyboardInterrupt(UNSAVED)
        self.received = True

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt(UNSAVED)
        innermost = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        for context in (self, innermost):  # another library may have a handler of its own
            if isinstance(context, Sigterm):
                context.received = True
        if number == signal.SIGINT:
            self._interrupted = True
            os.write(2, self._notice.encode())  # print() is not reentrant
