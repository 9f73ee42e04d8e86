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
    """Within the context, SIGTERM only sets `received`, and so do the signals that are given. Of
    Ctrl-C (SIGINT) that holds for the first; the second one is a KeyboardInterrupt.

    Contexts nest: a sweep has one, and each of its runs. The inner one knows what the outer one
    received before, and tells it at its end what came too late to be seen.
    """

    def __init__(self, *others: signal.Signals) -> None:
        self.received = False
        self._others = others
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
            # Who ignores it, like a worker whose parent passes Ctrl-C on, goes on ignoring it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._outer is not None and self.received:
            self._outer.received = True

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = self._interrupted or number == signal.SIGINT
        signal.raise_signal(signal.SIGTERM)  # to the innermost context
