"""A run folder belongs to one at a time, also while folders in which nothing began go away."""

import fcntl
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from angular_lab.run_folder import RunFolder


def test_never_two_at_a_time(tmp_path: Path) -> None:
    """Each release removes the folder, which is when a lock can be lost."""
    inside: list[int] = []
    wrong: list[object] = []
    won: list[int] = []

    def compete(number: int) -> None:
        try:
            for _ in range(400):
                run = RunFolder(tmp_path / "run")
                if run.try_claim():
                    inside.append(number)
                    if inside != [number] or not (tmp_path / "run" / "LOCK").exists():
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
    assert not (tmp_path / "run").exists()


def test_a_lock_on_a_file_that_is_gone_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before lets go between our opening the file and our locking it."""
    flock, calls = fcntl.flock, []

    def late(file: Any, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            shutil.rmtree(tmp_path / "run")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    run = RunFolder(tmp_path / "run")
    assert run.try_claim()
    assert not RunFolder(tmp_path / "run").try_claim()
    run.release()
    assert not (tmp_path / "run").exists()


def test_what_began_stays(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.claim()
    (run.path / "spec.json").touch()
    run.append(run.metrics_path, {"step": 1})
    run.release()
    assert run.started
    run.release()  # a second time: nothing
    run.claim()
    with pytest.raises(ValueError, match="is in use by another process"):
        RunFolder(run.path).claim()
    run.release()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("place", ["run", "run/inner", "run/a/b"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, place: str) -> None:
    """It is there and cannot be made: waiting for it would have no end."""
    (tmp_path / "run").symlink_to(tmp_path / "unmounted" / "disk")
    wanted = rf"{tmp_path / 'run'} is a link to {tmp_path / 'unmounted' / 'disk'}, .*not there"
    with pytest.raises(ValueError, match=wanted):
        RunFolder(tmp_path / place).try_claim()
    assert not (tmp_path / "unmounted").exists()
    (tmp_path / "unmounted" / "disk").mkdir(parents=True)
    run = RunFolder(tmp_path / place)
    assert run.try_claim()
    run.release()
