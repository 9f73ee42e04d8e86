"""The command `grid`: what it costs, what it trains, and that kills lose and repeat nothing."""

import json
import re
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from angular_lab.cli.main import main
from angular_lab.experiments.comparison import EXPERIMENTS, experiment
from angular_lab.experiments.cost import cost, flops_per_token
from angular_lab.log import configure_logging
from angular_lab.run_folder import RunFolder
from angular_lab.sweeps import workers
from angular_lab.sweeps.dry_run import check_specs, checkpoints, total, work_of
from angular_lab.sweeps.sweep import Sweep
from angular_lab.sweeps.sweep_file import SweepRecord
from tests.lab.runs import LIMIT, SERVER, SMALL, start_function
from tests.lab.sweeps.small import metrics

pytestmark = pytest.mark.timeout(2 * LIMIT)
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "lab" / "own-experiment.md"
TINY = [word for word in SMALL if not word.startswith(("steps=", "save_every="))]
TINY += ["save_every=none"]
TOKENS = 64  # of a step: 2 sequences of 32
# adamw has two values and muon one, on two seeds: five trials of a trunk and two cooldowns
AXES = ["optim.name=adamw,muon", "optim.lr=0.01", "optim.lr@adamw=0.002:0.004:x2", "seed=0..1"]
TRIALS, RUNS, STEPS = 5, 15, 5 * (8 + 1 + 2)


def words(data: Path, out: Path, *more: str) -> list[str]:
    settings = [*TINY, *AXES, f"data={data}", "schedule.decay=0.2"]
    options = ["--horizons", "5,10", "--name", "mine", "--out", str(out), "--device", "cpu"]
    return ["grid", "nano", *settings, *options, *more]


def single(data: Path, *more: str) -> list[str]:
    return ["nano", *TINY, "steps=4", f"data={data}", *more]


def record(out: Path) -> SweepRecord:
    return SweepRecord.read(out / "sweeps" / "mine.json")


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def finished(out: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("runs/*/DONE")}


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of a printed table by their first one."""
    return {cells[0]: cells for line in text.splitlines() if (cells := line.split("  "))}


def noted(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return line.removeprefix(name).strip()


@pytest.fixture(scope="module")
def store(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished grid, made without interruption."""
    out = tmp_path_factory.mktemp("grid")
    assert main(words(data, out)) == 0
    return out


@pytest.mark.parametrize("command", ["sweep", "submit"])
def test_commands_for_experiments_name_that_of_a_grid(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, "mine", "--out", str(store)]) == 2
    expected = f"'mine' is a grid, and {command} takes an experiment of the lab: run the grid again"
    error = capsys.readouterr().err
    assert f"{expected} as angular-lab grid nano ... --processes N" in error
    replace(record(store), experiment="teaser").write(tmp_path / "sweeps" / "mine.json")
    assert main([command, "mine", "--out", str(tmp_path)]) == 2
    again = f"angular-lab {command} teaser --scale nano --name mine"
    assert f"'mine' is a sweep: give its experiment, as in {again}" in capsys.readouterr().err


def test_the_runs_are_those_of_the_words(store: Path) -> None:
    result = record(store)
    best = result.chosen["adamw"]
    assert sorted((t.arm, t.value, t.seed) for t in result.trials) == sorted(
        [
            ("adamw", 0.002, 0),
            ("adamw", 0.004, 0),
            ("adamw", best, 1),
            ("muon", 0.01, 0),
            ("muon", 0.01, 1),
        ]
    )
    for trial in result.trials:
        for horizon, name in trial.runs.items():
            spec = RunFolder(store / "runs" / name).read_spec()
            assert (spec.optim.name, spec.optim.lr) == (trial.arm, trial.value)
            assert (spec.seed, spec.steps, spec.batch) == (trial.seed, horizon, 2)
    assert len(finished(store)) == RUNS


