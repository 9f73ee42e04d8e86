"""The kept archives make one complete store, which `angular-lab sweep` and `report` can read."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from angular_lab.experiments.comparison import experiment
from angular_lab.run_folder import RUNS, RunFolder
from angular_lab.sweeps.sweep_file import SWEEPS, SweepRecord
from angular_lab.sweeps.trials import make_trial
from evidence.kept import ARCHIVES, RESULTS, unpack

# Fingerprints of the corpora, see results/README.md: of text read twice, and by experiment.
MIXTURE = "fb88e2d2a62a"
OTHERS = {
    "one-pass*": "702af5e354cb",
    "trials": "702af5e354cb",
    "storage": "b4ec63ca3369",
    "short-runs": "b67fcbed1e41",
}
# Variants whose options the library no longer has.
REMOVED = {"column gains", "exact angle", "row second moment", "tangent momentum"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    for archive in ARCHIVES:
        unpack(archive, folder)
    return folder


@pytest.fixture(scope="module")
def sweeps(store: Path) -> list[SweepRecord]:
    return [SweepRecord.read(path) for path in sorted((store / SWEEPS).iterdir())]


@pytest.fixture(scope="module")
def runs(store: Path) -> list[RunFolder]:
    return [RunFolder(path) for path in sorted((store / RUNS).iterdir())]


def test_every_archive_holds_the_sweep_that_it_is_named_after(sweeps: list[SweepRecord]) -> None:
    names = {(archive.name.removesuffix(".tar.xz"), archive.parent.name) for archive in ARCHIVES}
    assert {(sweep.experiment, sweep.scale) for sweep in sweeps} == names


def test_sweeps_refer_to_all_kept_runs_and_to_no_others(
    sweeps: list[SweepRecord], runs: list[RunFolder]
) -> None:
    referenced = {name for sweep in sweeps for trial in sweep.trials for name in trial.all_runs}
    assert referenced == {run.path.name for run in runs}


def test_runs_are_finished_and_have_their_parents(runs: list[RunFolder]) -> None:
    names = {run.path.name for run in runs}
    for run in runs:
        spec = run.read_spec()
        assert run.done
        assert run.read_metrics()[-1].step == spec.steps
        assert spec.parent is None or spec.parent in names


def test_a_sweep_recognizes_runs_by_the_digest_in_their_names(runs: list[RunFolder]) -> None:
    """Others have their settings in common with one that comes first, and a number at the end."""
    names = {run.path.name for run in runs}
    numbered = 0
    for run in runs:
        name = run.info.spec.folder_name(run.info.data)
        assert name in names
        if run.path.name != name:
            assert re.fullmatch(re.escape(name) + "-[23]", run.path.name)
            numbered += 1
    assert numbered == 8


def test_a_sweep_would_run_no_kept_trial_again(store: Path, sweeps: list[SweepRecord]) -> None:
    unknown = set()
    for sweep in sweeps:
        plan = experiment(sweep.experiment, sweep.scale)
        arms = {arm.label: arm for arm in plan.arms}
        unknown |= {trial.arm for trial in sweep.trials if trial.arm not in arms}
        for trial in (x for x in sweep.trials if x.arm in arms):
            arm = arms[trial.arm]
            assert make_trial(plan, arm, trial.value, trial.seed, sweep.data, store / RUNS).done, (
                f"{sweep.experiment}: {trial}"
            )
    assert unknown == REMOVED


def test_runs_of_a_sweep_have_its_data(sweeps: list[SweepRecord], runs: list[RunFolder]) -> None:
    data = {run.path.name: run.info.data for run in runs}
    for sweep in sweeps:
        other = (data for name, data in OTHERS.items() if fnmatchcase(sweep.experiment, name))
        assert sweep.data.startswith(next(other, MIXTURE))
        assert {data[name] for trial in sweep.trials for name in trial.all_runs} == {sweep.data}


def test_interrupted_runs_were_finished_later(store: Path, tmp_path: Path) -> None:
    unpack(RESULTS / "again" / "one-pass.tar.xz", tmp_path)
    interrupted = [RunFolder(path) for path in (tmp_path / RUNS).iterdir()]
    assert len(interrupted) == 5
    for run in interrupted:
        assert not run.done
        assert RunFolder(store / RUNS / run.info.spec.folder_name(run.info.data)).done
