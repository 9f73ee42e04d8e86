"""Kill a preparation before every single thing it does to files, and go on.

    python -m tests.lab.training.killing FOLDER

A process forks; the child prepares and kills itself with SIGKILL at its n-th touch of a file; the
parent goes on from what is left. It runs outside of pytest, because forks and torch do not mix.
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

TOUCHES = ("open", "os.rename", "os.remove", "os.mkdir")
on_touch: Callable[[], None] = lambda: None  # noqa: E731
where = ""


def audit(event: str, arguments: tuple) -> None:
    if event in TOUCHES and str(arguments[0]).startswith(where):
        on_touch()


def texts() -> Iterator[str]:
    """Some shorter and some longer than several shards."""
    dice = random.Random(0)
    for i in range(15):
        yield f"{i} " + "x" * dice.choice([1, 10, 50, 300])


def run(out: Path, tokens: int | None) -> None:
    # One document in five is for validation, so that both splits have shards and remainders.
    prepare(
        texts(), load_tokenizer("bytes"), out, tokens=tokens, shard_tokens=120, val_fraction=0.2,
        workers=1, progress=False,
    )  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed_at(n: int, out: Path, tokens: int | None) -> bool:
    """Whether the child was killed; otherwise it came to its end before the n-th touch."""
    global on_touch
    if child := os.fork():
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    left = n

    def count() -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    on_touch = count
    run(out, tokens)
    os._exit(0)


def sweep(folder: Path, tokens: int | None) -> int:
    """Every moment once; how many there were."""
    run(folder / "whole", tokens)
    wanted = contents(folder / "whole")
    n = 1
    while killed_at(n, folder / "killed", tokens):
        run(folder / "killed", tokens)
        assert contents(folder / "killed") == wanted, f"killed at touch {n}"
        shutil.rmtree(folder / "killed")
        n += 1
    dice = random.Random(1)
    for _ in range(3):  # killed again and again
        shutil.rmtree(folder / "killed")
        while killed_at(dice.randrange(1, 60), folder / "killed", tokens):
            pass
        assert contents(folder / "killed") == wanted
    return n - 1


if __name__ == "__main__":
    where = sys.argv[1]
    os.fsync = lambda _: None  # a kill loses nothing that was written, unlike a power cut
    sys.addaudithook(audit)
    for goal in (None, 500):
        print(sweep(Path(where) / str(goal), goal))
