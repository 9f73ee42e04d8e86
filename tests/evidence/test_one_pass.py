"""Text read once: the docs say what the kept runs say, and runs made twice are the same."""

import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from angular_lab.experiments.comparison import experiment
from angular_lab.experiments.definition import Experiment
from angular_lab.experiments.one_pass import (
    ANGULAR,
    DECAYED,
    DECOUPLED,
    GRIDS,
    LINEAR,
    LONG,
    SHORT,
    STEPS,
    STILL,
)
from angular_lab.run_folder import RunFolder
from angular_lab.sweeps.grid import Grid
from angular_lab.sweeps.sweep import Sweep
from tests.evidence.kept import ROOT, readme, trained, words

PLAN: Experiment = experiment("one-pass", "s")
README = (ROOT / "results" / "README.md").read_text()
METHODS = tuple(dict.fromkeys(method for method, _, _ in GRIDS))
ORDER = (SHORT, LONG, LINEAR)
EDGES = {  # best at the lowest rate
    *(f"muown, {LINEAR}", f"muown, {SHORT}", f"adamw, {SHORT}"),
    *(f"hyperball, {LINEAR}", f"hyperball, {LONG}"),
}


@dataclass(frozen=True)
class Best:
    """A line whose grid is done, at its best rate."""

    rate: float
    loss: float
    trained: float
    edge: bool


def best(report: Path) -> dict[str, Best]:
    found = {}
    for line in PLAN.lines:
        grid = grid_of(report, line.label)
        if grid.best:
            (entry,) = (e for e in grid.entries if e.value == grid.best.lr)
            rate, loss, edge = grid.best.lr, grid.best.loss, grid.best.at_edge
            found[line.label] = Best(rate, loss, trained(entry.folder), edge)
    return found


def grid_of(report: Path, label: str) -> Grid:
    sweep = Sweep(PLAN, report / "runs" / "one-pass-s", "data/one-pass")
    (line,) = (line for line in PLAN.lines if line.label == label)
    return sweep.grid(line)


def by_schedule(report: Path) -> list[str]:
    """The tables of validation and training losses, as the page shows them."""
    found = best(report)

    def row(method: str, cell: Callable[[Best], str]) -> str:
        of = [found.get(f"{method}, {schedule}") for schedule in ORDER]
        least = min((b.loss for b in of if b), default=0.0)
        cells = [(f"**{cell(b)}**" if b.loss == least else cell(b)) if b else "-" for b in of]
        return f"| {' | '.join([method, *cells])} |"

    def with_rate(b: Best) -> str:
        return f"{b.loss:.4f} at {b.rate:.4g}{' †' if b.edge else ''}"

    def table(first: str, cell: Callable[[Best], str]) -> str:
        head = f"| {' | '.join([first, *ORDER])} |"
        return "\n".join([head, "| --- | --- | --- | --- |", *(row(m, cell) for m in METHODS)])

    return [table("validation", with_rate), table("training", lambda b: f"{b.trained:.4f}")]


def test_the_tables_by_schedule(report: Path) -> None:
    for table in by_schedule(report):
        assert f"\n\n{table}\n\n" in words()


def test_which_grids_are_closed(report: Path) -> None:
    found = best(report)
    assert {label for label, b in found.items() if b.edge} == EDGES
    missing = {line.label for line in PLAN.lines} - set(found)
    assert missing == {f"hyperball, {SHORT}"}
    closed = len(found) - len(EDGES)
    assert f"Of {len(PLAN.lines)} grids {closed} are closed" in words()

    def last(label: str) -> float:
        """What the lowest rate takes off the next one."""
        low, following, *_ = grid_of(report, label).entries
        return following.loss - low.loss

    linear, short = (last(f"muown, {schedule}") for schedule in (LINEAR, SHORT))
    assert f"the last halving took {linear:.3f} and {short:.3f} off Muown" in words()
    assert 0 < last(f"adamw, {SHORT}") < 0.0001
    assert "the last step less than 0.0001 off AdamW" in words()


def test_same_schedule_for_all(report: Path) -> None:
    found = best(report)

    def below(ours: str, other: str, schedule: str) -> str:
        low, high = (found[f"{name}, {schedule}"] for name in (ours, other))
        assert low.trained < high.trained, "training losses have the same order"
        assert low.loss < high.loss
        return f"{high.loss - low.loss:.3f} below {NAMES[other]}"

    def ahead(ours: str, others: Sequence[str], schedule: str) -> str:
        return ", ".join(below(ours, name, schedule) for name in others)

    rest = ("normuon", "muon", "muown", DECOUPLED, "adamw")
    told = f"AngularMuown is lowest ({ahead(ANGULAR, (DECAYED, *rest), LONG)})"
    assert f"After a cool-down of 50% {told}" in words()
    told = f"NorMuon with weight decay is lowest, {below(DECAYED, ANGULAR, LINEAR)}, which is "
    told += ahead(ANGULAR, ("muon", "normuon", DECOUPLED, "muown", "adamw"), LINEAR)
    assert f"Where the rate falls to zero {told}" in words()
    told = f"NorMuon without it is lowest, {below('normuon', ANGULAR, SHORT)}"
    assert f"After a cool-down of 20% {told}" in words()
    ahead(ANGULAR, ("muown", DECAYED, "muon", DECOUPLED, "adamw"), SHORT)


