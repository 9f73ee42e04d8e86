"""A run folder belongs to one process at a time."""

import fcntl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from angular_lab.errors import UserError
from angular_lab.run_folder import RunFolder


def test_never_two_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []
    wrong: list[object] = []
    won: list[int] = []

    def compete(number: int) -> None:
        try:
            for _ in range(400):
                run = RunFolder(tmp_path / "run")
                if run.try_claim():
                    inside.append(number)
                    if inside != [number]:
                        wrong.append(list(inside))
                    won.append(number)
                    inside.remove(number)
                    run.release()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(won) > 100


def test_a_folder_in_use_is_refused_until_it_is_released(tmp_path: Path) -> None:
    run, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    run.claim()
    assert (run.claimed, other.claimed) == (True, False)
    with pytest.raises(UserError, match="run is in use by another process: wait for it"):
        other.claim()
    run.release()
    assert not run.claimed
    run.release()  # a second time: nothing
    other.claim()
    other.release()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "from angular_lab.run_folder import RunFolder\n"
        f"run = RunFolder({str(tmp_path / 'run')!r})\n"
        "run.claim()\n"
        "print('claimed', flush=True)\n"
        "input()\n"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        run = RunFolder(tmp_path / "run")
        assert not run.try_claim()
    finally:
        process.kill()
        process.communicate()
    assert run.try_claim()
    run.release()


def test_a_claim_alone_does_not_start_a_run(tmp_path: Path) -> None:
    """A process that dies before its first logged step leaves nothing to lose."""
    run = RunFolder(tmp_path / "run")
    run.claim()
    run.release()
    (run.path / "spec.json").touch()
    assert not run.started
    run.append(run.metrics_path, {"step": 1})
    assert run.started


@pytest.mark.timeout(20)
@pytest.mark.parametrize("place", ["run", "run/inner", "run/a/b"])
def test_a_broken_link_in_the_place_of_a_folder_is_refused(tmp_path: Path, place: str) -> None:
    """It exists and cannot be created: waiting for it would never end."""
    (tmp_path / "run").symlink_to(tmp_path / "unmounted" / "disk")
    with pytest.raises(UserError, match=f"{tmp_path / place} cannot be a folder: .*broken link"):
        RunFolder(tmp_path / place).try_claim()
    assert not (tmp_path / "unmounted").exists()
    (tmp_path / "unmounted" / "disk").mkdir(parents=True)
    run = RunFolder(tmp_path / place)
    assert run.try_claim()
    run.release()


def test_a_process_that_looks_at_the_lock_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    """`ls` and `watch` hold a shared lock while they find out whether a process holds the run."""
    run = RunFolder(tmp_path / "run")
    assert run.try_claim()
    run.release()
    looked = threading.Event()

    def look() -> None:
        with open(tmp_path / "run" / "LOCK") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            looked.set()
            time.sleep(0.01)

    thread = threading.Thread(target=look)
    thread.start()
    looked.wait()
    assert run.try_claim()
    thread.join()
    run.release()
