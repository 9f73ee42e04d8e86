"""Sweeps: every run once, whatever happens, and each one as if it were alone."""

import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from angular_lab.cli.main import main
from angular_lab.config.spec import Spec
from angular_lab.experiments.comparison import EXPERIMENTS, experiment
from angular_lab.experiments.cost import cost, listing
from angular_lab.experiments.definition import SCALES
from angular_lab.report.report import make_report
from angular_lab.run_folder import RunDir
from angular_lab.show import duration
from angular_lab.sweeps import trials as sweep_entries
from angular_lab.sweeps.sweep import Sweep
from angular_lab.sweeps.trials import decisive, make_entry
from angular_lab.training import checkpoint
from angular_lab.training.nonfinite import NotFinite
from angular_lab.training.ranks import start_ranks
from angular_lab.training.signals import Preempted
from angular_lab.training.start import train
from tests.lab.runs import lines
from tests.lab.sweeps.sweeps import manifest, small


def test_a_sweep_chooses_on_one_seed_and_judges_on_the_others(data: Path, tmp_path: Path) -> None:
    runner = Sweep(small(data), tmp_path / "sweep", device="cpu")
    runner.run()
    found = manifest(tmp_path / "sweep")
    assert [(e["label"][:5], e["value"], e["seed"]) for e in found["entries"]] == [
        *[("adamw", value, 0) for value in (1e-3, 2e-3, 4e-3)],
        ("adamw", found["chosen"]["adamw"]["value"], 1),
        ("angul", 0.02, 0),
        ("angul", 0.02, 1),
    ]
    losses = {}
    for entry in found["entries"]:
        assert entry["status"] == "done"
        for horizon, folder in entry["folders"].items():
            run = RunDir(tmp_path / "sweep" / folder)
            assert run.done
            assert run.read_spec().steps == int(horizon)
        if entry["label"] == "adamw" and entry["seed"] == 0:
            losses[entry["value"]] = run.read_metrics()[-1]["val_loss"]
    assert found["chosen"]["adamw"]["value"] == min(losses, key=losses.__getitem__)


def test_runs_that_share_a_model_are_as_if_alone(data: Path, tmp_path: Path) -> None:
    plan = small(data, horizons=(6,))
    Sweep(plan, tmp_path / "sweep", device="cpu").run()
    for entry in manifest(tmp_path / "sweep")["entries"]:
        folder = tmp_path / "sweep" / entry["folders"]["6"]
        train(RunDir(folder).read_spec(), tmp_path / "alone" / folder.name, device="cpu")
        assert lines(folder) == lines(tmp_path / "alone" / folder.name)


def test_a_longer_cool_down_leaves_the_same_trunk(data: Path, tmp_path: Path) -> None:
    """Off the trunk that is there anyway; and it is the run that cools down that long."""
    plan = small(data, horizons=(8, 16), seeds=(0,), longer=0.5)
    plan = replace(plan, lines=plan.lines[-1:])
    runner = Sweep(plan, tmp_path / "sweep", device="cpu")
    runner.run()
    (entry,) = manifest(tmp_path / "sweep")["entries"]
    longer = RunDir(tmp_path / "sweep" / entry["longer"])
    spec = longer.read_spec()
    assert (spec.parent_step, spec.steps, spec.decay_steps) == (8, 16, 8)
    straight = replace(runner.entries[0].spec, schedule=replace(spec.schedule, kind="wsd"))
    train(straight, tmp_path / "straight", device="cpu")
    ends = [run.read_metrics()[-1]["val_loss"] for run in (longer, RunDir(tmp_path / "straight"))]
    assert ends[0] == ends[1] != runner.entries[0].loss
    (longer.path / "DONE").unlink()
    assert runner.pending()


def test_a_longer_cool_down_needs_a_trunk(data: Path) -> None:
    """A single horizon has none: the run would never be done, and the sweep never end."""
    with pytest.raises(ValueError, match=r"longer=0\.5 with the one horizon \(8,\): .*longer=0"):
        small(data, horizons=(8,), longer=0.5)


def test_a_longer_cool_down_is_longer(data: Path) -> None:
    with pytest.raises(ValueError, match=r"longer=0\.25: the normal cool-downs take 0\.25 of"):
        small(data, longer=0.25)