NAMES = {
    ANGULAR: "AngularMuown",
    DECAYED: "NorMuon with weight decay",
    "normuon": "NorMuon",
    "muon": "Muon",
    "muown": "Muown",
    DECOUPLED: "MagnitudeDirection",
    "adamw": "AdamW",
}


def test_each_at_its_best_schedule(report: Path) -> None:
    losses = {label: b.loss for label, b in best(report).items()}
    of: dict[str, dict[str, float]] = {}
    for method in METHODS:
        labels = {schedule: f"{method}, {schedule}" for schedule in ORDER}
        of[method] = {key: losses[label] for key, label in labels.items() if label in losses}
    hyperball = min(of.pop("hyperball").values())
    lowest = {method: min(found, key=found.__getitem__) for method, found in of.items()}
    assert {m for m, schedule in lowest.items() if schedule == LONG} == {
        "normuon", "muown", "adamw"
    }  # fmt: skip
    assert SHORT not in lowest.values()
    least = {method: min(found.values()) for method, found in of.items()}
    assert sorted(least, key=least.__getitem__)[:2] == [DECAYED, ANGULAR]
    lead = least[ANGULAR] - least[DECAYED]
    assert f"NorMuon with weight decay is lowest, {lead:.3f} below AngularMuown" in words()
    assert f"lowest so far and AngularMuown second, {lead:.3f} above it" in words()
    assert f"NorMuon with weight decay is {lead:.3f} below AngularMuown" in readme()
    above = [least[m] - least[ANGULAR] for m in ("muon", STILL, "normuon", "muown", DECOUPLED)]
    told = "which is {:.3f} below Muon, {:.3f} below κ = 1, {:.3f} below NorMuon without decay, "
    told += "{:.3f} below Muown and {:.3f} below MagnitudeDirection"
    assert told.format(*above) in words()
    told = f"Hyperball is {hyperball - least[ANGULAR]:.3f} above AngularMuown"
    assert f"{told} and {least['adamw'] - hyperball:.3f} below AdamW" in words()
    gained = [of[m][SHORT] - least[m] for m in (ANGULAR, STILL, "normuon", DECAYED, "muon")]
    told = "takes {:.3f} off AngularMuown, {:.3f} off it with κ = 1, {:.3f} off NorMuon, "
    told += "{:.3f} off it with decay and {:.3f} off Muon"
    assert told.format(*gained) in words()
    linear, long, short = (
        of["normuon"][schedule] - of[DECAYED][schedule] for schedule in (LINEAR, LONG, SHORT)
    )
    told = f"takes {linear:.3f} off NorMuon where the rate falls to zero and {long:.3f} after a "
    told += f"cool-down of 50%; after one of 20% it adds {-short:.3f}"
    assert told in words()
    high = {m: grid_of(report, f"{m}, {LINEAR}").entries[-1].loss for m in ("normuon", DECAYED)}
    assert f"breaks down at 0.032 ({high['normuon']:.4f} and " in words()
    assert f"With decay it does not where the rate falls to zero ({high[DECAYED]:.4f})" in words()


def test_all_runs_are_of_two_commits_and_one_length(report: Path) -> None:
    folders = [path.parent for path in (report / "runs" / "one-pass-s").glob("*/spec.json")]
    contents = {folder: json.loads((folder / "spec.json").read_text()) for folder in folders}
    late = [folder for folder in folders if folder.name.startswith("hyperball")]
    (other,) = {contents[folder]["git"]["commit"] for folder in late}
    (commit,) = {contents[f]["git"]["commit"] for f in folders if f not in late}
    (data,) = {content["data"] for content in contents.values()}
    assert not any(content["git"]["changed"] for content in contents.values())
    told = f"{len(folders)} runs, of 53.2M tokens each: {len(folders) - len(late)} from commit "
    told += f"{commit[:7]}, and Hyperball's {len(late)} from {other[:7]}"
    assert told in README
    assert f'fingerprints (`"data"`) {data[:12]}' in README
    steps, batch = STEPS["s"], 32
    assert {RunFolder(folder).read_metrics()[-1]["tokens"] for folder in folders} == {steps[0] * 16384}
    assert f"{steps[-1]:,} steps read {steps[-1] * batch:,} of the 417,031 windows" in README


def test_all_of_the_text(report: Path) -> None:
    plan, root = experiment("one-pass-long", "s"), report / "runs" / "one-pass-long-s"
    sweep = Sweep(plan, root, "data/one-pass")
    grids = [sweep.grid(line) for line in plan.lines[:2]]
    ours, other = (
        (next(e for e in grid.entries if grid.best and e.value == grid.best.lr), grid.best)
        for grid in grids
    )
    assert ours[1]
    assert other[1]
    told = (
        f"AngularMuown is {other[1].loss - ours[1].loss:.3f} below NorMuon with weight decay, and "
    )
    told += f"{trained(other[0].folder) - trained(ours[0].folder):.3f} below it in training loss"
    assert told in words()
    assert (ours[1].at_edge, other[1].at_edge) == (False, True)
    specs = [json.loads(path.read_text()) for path in root.glob("*/spec.json")]
    (commit,) = {spec["git"]["commit"] for spec in specs}
    assert not any(spec["git"]["changed"] for spec in specs)
    assert len(specs) == 6
    assert f"one-pass-long has six runs of 213.0M tokens, all of them from commit {commit[:7]}" in (
        README
    )


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
