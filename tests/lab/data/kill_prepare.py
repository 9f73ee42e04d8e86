"""Kill a preparation before each of its file operations, and resume it.

    python -m tests.lab.data.kill_prepare FOLDER

The process forks. The child prepares and kills itself with SIGKILL before its n-th file operation;
the parent resumes from what is left. It runs outside of pytest: forks and torch do not mix.
"""

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from angular_lab.data.prepare import prepare
from angular_lab.data.tokenizer import load_tokenizer

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir")
on_operation: Callable[[], None] = lambda: None  # noqa: E731


def audit(event: str, arguments: tuple) -> None:
    if event in OPERATIONS and str(arguments[0]).startswith(sys.argv[1]):
        on_operation()


def texts() -> Iterator[str]:
    """Documents shorter than a shard and longer than several."""
    dice = random.Random(0)
    for i in range(9):
        yield f"{i} " + "x" * dice.choice([1, 10, 50, 300])


def run(out: Path, tokens: int | None) -> None:
    # With this fraction both splits have full shards and remainders.
    prepare(texts(), load_tokenizer("bytes"), out, tokens=tokens, shard_tokens=250,
            val_fraction=0.4, workers=1, progress=False)  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    """The visible files and the journal; not the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def is_killed(n: int, out: Path, tokens: int | None) -> bool:
    """True if a child was killed before its n-th operation, False if it finished earlier."""
    global on_operation
    if child := os.fork():
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    operations = iter(range(1, n))

    def count() -> None:
        if next(operations, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    on_operation = count
    run(out, tokens)
    os._exit(0)


def kill_everywhere(folder: Path, tokens: int | None) -> int:
    """Kill before every operation, and many times in a row; return the number of operations."""
    whole, killed = folder / "whole", folder / "killed"
    run(whole, tokens)
    n = 1
    while is_killed(n, killed, tokens):
        run(killed, tokens)
        assert contents(killed) == contents(whole), f"killed before operation {n}"
        shutil.rmtree(killed)
        n += 1
    shutil.rmtree(killed)
    dice = random.Random(1)
    while is_killed(dice.randrange(1, 40), killed, tokens):
        pass
    assert contents(killed) == contents(whole), "killed many times"
    return n - 1


if __name__ == "__main__":
    os.fsync = lambda _: None  # a kill loses nothing that was written, unlike a power cut
    sys.addaudithook(audit)
    for goal in (None, 300):
        print(kill_everywhere(Path(sys.argv[1]) / str(goal), goal))
