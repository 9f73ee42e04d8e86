"""Text read once: the docs say what the kept runs say, and runs made twice are the same."""

import json
import tarfile
from pathlib import Path

from angular_lab.experiment_plan import Experiment
from angular_lab.experiments import experiment
from angular_lab.one_pass import ANGULAR, DECOUPLED, LINEAR, LONG, SHORT, STEPS, STILL
from angular_lab.rundir import RunDir
from angular_lab.sweep import Sweep
from tests.evidence.kept import ROOT, trained, words

PLAN: Experiment = experiment("one-pass", "s")
README = (ROOT / "results" / "README.md").read_text()
UNFINISHED = ("muown, linear to zero",)  # not all of its rates


def best(report: Path) -> dict[str, tuple[float, float]]:
    """Validation and training loss of every line whose grid is done, at its best rate."""
    sweep = Sweep(PLAN, report / "runs" / "one-pass-s", "data/one-pass")
    found = {}
    for line in PLAN.lines:
        grid = sweep.grid(line)
        if grid.best:
            assert not grid.best.at_edge, "the best rate lies inside the grid"
            (entry,) = (e for e in grid.entries if e.value == grid.best.lr)
            found[line.label] = grid.best.loss, trained(entry.folder)
    return found


def test_same_schedule_for_all(report: Path) -> None:
    found = best(report)

    def below(ours: str, other: str, schedule: str) -> str:
        (low, low_trained), (high, high_trained) = (
            found[f"{name}, {schedule}"] for name in (ours, other)
        )
        assert low_trained < high_trained, "training losses have the same order"
        return f"{high - low:.3f} below"

    normuon, muown, rival, adamw = (
        below(ANGULAR, name, LONG) for name in ("normuon", "muown", DECOUPLED, "adamw")
    )
    told = f"({normuon} NorMuon, {muown} Muown, {rival} MagnitudeDirection, {adamw} AdamW)"
    assert f"lowest after a cool-down of 50% {told}" in words()
    normuon, rival = (below(ANGULAR, name, LINEAR) for name in ("normuon", DECOUPLED))
    told = f"({normuon} NorMuon, {rival} MagnitudeDirection)"
    assert f"where the rate falls to zero {told}" in words()
    assert f"After one of 20% NorMuon is {below('normuon', ANGULAR, SHORT)} it" in words()


def test_each_at_its_best_schedule(report: Path) -> None:
    losses = {label: loss for label, (loss, _) in best(report).items()}
    of: dict[str, dict[str, float]] = {}
    for method in (ANGULAR, STILL, "normuon", DECOUPLED):
        labels = {schedule: f"{method}, {schedule}" for schedule in (SHORT, LONG, LINEAR)}
        of[method] = {key: losses[label] for key, label in labels.items() if label in losses}
    lowest = {method: min(found, key=found.__getitem__) for method, found in of.items()}
    assert lowest == {ANGULAR: LINEAR, STILL: LINEAR, "normuon": LONG, DECOUPLED: LINEAR}
    ours = min(of[ANGULAR].values())
    still, normuon, rival = (
        min(of[name].values()) - ours for name in (STILL, "normuon", DECOUPLED)
    )
    told = f"it is {still:.3f} below κ = 1, {normuon:.3f} below NorMuon and {rival:.3f} below Magn"
    assert told in words()
    gained = [of[m][SHORT] - min(of[m].values()) for m in (ANGULAR, STILL, "normuon")]
    told = "takes {:.3f} off AngularMuown, {:.3f} off it with κ = 1 and {:.3f} off NorMuon"
    assert told.format(*gained) in words()
    missing = {line.label for line in PLAN.lines} - set(losses)
    for label in (f"{DECOUPLED}, {SHORT}", f"muown, {SHORT}", f"adamw, {LINEAR}", *UNFINISHED):
        assert label in missing


def test_all_runs_are_of_one_commit_and_one_length(report: Path) -> None:
    folders = [path.parent for path in (report / "runs" / "one-pass-s").glob("*/spec.json")]
    contents = [json.loads((folder / "spec.json").read_text()) for folder in folders]
    (commit,) = {content["git"]["commit"] for content in contents}
    (data,) = {content["data"] for content in contents}
    assert not any(content["git"]["changed"] for content in contents)
    assert (
        f"{len(folders)} runs, of 53.2M tokens each, all of them from commit {commit[:7]}" in README
    )
    assert f'fingerprints (`"data"`) {data[:12]}' in README
    steps, batch = STEPS["s"], 32
    assert {RunDir(folder).read_metrics()[-1]["tokens"] for folder in folders} == {steps[0] * 16384}
    assert f"{steps[-1]:,} steps read {steps[-1] * batch:,} of the 417,031 windows" in README


def test_runs_made_twice_agree_to_the_bit(report: Path, tmp_path: Path) -> None:
    with tarfile.open(ROOT / "results" / "again" / "one-pass.tar.xz") as content:
        content.extractall(tmp_path, filter="data")
    steps = []
    for path in tmp_path.glob("one-pass-s/*/metrics.jsonl"):
        again = report / "runs" / "one-pass-s" / path.parent.name / path.name
        broken_off = path.read_text()
        assert broken_off.endswith("\n")
        assert again.read_text().startswith(broken_off)
        steps.append(json.loads(broken_off.splitlines()[-1])["step"])
    assert len(steps) == 5
    assert (
        f"Five of these runs were broken off after {min(steps):,} to {max(steps):,} steps"
        in words()
    )
