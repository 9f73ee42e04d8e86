"""The command angular-lab.

Exit codes: 0 done; 1 a bug, with its traceback; 2 a mistake in the input, in one line; 3 a loss
that is not finite; 4 a worker process died; 75 stopped by SIGTERM, Ctrl-C or the end of its time
(saved: angular-lab resume RUN continues a single run); 130 interrupted by a second Ctrl-C (not
saved).

`doctor` also returns 1 if something is wrong with the run, and `check` 2 if it cannot work.
"""

import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from angular_lab.cli.cluster import add_ranks
from angular_lab.cli.evaluate import add_evaluate
from angular_lab.cli.experiments import add_experiments
from angular_lab.cli.grid import add_grid
from angular_lab.cli.inspect import add_inspect
from angular_lab.cli.pace import add_pace
from angular_lab.cli.prepare import add_prepare
from angular_lab.cli.runs import add_commands
from angular_lab.cli.submit import add_submit
from angular_lab.cli.watch import add_watch
from angular_lab.errors import UserError
from angular_lab.log import configure_logging
from angular_lab.training.signals import (
    INTERRUPTED,
    PREEMPTED,
    WORKER_DIED,
    Preempted,
    WorkerDied,
)

BAD_INPUT, NOT_FINITE = 2, 3
REQUIRED = ("filelock", "jinja2", "matplotlib", "numpy", "tqdm")  # by every command: the demo extra
NEGATIVE_TIME = re.compile(r"-[\d.]+[smh]")
log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    configure_logging()
    if missing := [name for name in REQUIRED if find_spec(name) is None]:
        log.error(
            "error: angular-lab needs %s: install angular-muown with its lab extra, for example "
            "pip install '.[lab]'",
            ", ".join(missing),
        )
        return BAD_INPUT
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    arguments, rest = parser.parse_known_args(_with_negative_times(words))
    arguments.began, arguments.words = began, words
    # key=value may also follow an option
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if "overrides" not in arguments or len(overrides) < len(rest):
        unknown = [word for word in rest if word not in overrides or "overrides" not in arguments]
        if unknown:
            parser.error(f"unrecognized: {' '.join(unknown)}")
    else:
        arguments.overrides = [*arguments.overrides, *overrides]
    return _run(arguments)


def _with_negative_times(words: Sequence[str]) -> list[str]:
    """Join --budget and -3h to --budget=-3h: argparse reads a word that begins with - as an option,
    and would say that the time is missing."""
    result: list[str] = []
    for word in words:
        if result and result[-1].startswith("--") and NEGATIVE_TIME.fullmatch(word):
            result[-1] += f"={word}"
        else:
            result.append(word)
    return result


def _run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code. What is not listed here is a bug."""
    try:
        return _attempt(arguments.function, arguments)
    except Preempted as stopped:
        log.warning("stopped: %s", stopped)
        return PREEMPTED
    except WorkerDied as error:
        log.error("error: %s", error)
        return WORKER_DIED
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, OSError, ImportError) as error:
        if arguments.traceback:
            raise
        log.error("error: %s", error)
        return BAD_INPUT
    except KeyboardInterrupt as interrupt:
        log.warning(": ".join(["interrupted", *interrupt.args]))
        return INTERRUPTED


def _attempt(
    function: Callable[[argparse.Namespace], int | None], arguments: argparse.Namespace
) -> int:
    try:
        return function(arguments) or 0
    except Exception as error:
        # a command that did not load torch, which is slow, cannot have raised this one
        training = sys.modules.get("angular_lab.training.nonfinite")
        if training is None or not isinstance(error, training.NotFinite):
            raise
        log.error("error: %s", error)
        return NOT_FINITE
    finally:
        if ranks := sys.modules.get("angular_lab.training.ranks"):
            ranks.stop_ranks()


class Version(argparse.Action):
    """Print the versions that a bug report needs. Imports torch, and only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import torch

        from angular_muown import __version__

        python = ".".join(map(str, sys.version_info[:3]))
        print(f"angular-lab {__version__} (torch {torch.__version__}, Python {python})")
        parser.exit()


POSITIONAL = {
    "named_run": "a name that `angular-lab named-runs` lists",
    "run": "run folder",
    "prompt": "the beginning of the text",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="angular-lab", description="The pre-training lab.")
    parser.add_argument("--version", action=Version, nargs=0, help="show the versions and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(
        name: str, function: object, summary: str, *positional: str, epilog: str | None = None
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for argument in positional:
            kind = Path if argument == "run" else str
            sub.add_argument(argument, type=kind, help=POSITIONAL[argument])
        sub.add_argument(
            "--traceback", action="store_true", help="show the traceback of every error"
        )
        sub.set_defaults(function=function)
        return sub

    add_commands(add)
    add_inspect(add)
    add_watch(add)
    add_evaluate(add)
    add_pace(add)
    add_prepare(add)
    add_experiments(add)
    add_grid(add)
    add_ranks(add)
    add_submit(add)
    return parser
