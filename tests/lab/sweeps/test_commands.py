"""The command `sweep`: what a user types and sees."""

import shutil
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from angular_lab.cli.main import main
from angular_lab.data.prepare import prepare
from angular_lab.data.shards import Manifest
from angular_lab.data.tokenizer import BytesTokenizer
from angular_lab.experiments.comparison import EXPERIMENTS
from angular_lab.experiments.definition import Experiment, only_arms, trained_by
from angular_lab.sweeps import workers
from angular_lab.sweeps.sweep import Sweep
from angular_lab.sweeps.sweep_file import SweepRecord
from tests.lab.runs import LIMIT
from tests.lab.sweeps.small import small

LONG = 200  # steps, more tokens than the small corpus has


@pytest.fixture
def plan(data: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    result = small(data, horizons=(4,))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: result)
    return result


def test_it_reports_progress_and_data(
    plan: Experiment, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "small", "--out", str(tmp_path), "--device", "cpu"]
    assert main([*words, "--budget", "0.001s"]) == 75
    assert capsys.readouterr().err.splitlines() == [
        f"small, scale nano: 0 of 6 trials done; data: {data}; longest run: <0.01 passes over "
        "11.9M training tokens",
        "stopped: the budget is spent; small-nano: 0 of 6 trials done, 6 left; run the same "
        "command to continue",
    ]
    assert main(words) == 0
    best, single, file, hint = capsys.readouterr().out.splitlines()
    assert best.startswith("adamw                     best 0.004, loss ")
    assert best.endswith(" on seed 0, which chose it, at the grid's edge: above")
    assert single.startswith("angular_muown, kappa = 1  best 0.02, loss ")
    assert single.endswith(" on seed 0"), "a single value is not a choice"
    assert file == str(tmp_path / "sweeps" / "small-nano.json")
    assert hint == f"for a page about it: angular-lab report {file}"


def test_it_names_the_default_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "speedrun", "--out", str(tmp_path), "--budget", "0.001s"]) == 75
    expected = "data: stdlib (the Python standard library, as bytes); longest run: 0."
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sweep", "submit"])
def test_a_corpus_is_read_once_unless_the_user_allows_more(
    plan: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    """By the longest run: the same text twice and a half."""
    few = prepare_few(tmp_path / "data")
    per_step = plan.arms[0].spec.tokens_per_step
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: replace(plan, horizons=(4, LONG)))
    words = [command, "small", "--out", str(tmp_path / "store"), "--data", str(tmp_path / "data")]
    passes = LONG * per_step / few
    least = f"{ceil(passes * 10) / 10:g}"
    assert main(words) == 2
    assert (
        f"the longest run of small-nano makes {passes:.2f} passes over {few:,} training tokens, "
        f"and --passes allows 1: prepare more text, or allow it with --passes {least}"
    ) in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
    allowed = [*words, "--passes", least]
    more = ["--budget", "0.001s"] if command == "sweep" else ["--dry-run", "--time", "1h"]
    assert main([*allowed, *more]) in (0, 75)
    assert f"{passes:.2f} passes over" in capsys.readouterr().err


def prepare_few(out: Path) -> int:
    """Prepare a small corpus, and return its training tokens."""
    texts = [f"document {i} of a small corpus" for i in range(400)]
    prepare(texts, BytesTokenizer(), out, val_fraction=0.2, progress=False)
    manifest = Manifest.load(out)
    assert manifest is not None
    return manifest.splits["train"].tokens


def test_seeds_of_the_command_replace_those_of_the_experiment(
    plan: Experiment, tmp_path: Path
) -> None:
    """The first one picks, the others judge."""
    words = ["sweep", "small", "--out", str(tmp_path), "--device", "cpu", "--seeds", "5,7"]
    assert main(words) == 0
    record = SweepRecord.read(tmp_path / "sweeps" / "small-nano.json")
    assert record.seeds == (5, 7)
    assert {trial.seed for trial in record.trials} == {5, 7}
    assert sum(trial.seed == 5 for trial in record.trials) == 4
    assert sum(trial.seed == 7 for trial in record.trials) == 2


