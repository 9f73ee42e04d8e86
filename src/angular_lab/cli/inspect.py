"""The commands that look at run folders: ls, compare, doctor. None of them writes anything."""

import argparse
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from angular_lab.errors import UserError

RUN = "run folder, or an id that `angular-lab ls` shows"
COLUMNS = 100  # where the output is not a terminal
log = logging.getLogger(__name__)


def _width() -> int:
    return shutil.get_terminal_size((COLUMNS, 24)).columns


def _warn(warnings: list[str]) -> None:
    for text in warnings:
        log.warning("warning: %s", text)


def ls(arguments: argparse.Namespace) -> None:
    from angular_lab.inspect.listing import list_runs, to_json, to_text

    warnings: list[str] = []
    runs = list_runs(arguments.folder, warnings)
    _warn(warnings)
    if arguments.json:
        print(to_json(runs))
    elif runs:
        print(to_text(runs, _width()))
    else:
        log.info("no runs below %s: angular-lab train makes one", arguments.folder.resolve())


def compare(arguments: argparse.Namespace) -> None:
    from angular_lab.inspect.comparison import compare as compared
    from angular_lab.inspect.comparison import to_json, to_text
    from angular_lab.inspect.listing import find_run

    warnings: list[str] = []
    result = compared([find_run(text) for text in arguments.runs], warnings)
    _warn(warnings)
    print(to_json(result) if arguments.json else to_text(result))


def show_run(arguments: argparse.Namespace) -> bool:
    """Describe a run folder, if `show` was given one; False if it was not."""
    from angular_lab.inspect.changes import describe_run
    from angular_lab.inspect.listing import find_run, looks_like_a_run
    from angular_lab.run_folder import read_run

    text = arguments.named_run
    if not looks_like_a_run(text):
        return False
    if arguments.overrides:
        raise UserError(f"show {text} {arguments.overrides[0]}: a run has its settings already")
    warnings: list[str] = []
    run = read_run(find_run(text), warnings)
    if run is None:
        raise UserError(warnings[-1].removesuffix(": left out"))
    _warn(warnings)
    print(describe_run(run))
    return True


def doctor(arguments: argparse.Namespace) -> int:
    """Examine a run; return 1 if something is wrong with it."""
    from angular_lab.inspect.doctor import examine, is_sound, to_json, to_text
    from angular_lab.inspect.listing import find_run

    folder = find_run(arguments.run)
    findings = examine(folder)
    print(to_json(folder, findings) if arguments.json else to_text(folder, findings))
    return 0 if is_sound(findings) else 1


def add_inspect(add: Callable[..., argparse.ArgumentParser]) -> None:
    as_json = {"action": "store_true", "help": "print JSON instead of text"}
    sub = add("ls", ls, "list the runs below a folder: losses, progress, state")
    sub.add_argument("folder", type=Path, nargs="?", default=Path(), help="with runs at any depth; "
                     "default: the working directory")  # fmt: skip
    sub.add_argument("--json", **as_json)
    summary = "compare runs: settings that differ, losses at equal tokens, tokens to equal loss"
    sub = add("compare", compare, summary)
    sub.add_argument("runs", nargs="+", metavar="run", help=RUN)
    sub.add_argument("--json", **as_json)
    summary = "examine a run folder: files, logs, checkpoints, data, disk, and what to do"
    sub = add("doctor", doctor, summary)
    sub.add_argument("run", help=RUN)
    sub.add_argument("--json", **as_json)
