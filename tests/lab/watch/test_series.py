"""Logs are read piece by piece, and curves are thinned without losing their extremes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angular_lab import run_folder
from angular_lab.errors import UserError
from angular_lab.run_folder import RunFolder
from angular_lab.watch.series import Cursor, read_series, thin
from angular_lab.watch.tail import Position, read_after
from tests.lab.report.made import spec_of, write_run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "git_state", dict)


def write(path: Path, steps: range, mode: str = "w", **more: float) -> None:
    with open(path, mode) as file:
        file.writelines(json.dumps({"step": step, **more}) + "\n" for step in steps)


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_pieces_are_the_whole(cuts: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    """However the file grows, also in the middle of a line."""
    text = "".join(json.dumps({"step": step, "loss": 1 / (step + 1)}) + "\n" for step in range(8))
    path, position, steps = tmp_path_factory.mktemp("log") / "metrics.jsonl", Position(), []
    for cut in [*sorted(cuts), len(text)]:
        path.write_text(text[:cut])
        chunk = read_after(path, replace(position, inode=path.stat().st_ino))
        assert not chunk.restarted
        position = chunk.end
        steps += [line["step"] for line in chunk.lines]
    assert steps == list(range(8))


def test_a_rewritten_log_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "timing.jsonl"
    write(path, range(100))
    end = read_after(path, Position()).end
    write(path, range(50))  # shorter
    assert len(read_after(path, end).lines) == 50
    write(path, range(200), seconds=1.0)  # longer, in the same file: only its bytes tell
    chunk = read_after(path, end)
    assert chunk.restarted
    assert len(chunk.lines) == 200
    new = tmp_path / "new"
    write(new, range(200), seconds=1.0)
    new.replace(path)
    assert read_after(path, chunk.end).restarted  # another inode
    path.unlink()
    assert read_after(path, chunk.end).restarted


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n[1]\n{"step": 2}\n{"ste')
    assert [line["step"] for line in read_after(path, Position()).lines] == [1, 2]


def test_answers_join_to_the_curves_of_the_file(tmp_path: Path) -> None:
    spec = spec_of()
    whole = RunFolder(write_run(tmp_path / "whole", spec, 3.0))
    growing = RunFolder(tmp_path / "growing")
    growing.path.mkdir()
    joined: dict[str, list[list[float]]] = {}
    cursor = Cursor()
    metrics, timing = (
        p.read_text().splitlines(True) for p in (whole.metrics_path, whole.timing_path)
    )
    for end in (0, 7, 8, 30, len(metrics)):
        growing.metrics_path.write_text("".join(metrics[:end]))
        growing.timing_path.write_text("".join(timing[: max(0, end - 1)]))  # written second
        answer = read_series(growing, spec, cursor)
        assert not answer["restarted"]
        cursor = Cursor.parse(answer["cursor"])
        for key, curve in answer["series"].items():
            joined.setdefault(key, [[], []])
            for known, new in zip(joined[key], curve, strict=True):
                known.extend(new)
    lines = [json.loads(line) for line in metrics]
    assert joined["loss"] == [[x["step"] for x in lines], pytest.approx([x["loss"] for x in lines])]
    evaluated = [x for x in lines if "val_loss" in x]
    assert joined["val_loss"][0] == [x["step"] for x in evaluated]
    assert joined["tokens_per_second"][0] == joined["loss"][0][:-1]


def test_a_rewind_starts_both_curves_again(tmp_path: Path) -> None:
    spec = spec_of()
    run = RunFolder(write_run(tmp_path / "run", spec, 3.0))
    cursor = Cursor.parse(read_series(run, spec, Cursor())["cursor"])
    run.rewind(200)
    run.append(run.metrics_path, {"step": 210, "tokens": 1, "loss": 5.0})
    answer = read_series(run, spec, cursor)
    assert answer["restarted"]
    assert answer["series"]["loss"][0] == list(range(10, 211, 10))
    assert answer["series"]["loss"][1][-1] == 5.0
    assert answer["series"]["tokens_per_second"][0] == list(range(10, 201, 10))


@pytest.mark.parametrize("text", ["1", "a,b,c,d,e,f,g,h", "1,2,3"])
def test_a_cursor_that_the_server_did_not_write(text: str) -> None:
    with pytest.raises(UserError, match="after="):
        Cursor.parse(text)


def test_time_continues_when_a_run_is_resumed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step, seconds in ((1, 10.0), (2, 20.0), (3, 5.0), (4, 15.0)):  # resumed after step 2
        run.append(run.timing_path, {"step": step, "seconds": seconds})
    answer = read_series(run, spec_of(), Cursor())
    assert answer["series"]["seconds"] == ([1, 2, 3, 4], [10.0, 20.0, 25.0, 35.0])
    run.append(run.timing_path, {"step": 5, "seconds": 2.0})  # resumed again
    answer = read_series(run, spec_of(), Cursor.parse(answer["cursor"]))
    assert answer["series"]["seconds"] == ([5], [37.0])


def test_kappa_is_computed_where_it_is_not_logged(tmp_path: Path) -> None:
    spec = spec_of()
    optim = replace(spec.optim, decay_scale=0.01, decay_degree=0.5)
    run = RunFolder(write_run(tmp_path / "ours", replace(spec, optim=optim), 3.0))
    steps, values = read_series(run, replace(spec, optim=optim), Cursor())["series"]["kappa"]
    # The first step is step 0 of the optimizer, and kappa falls after a warmup of 10.
    expected = [(1 + 0.01 * max(0, step - 1 - 10)) ** -0.5 for step in steps]
    assert values == pytest.approx(expected, rel=1e-6)
    assert "kappa" not in read_series(run, spec_of("muon"), Cursor())["series"]
    run.append(run.metrics_path, {"step": 500, "tokens": 1, "kappa": 0.25})
    answer = read_series(run, spec, Cursor())
    assert answer["series"]["kappa"] == ([500], [0.25])  # what the run says


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), limit=st.integers(4, 60))
def test_thinning_keeps_extremes_and_ends(values: list[float], limit: int) -> None:
    steps = list(range(len(values)))
    kept_steps, kept = thin(steps, values, limit)
    assert len(kept) <= max(limit, 4)
    assert list(kept_steps) == sorted(set(kept_steps))
    assert [values[step] for step in kept_steps] == list(kept)  # points of the curve, not means
    assert (min(kept), max(kept)) == (min(values), max(values))
    assert (kept_steps[0], kept_steps[-1]) == (0, len(values) - 1)
    if len(values) <= limit:
        assert list(kept) == values


def test_a_spike_of_a_long_run_survives(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    lines = ({"step": s, "tokens": s, "loss": 9.0 if s == 31_415 else 3.0} for s in range(40_000))
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps, values = read_series(run, spec_of("muon"), Cursor())["series"]["loss"]
    assert len(steps) <= 2000
    assert values[steps.index(31_415)] == 9.0
