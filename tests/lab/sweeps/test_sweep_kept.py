"""A sweep does not hide what is finished: whoever comes with another plan is told before."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.cli.main import main
from angular_lab.data.prepare import prepare
from angular_lab.data.tokenizer import train_tokenizer
from angular_lab.experiments.comparison import EXPERIMENTS
from angular_lab.experiments.definition import Experiment
from angular_lab.run_folder import RunDir
from angular_lab.sweeps import workers as sweep_workers
from angular_lab.sweeps.sweep import Sweep, run_together
from angular_lab.sweeps.workers import run_in_processes
from tests.lab.sweeps.sweeps import manifest, small


@pytest.fixture(scope="module")
def made(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs, all finished."""
    root = tmp_path_factory.mktemp("runs") / "small-nano"
    Sweep(_plan(data), root, device="cpu").run()
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / made.name)
    return tmp_path / made.name


def _plan(data: Path) -> Experiment:
    return small(data, horizons=(4,), seeds=(0,))


def _changed(plan: Experiment) -> Experiment:
    """Its second line is another run than it was."""
    first, second = plan.lines
    return replace(plan, lines=(first, replace(second, spec=replace(second.spec, batch=8))))


def _all_below(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


def _alone(sweep: Sweep) -> None:
    sweep.run()


def _by_two(sweep: Sweep) -> None:
    run_in_processes([sweep], 2)


@pytest.mark.parametrize("run", [_alone, _by_two])
def test_other_data_would_hide_them(
    root: Path, data: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Sweep], None]
) -> None:
    monkeypatch.setattr(sweep_workers, "_watch", lambda *_: pytest.fail("workers were started"))
    other = root.parent / "copy"
    shutil.copytree(data, other)
    before = _all_below(root)
    wanted = (
        rf"{root}: .*leave out 4 finished runs, such as adamw-lr0.001-seed0-\w+; made with "
        rf"data={data}, and this sweep has data={other}: give --data {data}, or another --out"
    )
    with pytest.raises(ValueError, match=wanted):
        run(Sweep(_plan(data), root, str(other), "cpu"))
    assert _all_below(root) == before, "not even a lock is written"


