"""SIGTERM as a wish: finish the step, save, leave."""

import signal
from types import FrameType


class Preempted(Exception):  # noqa: N818  (no error: the run goes on later)
    """SIGTERM came; the run was saved and can be resumed."""


class Sigterm:
    """Within the context, SIGTERM only sets `received`."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> "Sigterm":
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True
