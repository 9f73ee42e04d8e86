"""Warnings that point to the user's own code."""

import sys
import warnings
from types import FrameType


def warn(message: str) -> None:
    """Warn at the first line outside this package and torch: the one that the user can change."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and _package(frame) in ("angular_muown", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