def test_only_some_methods_are_trained(
    plan: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file keeps the whole plan, and a later command continues with the rest."""
    words = ["sweep", "small", "--out", str(tmp_path), "--device", "cpu"]
    assert main([*words, "--only", "*kappa*", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "angular_muown, kappa = 1" in shown
    assert "adamw" not in shown
    assert main([*words, "--only", "*kappa*"]) == 0
    text = capsys.readouterr()
    assert "0 of 2 trials done, of 1 of 2 methods; data: " in text.err
    assert text.out.count("loss") == 1, "a method that was not trained has no outcome"
    record = SweepRecord.read(tmp_path / "sweeps" / "small-nano.json")
    assert {trial.arm for trial in record.trials} == {"angular_muown, kappa = 1"}
    assert [arm.label for arm in record.arms] == ["adamw", "angular_muown, kappa = 1"]
    assert main([*words, "--only", "adamw", "--only", "*kappa*"]) == 0
    assert "2 of 6 trials done" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "horizons"),
    [
        ("angles", "30 steps"),
        ("teaser", "30, 60, 90 and 120 steps, branching off one run at a constant learning rate"),
        ("short-runs", "300, 1000 and 3000 steps, by method"),
    ],
)
def test_a_dry_run_says_where_runs_end(name: str, horizons: str, tmp_path: Path, capsys) -> None:
    assert main(["sweep", name, "--out", str(tmp_path), "--dry-run", "--tflops", "1"]) == 0
    assert f"\nhorizons   {horizons}\n" in capsys.readouterr().out


def test_a_dry_run_lists_the_pairs_that_it_trains(tmp_path: Path, capsys) -> None:
    words = ["sweep", "trials", "--out", str(tmp_path), "--passes", "9", "--dry-run"]
    assert main(words) == 0
    assert " pairs of methods; the report judges each" in capsys.readouterr().out
    two = ["--only", "muon, linear to zero", "--only", "angular_muown, cooldown 50%"]
    assert main([*words, *two]) == 0
    expected = "compares   angular_muown, cooldown 50% with muon, linear to zero\n"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("command", ["sweep", "submit"])
def test_what_is_not_trained_does_not_count(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, command: str
) -> None:
    """A method that reads the corpus too often may stay in the plan; the cost is without it."""
    few = prepare_few(tmp_path / "data")
    longer, short = replace(plan.arms[0], horizons=(LONG,)), plan.arms[1]
    both = replace(plan, arms=(longer, short))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: both)
    words = [command, "small", "--out", str(tmp_path), "--data", str(tmp_path / "data")]
    words += ["--dry-run", *(["--time", "1h"] if command == "submit" else [])]
    assert main(words) == 2
    assert "and --passes allows 1" in capsys.readouterr().err
    assert main([*words, "--only", short.label]) == 0
    tokens = 4 * short.spec.tokens_per_step
    assert tokens < few
    if command == "submit":
        assert f"longest trial: {tokens:.3g} tokens, " in capsys.readouterr().out


def test_only_trains_what_a_variant_needs(plan: Experiment) -> None:
    variant = replace(plan.arms[1], label="adamw, cooldown 50%", variant_of="adamw")
    both = replace(plan, arms=(*plan.arms, variant))
    assert only_arms(both, ["*50%"]).only == ("adamw", "adamw, cooldown 50%")


@pytest.mark.parametrize("command", ["sweep", "submit"])
def test_only_names_the_methods_that_there_are(
    plan: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = [command, "small", "--out", str(tmp_path), "--only"]
    assert main([*words, "soap"]) == 2
    expected = "--only 'soap': no such method in small; it has adamw; angular_muown, kappa = 1"
    assert expected in capsys.readouterr().err
    assert main([*words, "angular_muown"]) == 2
    assert "matches whole names: did you mean '*angular_muown*'?" in capsys.readouterr().err


def test_only_settles_pairs_that_are_trained(
    plan: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """A pair of which one method is left out gets no seed and no verdict."""
    muon = replace(plan.arms[1], label="muon", spec=trained_by(plan.arms[1].spec, "muon"))
    three = replace(plan, arms=(*plan.arms, muon), ours=plan.arms[1].label)
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: three)
    words = ["sweep", "small", "--out", str(tmp_path), "--device", "cpu"]
    settled = ["--until", "settled", "--max-seeds", "3"]
    assert main([*words, "--only", "muon", *settled]) == 2
    assert "--only leaves no two methods that small compares" in capsys.readouterr().err
    assert main([*words, "--only", "muon", "--only", "*kappa*", *settled]) in (0, 75)
    out = capsys.readouterr().out
    assert "angular_muown, kappa = 1 below muon: " in out
    assert "adamw" not in out


@pytest.mark.parametrize("command", ["sweep", "submit"])
@pytest.mark.parametrize("data", [[], ["--data", "stdlib"]])
def test_the_scale_of_the_paper_needs_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, data: list[str]
) -> None:
    words = [command, "teaser", "--scale", "paper", "--out", str(tmp_path), *data]
    assert main([*words, "--passes", "inf"]) == 2
    expected = "--scale paper without a corpus would train on Python's standard library: prepare"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sweep", "submit"])
def test_missing_data_is_an_error_before_anything_is_written(
    plan: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    out, data = tmp_path / "store", tmp_path / "none"
    assert main([command, "small", "--out", str(out), "--data", str(data)]) == 2
    printed = capsys.readouterr()
    expected = f"data={data}: no such folder; make one with angular-lab prepare"
    assert printed.err == f"error: {expected}\n"
    assert not printed.out
    assert not out.exists()


def test_a_folder_without_tokens_is_an_error(
    plan: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    words = ["sweep", "small", "--out", str(tmp_path), "--data", str(tmp_path / "data")]
    assert main(words) == 2
    assert "no training tokens; make them with angular-lab prepare" in capsys.readouterr().err


@pytest.mark.timeout(2 * LIMIT)
def test_two_experiments_by_two_processes(
    plan: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With processes as a user gets them."""
    other = replace(plan, name="other", arms=plan.arms[1:], seeds=(7,))
    monkeypatch.setitem(EXPERIMENTS, "other", lambda _: other)
    monkeypatch.chdir(tmp_path)
    words = ["sweep", "small", "other", "--device", "cpu", "--processes", "2"]
    assert main(words) == 0
    printed = capfd.readouterr()
    assert "2 workers; their output is in" in printed.err
    for each in (plan, other):
        finished = Sweep(each, Path())
        assert finished.counts()[0] == finished.counts()[1]
        for path in Path("runs").iterdir():
            assert printed.err.count(f": starts {path.name}\n") == 1
    assert "worker 0: " in printed.err
    for path in Path("runs").glob("*seed7*"):
        shutil.rmtree(path)
    assert main([*words, "--budget", "0.001s"]) == 75
    expected = "other-nano: 0 of 1 trial done, 1 left; run the same command to continue"
    assert expected in capfd.readouterr().err


def test_a_dead_worker_has_its_own_exit_code(
    plan: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(workers, "_watch", lambda *_: ["worker 1 with exit code -9"])
    assert main(["sweep", "small", "--out", str(tmp_path), "--processes", "2"]) == 4
    assert "1 of 2 workers died: worker 1 with exit code -9" in capsys.readouterr().err
    assert main(["sweep", "small", "--out", str(tmp_path), "--processes", "0"]) == 2
    assert "--processes 0: it must be at least 1" in capsys.readouterr().err


def test_a_name_is_for_one_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "teaser", "aux-lr", "--out", str(tmp_path), "--name", "x"]
    assert main(words) == 2
    assert "--name x for 2 experiments" in capsys.readouterr().err


def test_show_counts_the_passes_of_a_named_run(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """300 steps of 2,048 tokens."""
    tokens = Manifest.load(data)
    assert tokens is not None
    available = tokens.splits["train"].tokens
    assert main(["show", "nano", f"data={data}"]) == 0
    expected = f"{300 * 2048 / available:.2f} passes over {available / 1e6:.1f}M training tokens"
    assert f"text         {expected}\n" in capsys.readouterr().out
    assert main(["show", "nano", "data=data/nowhere"]) == 0
    assert "data/nowhere is not prepared yet" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["sweep", "submit"])
def test_checkpoints_that_do_not_fit_on_the_disk_are_refused(
    plan: Experiment,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: plan)
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    words = [command, "small", "--out", str(tmp_path), "--data", str(data), "--device", "cpu"]
    assert main([*words, *(["--executor", "local"] if command == "submit" else [])]) == 2
    error = capsys.readouterr().err
    assert "the checkpoints of the runs that are left take" in error
    assert f"the disk of {tmp_path / 'runs'} has 1 kB: free " in error
    assert not (tmp_path / "runs").exists()