def test_a_dry_run_of_a_single_small_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grid", *single(data), "--out", str(tmp_path), "--dry-run", "--tflops", "1"]) == 0
    text = capsys.readouterr().out
    assert re.match(r"about [\d.]+ kB for the checkpoints", noted(text, "disk"))
    assert "makes <0.01 passes over" in noted(text, "corpus")
    assert noted(text, "done") == f"0 of 1 run is in {tmp_path / 'runs'}"
    assert noted(text, "left").startswith("1 run, 256 tokens, ")


def test_again_it_prints_the_outcome_and_trains_nothing(
    store: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, logs = finished(store), metrics(store)
    assert main(words(data, store)) == 0
    printed = capsys.readouterr()
    adamw, muon, file, pair, hint = printed.out.splitlines()
    assert adamw.startswith(f"adamw  best {record(store).chosen['adamw']:g}, loss ")
    assert muon.endswith(" on seed 0")
    assert pair.startswith("adamw below muon: ")
    assert "(seeds 1)" in pair
    assert hint == f"for a page about it: angular-lab report {file}"
    assert "5 of 5 trials done" in printed.err
    assert (finished(store), metrics(store)) == (before, logs)


def test_the_report_judges_the_pair(store: Path, tmp_path: Path) -> None:
    assert main(["report", str(store), "-o", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert "adamw against muon on nano, each at its best lr" in page
    result = record(store)
    for arm in ("adamw", "muon"):
        losses = []
        for trial in result.trials:
            if trial.arm == arm and trial.seed > 0:
                log = store / "runs" / trial.runs[10] / "metrics.jsonl"
                last = json.loads(log.read_text().splitlines()[-1])
                assert last["step"] == 10
                losses.append(last["val_loss"])
        assert f"{fmean(losses):.4f} (n=1)" in page


# -- the dry run ---------------------------------------------------------------------------------


def test_a_dry_run_is_right_and_writes_nothing(
    store: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(store)
    for out, done in ((tmp_path / "new", 0), (store, RUNS)):
        assert main(words(data, out, "--dry-run", "--tflops", "1e-7")) == 0
        text = capsys.readouterr().out
        cells = [cell.strip() for cell in rows(text)["all"] if cell.strip()]
        assert cells[1:5] == [str(TRIALS), str(RUNS), str(done), str(STEPS)]
        assert float(cells[5]) == pytest.approx(STEPS * TOKENS, rel=5e-3)
        model = RunFolder(next(store.glob("runs/*"))).read_spec().model
        operations = STEPS * TOKENS * flops_per_token(model)
        assert float(cells[6]) == pytest.approx(operations, rel=5e-3)
        left = 0 if done else operations
        hours, _, unit = noted(text, "time").partition(" ")
        assert float(hours) == pytest.approx(left / 1e5 / 3600, rel=5e-2)
        assert unit == "device-hours at 1e-07 TFLOP/s (--tflops)"
        assert noted(text, "done") == f"{done} of {RUNS} runs are in {out / 'runs'}"
        assert noted(text, "name") == "mine"
        assert noted(text, "seeds") == "0 chooses the value of each method; judged on 1"
    assert files(store) == before
    assert not (tmp_path / "new").exists()


def test_its_numbers_are_those_of_the_finished_runs(store: Path) -> None:
    """The steps that were really taken, and the checkpoints that really stayed."""
    taken = kept = 0
    for path in store.glob("runs/*"):
        spec = RunFolder(path).read_spec()
        lines = (path / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert len({*steps}) == len(steps)
        taken += max(steps) - spec.parent_step
        assert len([*path.glob("checkpoints/step_*")]) == checkpoints(spec)
        kept += checkpoints(spec)
    assert taken == STEPS
    assert kept == RUNS + 5, "a trunk keeps both of its branch points"


def test_half_a_store(
    store: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cooldowns that are missing are left to do. A trunk that is missing is not needed once its
    cooldowns are done."""
    shutil.copytree(store, tmp_path / "half")
    for trial in record(store).trials:
        removed = trial.runs[10] if trial.arm == "muon" else trial.trunk
        assert removed is not None
        shutil.rmtree(tmp_path / "half" / "runs" / removed)
    assert main(words(data, tmp_path / "half", "--dry-run")) == 0
    text = capsys.readouterr().out
    assert noted(text, "left").startswith(f"2 runs, {2 * 2 * TOKENS} tokens, ")
    assert noted(text, "done").startswith(f"{RUNS - 2} of {RUNS} runs")


def test_a_dry_run_does_not_prepare_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["grid", "nano", "optim.lr=0.01,0.02", "--dry-run"]) == 0
    assert "standard library, which is not prepared yet" in capsys.readouterr().out
    assert main(["sweep", "teaser", "kappa", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert len(rows(text)) > 8
    assert text.count("\nall ") == 2
    assert not [*tmp_path.iterdir()]


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```(?:text)?\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (i,) = (i for i, block in enumerate(blocks) if "--dry-run" in block)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(blocks[i].replace("\\\n", " "))[1:]) == 0
    assert capsys.readouterr().out == blocks[i + 1]


@pytest.mark.parametrize("name", ["teaser", "closest", "split-qkv"])
def test_the_plan_of_an_experiment_costs_what_the_listing_says(
    name: str, data: Path, tmp_path: Path
) -> None:
    plan = experiment(name, "s")
    trials, tokens, operations = cost(plan)
    works = work_of(Sweep(plan, tmp_path, str(data)))
    everything = total(work.all for work in works)
    assert sum(work.trials for work in works) == trials
    assert everything.tokens == pytest.approx(tokens, rel=1e-3)
    assert everything.operations == pytest.approx(operations, rel=1e-3)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_can_be_planned_and_started(name: str, tmp_path: Path) -> None:
    """As `sweep` does before its first run, at the scale that has every setting."""
    sweep = Sweep(experiment(name, "s"), tmp_path, prepare=False)
    check_specs(sweep)
    assert total(work.all for work in work_of(sweep)).disk > 0


def test_what_a_trial_stores_in_addition_counts(tmp_path: Path) -> None:
    """Extrapolation keeps a copy of the weights."""
    plan = experiment("trials", "s")
    disk = {w.arm.label: w.all.disk for w in work_of(Sweep(plan, tmp_path, prepare=False))}
    assert disk["extrapolation 0.3"] > 1.1 * disk["aux_beta2 0.99"]


@pytest.mark.parametrize("rate", [2e9, 2.5e10, 4e14])  # FLOP/s, of a machine under load too
def test_the_listing_has_hours_by_device(
    rate: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("angular_lab.experiments.cost.rate_here", lambda: (rate, "measured now"))
    assert main(["experiments", "--scale", "paper"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    (cells,) = (x for x in map(str.split, text.splitlines()) if x[:2] == ["teaser", "paper"])
    operations, h100, a100, b200 = map(float, cells[4:8])
    hours = [operations / (0.4 * peak * 1e12) / 3600 for peak in (989, 312, 2250)]
    assert [h100, a100, b200] == pytest.approx(hours, rel=1e-2)
    assert text.count("Loss after the cooldown at four horizons") == 1


# -- the same store ------------------------------------------------------------------------------


def test_runs_of_train_are_not_trained_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *single(data, "optim.lr=0.01"), "--device", "cpu"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    before = files(folder)
    assert main(["grid", *single(data, "optim.lr=0.01,0.02"), "--device", "cpu"]) == 0
    assert files(folder).items() >= before.items() - {(folder, before.get(folder))}
    names = {path.name for path in Path("runs").iterdir()}
    assert len(names) == 2
    capsys.readouterr()
    settings = single(data, "optim.lr=0.02")
    assert main(["train", *settings, "--resume", "auto", "--device", "cpu"]) == 0
    assert {path.name for path in Path("runs").iterdir()} == names
    assert "is already finished" in capsys.readouterr().err


def test_a_grid_may_grow_under_its_name(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def grid(*more: str) -> int:
        return main(["grid", *single(data), "--name", "mine", "--device", "cpu", *more])

    assert grid("optim.lr=0.01,0.02", "seed=0,1") == 0
    before = finished(tmp_path)
    assert grid("optim.lr=0.01,0.02,0.04", "seed=0..2") == 0
    assert finished(tmp_path).items() >= before.items()
    assert record(tmp_path).seeds == (0, 1, 2)
    kept = files(tmp_path)
    refused = {
        ("seed=0,1",): "also has the seed 2",
        ("seed=0..2", "optim.name=muon"): "also has the method angular_muown",
        ("seed=0..2", "--pick-on", "1", "optim.lr=0.01,0.02"): "chose values on seed 0, not 1",
        ("seed=0..2", "clip=2"): "has angular_muown with clip=1.0 (now 2.0)",
        ("seed=0..2", "optim.aux_lr=0.1", "--tune", "optim.aux_lr"): "tuned optim.lr of angular",
        ("seed=0..2", "--horizons", "9"): "say the same",
    }
    for more, message in refused.items():
        assert grid(*more) == 2
        assert message in capsys.readouterr().err
    assert files(tmp_path) == kept


def test_open_pairs_get_more_seeds(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["grid", *single(data, "optim.momentum=0.95,0.9500001", "seed=0,1")]
    options = ["--until", "settled", "--max-seeds", "3", "--name", "mine", "--device", "cpu"]
    assert main([*command, *options]) == 0
    result = record(tmp_path)
    assert [arm.label for arm in result.arms] == ["momentum 0.95", "momentum 0.9500001"]
    judged = {trial.seed for trial in result.trials}
    assert judged >= {0, 1}
    assert judged - {0, 1} == {*result.added_seeds}


# -- kills ---------------------------------------------------------------------------------------


def wait_for(done: int, out: Path) -> None:
    end = time.monotonic() + LIMIT
    while len(finished(out)) < done:
        assert time.monotonic() < end, f"{len(finished(out))} runs are done"
        time.sleep(0.005)


def test_kills_lose_nothing_and_repeat_nothing(store: Path, data: Path, tmp_path: Path) -> None:
    before: dict[str, int] = {}
    for done in (2, 6, 11):
        process = start_function(main, words(data, tmp_path))
        try:
            wait_for(done, tmp_path)
        finally:
            process.kill()
            process.join()
        after = finished(tmp_path)
        assert after.items() >= before.items(), "a finished run was made again"
        assert len(after) < RUNS
        before = after
    assert main(words(data, tmp_path)) == 0
    assert finished(tmp_path).items() >= before.items()
    assert metrics(tmp_path) == metrics(store)
    assert record(tmp_path) == record(store)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that need not import torch, each with one thread."""
    monkeypatch.setattr(workers, "CONTEXT", SERVER)
    monkeypatch.setattr(workers, "_threads", lambda *_: 1)
    configure_logging()


@pytest.mark.usefixtures("fast")
def test_two_processes_make_the_same_runs(store: Path, data: Path, tmp_path: Path) -> None:
    """Another process knows the grid by its experiment alone: it has no name to look up."""
    assert main(words(data, tmp_path, "--processes", "2")) == 0
    assert metrics(tmp_path) == metrics(store)
    assert record(tmp_path) == record(store)


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["seed=0..200"], "201 trials: look at them with --dry-run, and add --yes"),
        (["optim.name=muon,muonn"], "method 'muonn': optim.name=muonn: it must be one of adamw"),
        (["model.vocabulary=64,300"], "set model.vocabulary=257"),
        (
            ["optim.name=adamw", "schedule.fall=0,0.1"],
            "method 'fall 0.1': schedule.fall=0.1 is for",
        ),
        (["schedule.decay_steps=1,500"], "schedule.decay_steps=500: the run has 4 steps"),
        (["optim.lr=0.01,0.02", "--name", "teaser"], "--name teaser is an experiment of the lab"),
        (["optim.lr=0.01,0.02", "--name", "a/b"], "--name a/b: it must be a plain file name"),
        (["--data", "elsewhere"], "data=... and --data say the same"),
        (["--horizons", "4,8"], "steps=... and --horizons say the same"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(["grid", *single(data), "--out", str(tmp_path / "store"), *more]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("options", [["--tflops", "0"], ["--horizons", "1,a"], ["--budget", "x"]])
def test_options_that_make_no_sense(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["grid", "nano", "optim.lr=0.01,0.02", *options])
    assert f"argument {options[0]}: '{options[1]}': write" in capsys.readouterr().err
