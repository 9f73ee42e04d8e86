"""What counts as a finished run of a sweep: one that was made as the sweep wants it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from angular_lab.run_folder import RunDir
from angular_lab.sweeps.sweep import Sweep
from angular_lab.sweeps.trials import Entry, make_entry, run_entry
from angular_lab.training.signals import Preempted
from tests.lab.sweeps.sweeps import small


@pytest.fixture(scope="module", params=[(4,), (4, 8)], ids=["one horizon", "several"])
def entry(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Entry:
    """Finished."""
    plan = small(data, lines=small(data).lines[1:], horizons=request.param, seeds=(0,))
    sweep = Sweep(plan, tmp_path_factory.mktemp("sweep"), device="cpu")
    sweep.run()
    return sweep.entries[0]


@pytest.fixture
def stored(entry: Entry) -> Any:
    """Change what the spec.json of a folder says, for the time of the test."""
    before: dict[Path, str] = {}

    def change(folder: Path, how: Callable[[dict[str, Any]], None]) -> None:
        path = folder / "spec.json"
        before[path] = path.read_text()
        content = json.loads(before[path])
        how(content["spec"])
        path.write_text(json.dumps(content))

    yield change
    for path, text in before.items():
        path.write_text(text)


def test_a_name_stands_for_what_a_loss_depends_on(data: Path, tmp_path: Path) -> None:
    plan = small(data)
    line = plan.lines[0]

    def name(**changes: Any) -> str:
        changed = replace(line, spec=replace(line.spec, **changes))
        return make_entry(plan, changed, 0.002, 0, tmp_path).folder.name

    assert name() == name(eval_every=7, log_every=3, angle_every=0, compile=True)
    cosine = replace(line.spec.schedule, kind="cosine")
    others = [
        name(),
        name(batch=8),
        name(schedule=cosine),
        name(average="3"),
        name(clip=0.5),
        name(model=replace(line.spec.model, mlp=32)),
    ]
    others.append(make_entry(replace(plan, longer=0.5), line, 0.002, 0, tmp_path).folder.name)
    assert len(set(others)) == len(others)


def test_a_run_goes_on_as_it_began_whatever_no_loss_depends_on(data: Path, tmp_path: Path) -> None:
    plan = small(data, lines=small(data).lines[1:], seeds=(0,))
    entry = Sweep(plan, tmp_path).pending()[0]
    with pytest.raises(Preempted):  # its first step is taken, then there is no time
        run_entry(entry, RunDir(entry.folder), "cpu", until=0)
    (line,) = plan.lines
    other = replace(line, spec=replace(line.spec, log_every=5, eval_every=2))
    sweep = Sweep(replace(plan, lines=(other,)), tmp_path, device="cpu")
    sweep.run()
    assert sweep.entries[0].done
    assert RunDir(sweep.entries[0].folder).read_spec().log_every == line.spec.log_every


def test_what_another_default_made_is_not_taken_as_done(entry: Entry, stored: Any) -> None:
    """The name is made of what differs from the defaults: it does not tell that one changed."""
    assert entry.done
    folder = list(entry.ends.values())[-1]
    stored(folder, lambda spec: spec["optim"].update(beta2=0.5))
    wanted = rf"{folder} .*optim.beta2=0.5, .*wants 0.95: .*another --out, or remove"
    with pytest.raises(ValueError, match=wanted):
        _ = entry.done


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [("model", "init_std", 0.5), ("schedule", "warmup", 7), ("", "clip", 9.0), ("", "seed", 5)],
)
def test_every_kind_of_setting_counts(
    entry: Entry, stored: Any, part: str, key: str, value: float
) -> None:
    folder = next(iter(entry.ends.values()))
    stored(folder, lambda spec: (spec[part] if part else spec).update({key: value}))
    with pytest.raises(ValueError, match=f"{key}={value}"):
        _ = entry.done


def test_what_only_watches_a_run_does_not_count(entry: Entry, stored: Any) -> None:
    for folder in entry.ends.values():
        stored(folder, lambda spec: spec.update(log_every=77, keep=9, loggers="tensorboard"))
    assert entry.done


def test_a_setting_that_an_older_run_never_heard_of_is_at_its_default(
    entry: Entry, stored: Any
) -> None:
    for folder in entry.ends.values():
        stored(folder, lambda spec: spec["optim"].pop("exact_angle"))
    assert entry.done


def test_a_diverged_run_of_another_default(entry: Entry, stored: Any) -> None:
    mark = entry.folder / "DIVERGED"
    mark.touch()
    try:
        assert entry.done
        stored(entry.folder, lambda spec: spec.update(batch=2))
        with pytest.raises(ValueError, match=rf"{entry.folder} .*batch=2, .*wants 4"):
            _ = entry.done
    finally:
        mark.unlink()


def test_a_sweep_stops_there(entry: Entry, stored: Any, data: Path) -> None:
    plan = small(data, lines=(entry.line,), horizons=entry.horizons, seeds=(0,))
    stored(entry.ends[entry.horizons[-1]], lambda spec: spec.update(clip=3.0))
    with pytest.raises(ValueError, match=r"clip=3.0"):
        Sweep(plan, entry.folder.parent, device="cpu").run()


def test_a_finished_run_without_an_evaluation(entry: Entry) -> None:
    run = RunDir(entry.ends[entry.horizons[-1]])
    assert entry.loss > 0
    text = run.metrics_path.read_text()
    run.metrics_path.write_text('{"step": 1, "loss": 2.0}\n')
    try:
        with pytest.raises(ValueError, match=rf"{run.path} .*no val_loss"):
            _ = entry.loss
    finally:
        run.metrics_path.write_text(text)