def test_the_command_without_the_data_that_was_given(
    root: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it was: 15 runs gone from the manifest of a sweep, and new ones begun on other text."""
    plan = _plan(Path("stdlib"))
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: plan)
    words = ["small", "--out", str(root), "--device", "cpu"]
    for command in (["sweep"], ["submit", "--executor", "local"], ["submit", "--dry-run"]):
        assert main([*command, *words]) == 2
        told = capsys.readouterr()
        assert f"and this sweep has data=stdlib: give --data {data}, or another --out" in told.err
        assert not told.out
    assert main(["sweep", *words, "--data", str(data)]) == 0


def test_a_plan_that_has_changed(root: Path, data: Path) -> None:
    before = (root / "sweep.json").read_bytes()
    wanted = (
        r"leave out 1 finished run, angular-muown--kappa---1-lr0.02-seed0-\w+; the plan has "
        r"changed since: use the version of the package that had it, or give another --out"
    )
    with pytest.raises(ValueError, match=wanted):
        Sweep(_changed(_plan(data)), root, device="cpu").run()
    assert (root / "sweep.json").read_bytes() == before


def _over(plan: Experiment, values: tuple[float, ...]) -> Experiment:
    return replace(plan, lines=(replace(plan.lines[0], values=values), *plan.lines[1:]))


@pytest.mark.parametrize("values", [(1e-3, 4e-3), (2e-3, 8e-3)], ids=["inside", "both ends"])
def test_a_value_that_the_grid_has_no_more(
    root: Path, data: Path, values: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match=r"leave out [12] finished runs?,.* adamw-lr0.00[12]-"):
        Sweep(_over(_plan(data), values), root, device="cpu").run()


def test_a_grid_that_moved_lists_what_it_had(root: Path, data: Path) -> None:
    """A value beyond its edge is one that it could have grown by."""
    sweep = Sweep(_over(_plan(data), (2e-3, 4e-3, 8e-3)), root, device="cpu")
    sweep.check()
    sweep.write()
    assert {e["value"] for e in manifest(root)["entries"]} == {1e-3, 2e-3, 4e-3, 0.02}
    sweep.run()
    assert {e["value"] for e in manifest(root)["entries"]} == {1e-3, 2e-3, 4e-3, 8e-3, 0.02}


def test_a_path_by_another_spelling(root: Path, data: Path) -> None:
    for spelling in (f"{data}/", f"{data.parent}/./{data.name}"):
        sweep = Sweep(_plan(data), root, spelling, "cpu")
        sweep.check()
        assert sweep.counts() == (4, 4)


def test_trunks_may_go(data: Path, tmp_path: Path) -> None:
    """They hold the checkpoints; the results are in the cool-downs."""
    plan, root = small(data, seeds=(0,)), tmp_path / "runs"
    Sweep(plan, root, device="cpu").run()
    before = (root / "sweep.json").read_bytes()
    for path in root.glob("*-????????"):
        shutil.rmtree(path)
    Sweep(plan, root, device="cpu").run()
    assert (root / "sweep.json").read_bytes() == before
    with pytest.raises(ValueError, match=r"leave out 1 finished run, angular-muown--kappa---1-lr"):
        Sweep(_changed(plan), root, device="cpu").check()


def test_a_value_that_was_added_stays_chosen_without_its_trunk(data: Path, tmp_path: Path) -> None:
    plan = small(data, seeds=(0,))
    plan = replace(plan, lines=(replace(plan.lines[0], values=(1e-5, 2e-5)),))
    Sweep(plan, tmp_path, device="cpu").run(extend=1)
    before = Sweep(plan, tmp_path, device="cpu").chosen
    assert [best.lr for best in before.values()] == [4e-5]
    for path in tmp_path.glob("*-????????"):
        shutil.rmtree(path)
    assert Sweep(plan, tmp_path, device="cpu").chosen == before


def test_a_text_that_is_gone_is_not_called_a_changed_plan(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it nobody knows the model's vocabulary, and so the names of its runs."""
    texts = [f"document {i} of a text with more kinds of tokens than bytes" for i in range(400)]
    text = tmp_path / "text"
    prepare(texts, train_tokenizer(texts, 300), text, val_fraction=0.2, progress=False)
    monkeypatch.setitem(EXPERIMENTS, "small", lambda _: _plan(data))
    words = ["sweep", "small", "--out", str(tmp_path / "runs"), "--data", str(text)]
    assert main([*words, "--device", "cpu"]) == 0
    shutil.rmtree(text)
    assert main(words) == 2
    assert f"data={text}: no such folder" in capsys.readouterr().err


def test_a_file_is_no_folder(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out .*file: it is a file"):
        Sweep(_plan(data), tmp_path / "file", device="cpu").run()


def test_another_experiments_folder(root: Path, data: Path) -> None:
    plan = replace(_plan(data), name="other", lines=_plan(data).lines[:1])
    with pytest.raises(ValueError, match="made by small, scale nano: give another --out"):
        Sweep(plan, root, device="cpu").run()


@pytest.mark.parametrize("horizons", [(4,), (4, 8)])
def test_a_diverged_run_is_a_finished_one(
    data: Path, tmp_path: Path, horizons: tuple[int, ...]
) -> None:
    """Of several horizons it leaves the trunk only, and no spec where it was never set up."""
    plan = replace(_plan(data), horizons=horizons, lines=_plan(data).lines[1:])
    sweep = Sweep(plan, tmp_path, device="cpu")
    (entry,) = sweep.pending()
    entry.folder.mkdir()
    (entry.folder / "DIVERGED").touch()
    sweep.run()
    assert manifest(tmp_path)["entries"][0]["status"] == "diverged"
    with pytest.raises(ValueError, match=f"1 finished run, {entry.folder.name}; the plan has"):
        Sweep(replace(plan, horizons=(9,)), tmp_path, device="cpu").run()


def test_none_is_written_where_one_is_refused(root: Path, data: Path) -> None:
    fresh = Sweep(replace(_plan(data), name="fresh"), root.parent / "fresh", device="cpu")
    with pytest.raises(ValueError, match="leave out 1 finished run"):
        run_together([fresh, Sweep(_changed(_plan(data)), root, device="cpu")])
    assert not fresh.root.exists()


def test_what_was_never_finished_or_is_gone_holds_nobody_up(root: Path, data: Path) -> None:
    (gone,) = root.glob("angular*")
    shutil.rmtree(gone)
    Sweep(_changed(_plan(data)), root, device="cpu").run()
    (other,) = root.glob("angular*")
    (other / "DONE").unlink()
    Sweep(_plan(data), root, device="cpu").run()
    assert len(manifest(root)["entries"]) == 4


def test_an_extended_grid_goes_on_without_one_of_its_values(data: Path, tmp_path: Path) -> None:
    """Which is to be made again."""
    plan = _plan(data)
    plan = replace(plan, lines=(replace(plan.lines[0], values=(1e-5, 2e-5)),), seeds=(0, 1))
    Sweep(plan, tmp_path, device="cpu").run(extend=1)
    before = (tmp_path / "sweep.json").read_bytes()
    (first,) = tmp_path.glob("adamw-lr1e-05-seed0-*")
    shutil.rmtree(first)
    Sweep(plan, tmp_path, device="cpu").write()
    assert len(manifest(tmp_path)["entries"]) == 3, "what was added is listed all the while"
    Sweep(plan, tmp_path, device="cpu").run()
    assert (tmp_path / "sweep.json").read_bytes() == before


@pytest.mark.parametrize("text", ["{", "{}", '{"entries": [{"status": "done"}]}', "[1]"])
def test_a_damaged_manifest_is_written_anew(root: Path, data: Path, text: str) -> None:
    whole = (root / "sweep.json").read_bytes()
    (root / "sweep.json").write_text(text)
    Sweep(_plan(data), root, device="cpu").run()
    assert (root / "sweep.json").read_bytes() == whole


def test_a_spec_of_another_version(root: Path, data: Path) -> None:
    """That cannot be read is no reason to say something else than what is the matter."""
    path = next(root.glob("angular*")) / "spec.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "spec": {**content["spec"], "unheard_of": 1}}))
    with pytest.raises(ValueError, match=r"leave out 1 finished run, .*the plan has changed"):
        Sweep(_changed(_plan(data)), root, device="cpu").run()
    assert RunDir(path.parent).done
