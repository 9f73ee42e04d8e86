"""Logging: messages go to standard error; of several ranks, only the first one's."""

import logging
import os
import sys


def is_first_rank() -> bool:
    """True in the first process of a run, by torchrun's environment; needs no torch."""
    return os.environ.get("RANK", "0") == "0"


def configure_logging() -> None:
    """Show the lab's messages on standard error. Errors appear on every rank."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(lambda record: is_first_rank() or record.levelno >= logging.ERROR)
    logger = logging.getLogger("angular_lab")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
