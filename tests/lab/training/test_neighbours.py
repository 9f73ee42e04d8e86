"""Runs on one device: each counts the others, and only those that live."""

import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from angular_lab.run_folder import RunDir
from angular_lab.training.neighbours import Neighbours
from tests.ranks import CONTEXT

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def run_in(tmp_path: Path, name: str, device: torch.device = CPU) -> Neighbours:
    return Neighbours(RunDir(tmp_path / name), device)


def _stay(neighbours: Neighbours, pipe: Connection) -> None:
    with neighbours:
        pipe.send(neighbours.count())
        pipe.recv()


class Elsewhere:
    """The same in a process of its own."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_stay, args=(neighbours, theirs))
        self.process.start()
        assert self.pipe.poll(20)
        self.count = self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(20)


@pytest.fixture
def others() -> Iterator[list[Elsewhere]]:
    found: list[Elsewhere] = []
    yield found
    for other in found:
        other.kill()


def test_each_counts_the_others(tmp_path: Path, others: list[Elsewhere]) -> None:
    others += [Elsewhere(run_in(tmp_path, "a")), Elsewhere(run_in(tmp_path, "b"))]
    assert [other.count for other in others] == [1, 2]
    with run_in(tmp_path, "c") as third:
        assert third.count() == 3
        with run_in(tmp_path, "c", META) as apart:
            assert apart.count() == 1  # another device
    with run_in(tmp_path, "d") as fourth:
        assert fourth.count() == 3  # the third has left


def test_ranks_of_one_run_are_one(tmp_path: Path, others: list[Elsewhere]) -> None:
    others += [Elsewhere(run_in(tmp_path, "a")), Elsewhere(run_in(tmp_path, "a"))]
    assert [other.count for other in others] == [1, 1]


def test_the_dead_do_not_count(tmp_path: Path, others: list[Elsewhere]) -> None:
    others.append(Elsewhere(run_in(tmp_path, "a")))
    with run_in(tmp_path, "b") as left:
        assert left.count() == 2
        others[0].kill()
        assert left.count() == 1
    with run_in(tmp_path, "c") as next_one:
        assert len(list(next_one.folder.iterdir())) == 1  # nor is anything of them left
    assert not list(next_one.folder.iterdir())


def _come_and_go(neighbours: Neighbours, pipe: Connection) -> None:
    counts = []
    for _ in range(300):
        with neighbours:
            counts.append(neighbours.count())
    pipe.send(counts)


def test_nobody_is_taken_for_dead_while_it_comes(tmp_path: Path) -> None:
    """A file that is not locked yet looks like one of a dead process."""
    pipes, processes = [], []
    for name in "abc":
        ours, theirs = CONTEXT.Pipe()
        work = run_in(tmp_path, name), theirs
        processes.append(CONTEXT.Process(target=_come_and_go, args=work))
        pipes.append(ours)
    for process in processes:
        process.start()
    assert all(pipe.poll(30) for pipe in pipes)
    found = [count for pipe in pipes for count in pipe.recv()]
    for process in processes:
        process.join(20)
    assert len(found) == 900
    assert set(found) <= {1, 2, 3}  # itself, always


def test_without_a_place_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with run_in(tmp_path, "a") as run:
        assert run.count() is None
