"""Run a program in a process that has torch loaded, which saves it two seconds."""

import os
import runpy
import sys
import warnings
from pathlib import Path

from tests.ranks import CONTEXT

LIMIT = 240  # seconds


def run_program(script: Path) -> tuple[int, str]:
    """Run a script in its folder, with warnings as errors; return exit code and output."""
    output = script.with_suffix(".out")
    process = CONTEXT.Process(target=_work, args=(script, output))
    process.start()
    process.join(LIMIT)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, output.read_text() if output.exists() else ""


def _work(script: Path, output: Path) -> None:
    """In the new process."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)  # descriptors, so that subprocesses write there, too
    os.dup2(file, 2)
    os.chdir(script.parent)
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    warnings.resetwarnings()
    warnings.simplefilter("error")
    runpy.run_path(str(script), run_name="__main__")