def test_a_longer_cool_down_that_breaks_down_takes_nothing_from_the_normal_ones(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = small(data, horizons=(8, 16), seeds=(0,), longer=0.5)
    plan = replace(plan, lines=plan.lines[-1:])

    def breaking(spec: Spec, out: Any, *args: Any) -> RunDir:
        run = train(spec, out, *args)
        if run.path.name.endswith("-longer"):
            (run.path / "DONE").unlink()
            raise NotFinite("the loss of step 9 is nan")
        return run

    monkeypatch.setattr(sweep_entries, "train", breaking)
    runner = Sweep(plan, tmp_path, device="cpu")
    runner.run()
    (entry,) = runner.entries
    assert entry.done
    assert entry.loss < inf
    assert manifest(tmp_path)["entries"][0]["status"] == "done"
    assert [path.parent for path in tmp_path.glob("*/DIVERGED")] == [entry.longer_end]
    make_report([tmp_path], tmp_path / "report")
    tables = tmp_path / "report" / "tables"
    (table,) = (path.read_text() for path in tables.glob("*-final-loss.md"))
    assert f"{entry.loss:.4f}" in table
    said = capsys.readouterr().err
    assert "diverged in the longer cool-down" in said
    assert "unfinished" not in said
    (runs,) = (path.read_text() for path in tables.glob("*-runs.csv"))
    assert ",done," in runs


def test_branches_start_from_memory(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a process no checkpoint is read; that the bytes are those of one that reads is what
    the next test shows."""
    monkeypatch.setattr(checkpoint, "load", lambda *_: pytest.fail("it read a checkpoint"))
    Sweep(small(data), tmp_path / "sweep", device="cpu").run()


def test_the_budget_stops_it_and_nothing_is_done_twice(data: Path, tmp_path: Path) -> None:
    """Stopped again and again, it ends with the bytes of one that ran through."""
    plan = small(data)
    Sweep(plan, tmp_path / "whole", device="cpu").run()
    stops = 0
    for _ in range(200):
        try:
            Sweep(plan, tmp_path / "pieces", device="cpu").run(budget=0.5)
            break
        except Preempted:
            stops += 1
    assert stops > 2
    names = sorted(path.parent.name for path in (tmp_path / "whole").glob("*/metrics.jsonl"))
    assert names == sorted(p.parent.name for p in (tmp_path / "pieces").glob("*/metrics.jsonl"))
    for name in names:
        assert lines(tmp_path / "whole" / name) == lines(tmp_path / "pieces" / name)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "pieces").rglob("metrics.jsonl")}
    time.sleep(0.01)
    Sweep(plan, tmp_path / "pieces", device="cpu").run()
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "pieces").rglob("metrics.jsonl")}


def test_a_best_value_at_the_edge_is_flagged_and_extended_on_request(
    data: Path, tmp_path: Path
) -> None:
    low = replace(small(data).lines[0], values=(1e-5, 2e-5))
    plan = small(data, lines=(low,), horizons=(8,), seeds=(0,))
    flagged = Sweep(plan, tmp_path / "a", device="cpu")
    flagged.run()
    assert flagged.chosen["adamw"].extend == ("above",)
    assert manifest(tmp_path / "a")["chosen"]["adamw"]["edge"] == ["above"]
    extended = Sweep(plan, tmp_path / "b", device="cpu")
    extended.run(extend=2)
    assert [entry.value for entry in extended.entries] == pytest.approx([1e-5, 2e-5, 4e-5, 8e-5])


def test_a_run_that_breaks_down_is_a_result(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    high = replace(small(data).lines[0], values=(1e-3, 1e30))
    plan = small(data, lines=(high,), horizons=(8,), seeds=(0,))
    runner = Sweep(plan, tmp_path, device="cpu")
    runner.run()
    assert runner.chosen["adamw"].lr == 1e-3
    assert [entry.loss == inf for entry in runner.entries] == [False, True]
    assert [entry["status"] for entry in manifest(tmp_path)["entries"]] == ["done", "diverged"]
    monkeypatch.setattr(sweep_entries, "train", lambda *_: pytest.fail("it ran again"))
    Sweep(plan, tmp_path, device="cpu").run()


def test_a_line_where_all_diverge_does_not_stop_the_others(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    high, other = small(data).lines
    high = replace(high, values=(1e28, 1e30))
    plan = small(data, lines=(high, other), horizons=(8,))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: plan)
    words = ["sweep", "small", "--out", str(tmp_path), "--device", "cpu"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "every value diverged: --extend N tries smaller ones" in shown
    assert "best 0.02, loss" in shown
    assert "edge" not in shown, "a single value is no grid"
    assert list(manifest(tmp_path)["chosen"]) == [other.label]
    assert main([*words, "--extend", "1"]) == 0
    tried = [e["value"] for e in manifest(tmp_path)["entries"] if e["label"] == "adamw"]
    assert tried == pytest.approx([1e26, 1e28, 1e30])


def test_a_single_value_has_no_choice_to_wait_for(data: Path, tmp_path: Path) -> None:
    plan = small(data, lines=small(data).lines[1:], seeds=(0, 1, 2))
    assert [entry.seed for entry in Sweep(plan, tmp_path).pending()] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch about itself
def test_one_compilation_for_a_shape_and_one_for_every_shape(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that trains and one that evaluates, however many runs; also where torch would
    compile no more unless told to forget, which is at the fifth shape and here at the second."""
    compile_, graphs = torch.nn.Module.compile, []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_(self, backend=backend))
    line = small(data).lines[1]
    rows = []
    for width in (16, 32):
        sizes = {"layers": 1, "width": width, "mlp": 2 * width, "heads": width // 16}
        spec = replace(line.spec, model=replace(line.spec.model, **sizes), compile=True)
        rows.append(replace(line, label=f"d = {width}", spec=spec))
    torch.compiler.reset()
    sweep = Sweep(small(data, lines=tuple(rows)), tmp_path, device="cpu")
    counts: list[int] = []
    sweep.say = lambda _: counts.append(len(graphs))
    # torch's own way: what monkeypatch sets on this module, it cannot take back
    with torch._dynamo.config.patch(recompile_limit=2):
        sweep.run()
    assert [*counts, len(graphs)] == [0, 0, 2, 2, 4, 4]


def test_a_run_of_the_model_at_hand_comes_first(data: Path, tmp_path: Path) -> None:
    """Which matters where others took the rest of a line: no going back and forth."""
    line = small(data).lines[1]
    wide = replace(line.spec, model=replace(line.spec.model, width=48, mlp=96, heads=3))
    plan = small(data, lines=(line, replace(line, label="wide", spec=wide)), horizons=(4,))
    sweep = Sweep(plan, tmp_path / "runs", device="cpu")  # no other test's sweeps beside it
    said: list[str] = []
    sweep.say = said.append
    sweep.models.take(wide, start_ranks("cpu"))
    sweep.run()
    labels = [name.partition("-lr")[0] for name in said[1:]]
    assert labels == ["runs/wide"] * 2 + ["runs/angular-muown--kappa---1"] * 2


def test_a_setting_at_its_default_leaves_no_mark_in_a_name() -> None:
    """So that a setting that is added later does not rename the runs that are there."""
    assert decisive(Spec()) == {}
    spec = replace(Spec(), batch=7, log_every=3, optim=replace(Spec().optim, lr=0.5))
    assert decisive(spec) == {"batch": 7, "optim.lr": 0.5}


def test_folders_are_named_by_what_is_in_them(data: Path, tmp_path: Path) -> None:
    plan = small(data)
    line = plan.lines[1]
    entry = make_entry(plan, line, 0.02, 0, tmp_path)
    assert entry.folder.name.startswith("angular-muown--kappa---1-lr0.02-seed0-")
    longer = replace(line, spec=replace(line.spec, batch=8))
    others = [
        make_entry(plan, line, 0.02, 1, tmp_path),
        make_entry(plan, line, 0.03, 0, tmp_path),
        make_entry(plan, longer, 0.02, 0, tmp_path),
        make_entry(replace(plan, horizons=(4, 12)), line, 0.02, 0, tmp_path),
        make_entry(replace(plan, horizons=(2, 8)), line, 0.02, 0, tmp_path),
    ]
    assert len({entry.folder, *(other.folder for other in others)}) == 6
    assert make_entry(plan, line, 0.02, 0, tmp_path) == entry


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_one_of_valid_specs(name: str, scale: str, tmp_path: Path) -> None:
    plan = experiment(name, scale)
    assert plan.name == name
    assert len({line.label for line in plan.lines}) == len(plan.lines)
    for line in plan.lines:
        for value in line.values:
            make_entry(plan, line, value, plan.seeds[0], tmp_path)
    runs, tokens, operations = cost(plan)
    assert runs >= len(plan.lines)
    assert operations > tokens > 0


def test_the_teaser_has_the_papers_tokens() -> None:
    """Four lines of five rates: nine tenths of 10B tokens and four cool-downs of a tenth each."""
    runs, tokens, _ = cost(experiment("teaser", "paper"))
    assert runs == 20
    assert tokens == pytest.approx(20 * (9e9 + 0.1 * 25e9), rel=1e-3)


def test_the_list_names_everything() -> None:
    text = listing()
    assert all(name in text for name in EXPERIMENTS)
    assert [text.count(f" {scale} ") >= len(EXPERIMENTS) for scale in SCALES] == [True] * 3


def test_the_list_of_one_scale(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "--scale", "nano"]) == 0
    _, *rows, _ = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows] == [[name, "nano"] for name in EXPERIMENTS]
    assert main(["experiments", "--scale", "xl"]) == 2
    assert "--scale xl: it must be paper, s" in capsys.readouterr().err


def test_long_times_are_in_years() -> None:
    day = 86_400
    told = [duration(days * day) for days in (3, 999, 1001, 20_000, 585 * 365.25, 4e6)]
    assert told == [
        "3.0 days", "999.0 days", "2.7 years", "55 years", "585 years", "10,951 years",
    ]  # fmt: skip
    assert duration(5400) == "1.5 hours"


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [("tease", "s", "did you mean teaser"), ("teaser", "xl", "--scale xl: it must be paper, s")],
)
def test_unknown_names(name: str, scale: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experiment(name, scale)
