"""The commands that use a finished run's numbers and weights elsewhere: log-to."""

import argparse
from collections.abc import Callable
from pathlib import Path

from angular_lab.errors import UserError

RUN = "run folder, or an id that `angular-lab ls` shows"
DASHBOARDS = ("tensorboard", "wandb", "trackio")


def log_to(arguments: argparse.Namespace) -> None:
    """Send runs to a dashboard; all are found before the first one is sent."""
    from angular_lab.inspect.listing import find_run
    from angular_lab.training.loggers import send_run

    runs = [text for text in arguments.runs if "=" not in text or Path(text).exists()]
    assignments = [text for text in arguments.runs if text not in runs] + arguments.overrides
    if not runs:
        raise UserError(f"log-to {arguments.dashboard}: give at least one run folder")
    for folder in [find_run(text) for text in runs]:
        print(f"{folder.name}: {send_run(arguments.dashboard, folder, assignments)}")


def add_evaluate(add: Callable[..., argparse.ArgumentParser]) -> None:
    summary = "send what runs have logged to a dashboard; sent again, it adds only what is new"
    sub = add("log-to", log_to, summary)
    sub.add_argument("dashboard", choices=DASHBOARDS, help="where to send it")
    sub.add_argument("runs", nargs="+", metavar="run", help=f"{RUN}; or dashboard.KEY=VALUE")
    sub.set_defaults(overrides=[])
