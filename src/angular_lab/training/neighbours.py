"""How many runs share a device, because the speed that each of them logs depends on it.

Every process of a run holds a lock on a file in a folder of its device. Nobody has to tidy up after
one that dies: the kernel drops its lock, and the next one to come removes the file.
"""

import fcntl
import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch

from angular_lab.run_folder import RunDir, alone


class Neighbours:
    """This run among this user's runs on a device of this machine."""

    def __init__(self, run: RunDir, device: torch.device) -> None:
        user = f"angular-lab-{os.getuid()}"
        self.folder = Path(tempfile.gettempdir()) / user / _name(device)
        place = str(run.path.resolve())
        self.mark = hashlib.sha256(place.encode()).hexdigest()[:16]
        self._lock: IO[str] | None = None

    def __enter__(self) -> "Neighbours":
        with suppress(OSError):  # a full disk is no reason not to train: nothing is known then
            self._lock = self._claim()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            with suppress(OSError):
                os.unlink(self._lock.name)
            self._lock.close()
            self._lock = None

    def _claim(self) -> IO[str]:
        """One process at a time, so that no file is taken for a dead one's before it is locked."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with alone(self.folder.with_suffix(".lock")):
            for path in set(self.folder.iterdir()).difference(self._living()):
                path.unlink(missing_ok=True)
            lock = open(self.folder / f"{self.mark}.{os.getpid()}", "w")  # noqa: SIM115  (held on)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def count(self) -> int | None:
        """Runs on this device now, this one included; several ranks are one run. None: unknown."""
        if self._lock is None:
            return None
        with suppress(OSError):
            return len({path.name.partition(".")[0] for path in self._living()})
        return None

    def _living(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if _is_locked(path)]


def _is_locked(path: Path) -> bool:
    with suppress(FileNotFoundError), open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _name(device: torch.device) -> str:
    """The same in every process, whatever CUDA_VISIBLE_DEVICES makes of the numbers."""
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)
