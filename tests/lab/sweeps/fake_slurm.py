"""A cluster for the tests: sbatch, srun and scontrol as small scripts on the PATH.

`sbatch` stores what it gets. `run` then executes a stored batch script as Slurm would: the same
environment, the signal before the time limit to the process that srun started, and again if that
called `scontrol requeue`.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.runs import LIMIT

SBATCH = """#!/bin/sh
if grep -q -- --partition=nowhere "$1"; then
    echo "sbatch: error: invalid partition specified: nowhere" >&2
    exit 1
fi
number=$(($(find "$FAKE_SLURM" -name 'job-*' | wc -l) + 1))
cp "$1" "$FAKE_SLURM/job-$number"
echo "Submitted batch job $number"
"""
SRUN = """#!/bin/sh
name() { echo "$1" | sed "s/%A/$SLURM_ARRAY_JOB_ID/; s/%a/$SLURM_ARRAY_TASK_ID/; s/%t/0/"; }
while true; do
    case $1 in
        --unbuffered) shift ;;
        --output) out=$(name "$2"); shift 2 ;;
        --error) error=$(name "$2"); shift 2 ;;
        *) break ;;
    esac
done
echo $$ > "$FAKE_SLURM/pid"
exec "$@" >> "$out" 2>> "$error"
"""
SCONTROL = """#!/bin/sh
echo "$@" >> "$FAKE_SLURM/scontrol"
"""


class FakeSlurm:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(parents=True)
        for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        for name in ("sh", "grep", "find", "wc", "cp", "sed", "bash"):  # nothing else is there
            (programs / name).symlink_to(shutil.which(name) or name)
        monkeypatch.setenv("PATH", str(programs))
        monkeypatch.setenv("FAKE_SLURM", str(folder))

    @property
    def submitted(self) -> list[int]:
        return sorted(int(path.name.removeprefix("job-")) for path in self.folder.glob("job-*"))

    def options(self, job: int) -> dict[str, str]:
        """Return the options in a batch script."""
        lines = (self.folder / f"job-{job}").read_text().splitlines()
        pairs = [line.removeprefix("#SBATCH --").partition("=") for line in lines]
        return {
            key: value for key, _, value in pairs if key and not key.startswith(("#", "export"))
        }

    @property
    def requeued(self) -> list[str]:
        path = self.folder / "scontrol"
        return path.read_text().splitlines() if path.exists() else []

    def environment(self, job: int, task: int | None) -> dict[str, str]:
        names = {"JOB_ID": str(job + 1000 * (task or 0)), "NTASKS": "1", "JOB_NUM_NODES": "1"}
        names |= {"NODEID": "0", "PROCID": "0", "LOCALID": "0"}
        if task is not None:
            names |= {"ARRAY_JOB_ID": str(job), "ARRAY_TASK_ID": str(task)}
        return {f"SLURM_{key}": value for key, value in names.items()}

    def run(self, job: int, task: int, warn_when: Callable[[], bool] | None = None) -> list[int]:
        """Run a task of an array until it is not requeued any more; return its exit codes. In the
        first attempt, send the signal once `warn_when` holds."""
        codes = []
        while True:
            before = len(self.requeued)
            script = ["bash", str(self.folder / f"job-{job}")]
            environment = {**os.environ, **self.environment(job, task)}
            with subprocess.Popen(script, env=environment) as process:
                if warn_when and not codes:
                    self._warn(warn_when)
                codes.append(process.wait(LIMIT))
            if len(self.requeued) == before:
                return codes

    def _warn(self, when: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not when() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(int((self.folder / "pid").read_text()), signal.SIGUSR2)
