"""Leads, averages and speed: the docs say what the kept runs and files say."""

import json
from pathlib import Path
from typing import Any

import pytest

from angular_lab.experiments.comparison import experiment
from angular_lab.experiments.definition import SETTLED as BEST
from angular_lab.run_folder import RunFolder, trunk_name
from angular_lab.sweeps.sweep import Sweep
from tests.evidence.kept import (
    OURS,
    ROOT,
    Losses,
    cells,
    is_part_of,
    mean,
    readme,
    rows_of,
    tables_in,
    words,
)
from tests.evidence.test_one_pass import by_schedule

AGAIN = "run `make evidence` and copy what it made"
ONE_PASS = "one-pass"  # and one-pass-long: of another text, and from a commit
SWEEPS = sorted(p.name.partition(".")[0] for p in (ROOT / "results" / "s").glob("*.tar.xz"))


def throughput() -> dict[str, dict[str, Any]]:
    content = json.loads((ROOT / "results" / "throughput_optimizers_h200.json").read_text())
    return {row["optimizer"]: row for row in content["results"]}


def speeds() -> str:
    """As the page shows them."""
    found = throughput()
    lines = [
        "| optimizer | tokens/s | ms per step | of it the optimizer | time relative to "
        "angular_muown |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in found.items():
        share, relative = row["optimizer_share"], row["step_ms"] / found[OURS]["step_ms"]
        lines.append(
            f"| {name} | {row['tokens_per_second']:,.0f} | {row['step_ms']:.2f} | "
            f"{100 * share:.1f}% | {relative:.3f}× |"
        )
    return "\n".join(lines)


def test_tables_and_figures_in_the_docs_are_the_reports(report: Path) -> None:
    files = (report / "tables").glob("*.md")
    made = [rows_of(table) for path in files for table in tables_in(path.read_text())]
    made += map(rows_of, (speeds(), *by_schedule(report)))
    shown = tables_in(words())
    assert len(shown) >= 16
    for table in shown:
        found = any(is_part_of(rows_of(table), whole) for whole in made)
        assert found, f"{AGAIN}: {table.splitlines()[0]}"
    for figure in (ROOT / "docs" / "figures" / "evidence").iterdir():
        assert figure.read_bytes() == (report / "figures" / figure.name).read_bytes(), AGAIN


# Variants whose options the library no longer has.
REMOVED = {"column-gains", "exact-angle", "row-second-moment", "tangent-momentum"}


@pytest.mark.parametrize("name", SWEEPS)
def test_the_command_goes_on_with_what_was_kept(
    report: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = report / "runs" / f"{name}-s"
    data = "data/one-pass" if name.startswith(ONE_PASS) else "data/mixture"
    monkeypatch.chdir(tmp_path)
    Path(data).mkdir(parents=True)  # a sweep with runs to make asks for its text
    kept = json.loads((root / "sweep.json").read_text())["entries"]
    sweep = Sweep(experiment(name, "s"), root, data)
    known = {entry.folder.name for entry in sweep.entries}
    done = {trunk_name(entry) for entry in kept if entry["status"] == "done"}
    assert done
    removed = {folder.partition("-lr")[0] for folder in done - known}
    assert removed == (REMOVED if name == "leads" else set())
    if removed:  # it is not rewritten without them
        with pytest.raises(ValueError, match=f"{len(removed)} finished run"):
            sweep.check()
        return
    sweep.check()
    with pytest.raises(ValueError, match=rf"{len(done)} finished run.*: give --data {data}, or"):
        Sweep(experiment(name, "s"), root).check()


def test_the_commits_that_runs_were_made_on(report: Path) -> None:
    page = (ROOT / "results" / "README.md").read_text()
    paths = (path for path in (report / "runs").glob("*/*/spec.json") if ONE_PASS not in str(path))
    commits = {json.loads(path.read_text())["git"]["commit"][:7] for path in paths}
    told = page.partition("made on top of, one of ")[2].partition(";")[0]
    assert set(told.replace(" and ", ", ").split(", ")) == commits
    assert len(commits) == 6
    assert "on top of six commits" in words()


def test_leads_in_words(report: Path) -> None:
    found = {
        row.pop("line"): {name: float(value) for name, value in row.items()}
        for row in cells(report, "leads-s-read-out")
    }
    gains = {name: row["weights"] - row["average, 549"] for name, row in found.items()}
    slow = gains.pop("kappa half as fast")
    assert f"by {min(gains.values()):.3f} to {max(gains.values()):.3f}; only where" in words()
    assert f"only where κ falls half as fast it is {slow:.3f}" in words()
    published = found.pop("as published")["weights"]
    above = {name: row["weights"] - published for name, row in found.items()}
    assert f"Column gains are {-above.pop('column gains'):.3f} below" in words()
    assert f"all others are {min(above.values()):.3f} to {max(above.values()):.3f} above" in words()
    log = (ROOT / "docs" / "log.md").read_text()
    for name, before in LOGGED.items():
        assert f"{before}{found.pop(name)['weights']:.4f}" in log
    assert not found
    ends = {r["line"]: float(r["22.5M tokens"]) for r in cells(report, "constrained-s-runs")}
    lead, plain = ends["constrained polar factor"], ends["as published"]
    assert f"horizon: {lead - plain:.3f} above the method as published" in words()
    assert f"{lead:.4f} after 22.5M tokens, where the method as published has {plain:.4f}" in log
    (beside,) = (r for r in cells(report, "constrained-s-runs") if r["line"] != "as published")
    usual = next(r for r in cells(report, "aux-lr-s-runs") if r["line"] == OURS)
    rates = (f"{float(row['tokens/s']) / 1e3:.0f} thousand" for row in (beside, usual))
    assert f"trained {next(rates)} tokens/s beside four others, of which" in log
    assert f"as published, trained {next(rates)}. Not kept." in log
    assert "Of twelve changes beyond the paper and one pair of them" in readme()
    assert len(LOGGED) + 1 == 13


LOGGED = {  # what stands before a lead's number
    "log radius": "alone they came out at ",
    "aux rate x 0.3": "3.5999 and ",
    "radius rate x 0.2": "row lengths at 0.2 lr: ",
    "tangent momentum": "(`tangent_momentum`), ",
    "exact angle": "(`exact_angle`), ",
    "row second moment": "(`row_beta=0.95`), ",
    "column gains": "column gains, ",
    "kappa half as fast": "at half and at twice the speed: ",
    "kappa twice as fast": "3.6217 and ",
    "log radius, aux rate x 0.3": "together at ",
    "kappa of degree 0.6": "of degree 0.6 it came out at ",
    "kappa of degree 0.5": "of degree 0.5 at ",
}


def averages(report: Path, window: str = "0.1") -> dict[str, dict[int, tuple[float, float]]]:
    """Loss at the last horizon of the weights, and of an average, by line and seed."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    root = report / "runs" / "average-s"
    for entry in json.loads((root / "sweep.json").read_text())["entries"]:
        last = RunFolder(root / entry["folders"]["5493"]).read_metrics()[-1]
        pair = last["val_loss"], last[f"val_loss_averaged_{window}"]
        found.setdefault(entry["label"], {})[entry["seed"]] = pair
    return found


def test_averages_in_words(report: Path, losses: Losses) -> None:
    found = averages(report)
    gains = {name: {s: w - a for s, (w, a) in runs.items()} for name, runs in found.items()}
    ours = [gains[OURS][seed] for seed in range(3)]
    assert "({:.4f}, {:.4f} and {:.4f})".format(*ours) in words()
    assert min(ours) > 0.01  # "the goal is reached"
    others = {name: mean(gains[name].values()) for name in ("normuon", "adamw")}
    assert f"takes {mean(ours):.3f} off AngularMuown's loss at 90M tokens, on every" in words()
    assert "NorMuon gains {normuon:.3f}, AdamW {adamw:.3f}".format(**others) in words()
    below = {n: mean(found[n][s][1] - found[OURS][s][1] for s in (1, 2)) for n in others}
    told = "{normuon:.3f} below NorMuon and {adamw:.3f} below AdamW, about".format(**below)
    assert f"on seeds 1 and 2, AngularMuown is {told}" in words()
    rows = cells(report, "average-s-speed-up-averaged")
    faster = {row["over"]: float(row["in tokens"]) for row in rows if row["window"] == "0.1"}
    assert "the speed-up is {normuon:.2f} and {adamw:.2f}".format(**faster) in words()
    fifth = mean(a for _, a in averages(report, "0.2")[OURS].values())
    tenth = mean(a for _, a in found[OURS].values())
    assert f"a fifth is {fifth - tenth:.3f} worse" in words()
    two_fifths = averages(report, "0.4")[OURS].values()
    assert min(average - weights for weights, average in two_fifths) > 0
    longer = mean(losses[OURS, BEST[OURS], seed, "90M, longer cool-down"] for seed in "12")
    tenth = mean(found[OURS][seed][1] for seed in (1, 2))
    assert f"the weights have {longer:.4f} after one of 20%, the average {tenth:.4f}" in words()
    text = f"takes off another {mean(ours):.3f} on each of three seeds"
    assert text in readme()
    assert "NorMuon gains {normuon:.3f} by one and AdamW {adamw:.3f}".format(**others) in readme()


def test_the_closest_line_leads_half_way(report: Path) -> None:
    ahead = {
        row["window"]: float(row["mean difference"])
        for row in cells(report, "average-s-pairs-averaged")
        if "normuon" in row["claim"] and float(row["tokens"]) < 46e6
    }
    told = f"NorMuon is ahead by {ahead['0.1']:.3f}, and by {ahead['0.2']:.3f} where both"
    assert told in words()


def test_without_a_cool_down(report: Path) -> None:
    rows = {
        (row["line"], row["read out"], row["tokens"], row["window"]): row
        for row in cells(report, "average-s-average")
    }
    full = next(r for key, r in rows.items() if key[:2] == (OURS, "full rate") and key[3] == "0.1")
    cooled = next(r for key, r in rows.items() if key[0] == OURS and float(key[2]) > 89e6)
    told = f"has {float(full['average']):.4f} at 81M tokens (full rate, three seeds), where the"
    assert f"{told} cooled-down weights have {float(cooled['weights']):.4f} at 90M" in words()


def test_speed_in_words(report: Path) -> None:
    found = throughput()
    rate = {name: row["tokens_per_second"] for name, row in found.items()}
    muons = {name: row for name, row in found.items() if name != "adamw"}
    assert max(rate[n] for n in muons) < 1.01 * min(rate[n] for n in muons)  # "equally fast"
    (share,) = {f"{100 * row['optimizer_share']:.0f}%" for row in muons.values()}
    assert f"they are {share} of the others' here" in words()
    (over,) = (r for r in cells(report, "teaser-s-speed-up") if r["over"] == "adamw")
    in_tokens = float(over["in tokens"])
    in_time = in_tokens * rate[OURS] / rate["adamw"]
    assert f"over AdamW is therefore {in_time:.2f} instead of {in_tokens:.2f}" in words()
    told = (
        f"AdamW trains {rate['adamw'] / 1e6:.2f}M tokens/s and AngularMuown {rate[OURS] / 1e6:.2f}M"
    )
    assert f"it is {in_tokens:.2f} in tokens and {in_time:.2f} in wall-clock: {told}" in readme()
