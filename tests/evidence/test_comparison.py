"""What README and docs say of the comparison is what the kept runs say."""

import json
from math import sqrt
from pathlib import Path

from angular_lab.experiments.definition import SETTLED as BEST
from angular_lab.run_folder import RunFolder
from tests.evidence.kept import DOCS, OURS, ROOT, Losses, cells, readme, tables_in, trained

LATEST = ("90M", "90M, longer cool-down")


def behind(losses: Losses, name: str, seed: str, tokens: str) -> float:
    return losses[name, BEST[name], seed, tokens] - losses[OURS, BEST[OURS], seed, tokens]


def listed(values: dict[str, float]) -> str:
    """As the page has them: the last one by "and"."""
    return "{normuon:.3f}, {muown:.3f}, {muon:.3f} and {adamw:.3f}".format(**values)


def test_the_comparison_in_words(report: Path, losses: Losses) -> None:
    pairs = {
        (row["claim"].split()[-1], round(float(row["tokens"]) / 1e6, 0)): row
        for row in cells(report, "teaser-s-pairs")
    }
    page = DOCS.read_text()
    late = {name: -float(pairs[name, 90]["mean difference"]) for name in BEST if name != OURS}
    assert (
        f"{late['normuon']:.3f} below NorMuon, {late['muown']:.3f} below Muown, "
        f"{late['muon']:.3f} below Muon and {late['adamw']:.3f} below AdamW"
    ) in page
    assert (
        f"and {listed({name: behind(losses, name, '0', '90M') for name in late})} on seed 0" in page
    )
    every = [behind(losses, name, seed, t) for name in late for seed in "012" for t in LATEST]
    assert min(every) > 0.005  # "lowest on every seed", "the goal is reached"
    early = {name: float(pairs[name, 22]["mean difference"]) for name in ("muown", "normuon")}
    assert (
        f"Muown is {early['muown']:.3f} ahead of AngularMuown and NorMuon {early['normuon']:.3f}"
    ) in page
    assert all(behind(losses, name, seed, "22.5M") < 0 for name in early for seed in "12")
    assert pairs["muown", 45]["verdict"] == "inconclusive"  # "level"
    half_way = [-behind(losses, "normuon", seed, "45M") for seed in "012"]
    told = f"NorMuon is ahead by {min(half_way):.3f} to {max(half_way):.3f} on three seeds"
    assert told in page
    assert told in readme()


def test_the_speed_up_in_words(report: Path) -> None:
    found = {row["over"]: row for row in cells(report, "teaser-s-speed-up")}
    by_seed = {
        name: [v.split(": ")[1] for v in row["by seed"].split(", ")] for name, row in found.items()
    }
    page = DOCS.read_text()
    assert f"{' and '.join(by_seed['adamw'])} on the two seeds (paper: 2.15)" in page
    assert len(set(by_seed["normuon"])) == 1
    low, high = sorted(by_seed["muown"])
    assert f"over NorMuon it is {by_seed['normuon'][0]}, over Muown {low} to {high}" in page


def test_the_table_of_the_readme(report: Path, losses: Losses) -> None:
    found = {row["over"]: row for row in cells(report, "teaser-s-speed-up")}
    late = {
        row["claim"].split()[-1]: row
        for row in cells(report, "teaser-s-pairs")
        if round(float(row["tokens"]) / 1e6) == 90
    }
    (table,) = (t for t in tables_in((ROOT / "README.md").read_text()) if "seed 1" in t)
    titles = {"normuon": "NorMuon", "muown": "Muown", "muon": "Muon", "adamw": "AdamW"}
    assert f"| AngularMuown | {_two(losses, OURS)} | | |" in table
    for name, title in titles.items():
        mean = sum(behind(losses, name, seed, "90M") for seed in "12") / 2
        high, low = (-float(end) for end in late[name]["95% interval"].split(" to "))
        times = f"{float(found[name]['in tokens']):.2f} ({found[name]['95% interval']})"
        above = f"{mean:.3f} ({low:.3f} to {high:.3f})"
        assert f"\n| {title} | {_two(losses, name)} | {above} | {times} |" in table
    means = [sum(float(v) for v in line.split(" | ")[1:3]) for line in table.splitlines()[2:]]
    assert means == sorted(means)  # with those of test_rivals.py


def _two(losses: Losses, name: str) -> str:
    return " | ".join(f"{losses[name, BEST[name], seed, '90M']:.4f}" for seed in "12")


def test_differences_between_rates(losses: Losses) -> None:
    def cost(name: str, factor: float) -> str:
        best = BEST[name]
        return f"{losses[name, factor * best, '0', '90M'] - losses[name, best, '0', '90M']:.3f}"

    both = {name: f"{cost(name, 0.5)} and {cost(name, 2)}" for name in BEST}
    told = (
        f"Muown loses {both['muown']}, NorMuon {both['normuon']}, Muon {both['muon']}, AdamW "
        f"{both['adamw']}"
    )
    assert told in DOCS.read_text()
    assert f"cost AngularMuown {both[OURS]}, on seed 0. At half its rate" in DOCS.read_text()
    others = [losses["normuon", rate, "0", "90M"] for rate in (4e-3, 8e-3, 1.6e-2)]
    half, twice = (losses[OURS, factor * BEST[OURS], "0", "90M"] for factor in (0.5, 2))
    assert min(half, twice) > max(others)

    def below(name: str, loss: float) -> list[bool]:
        """At which rates that line is."""
        keys = [key for key in losses if key[0] == name and key[2:] == ("0", "90M")]
        return [losses[key] < loss for key in keys]

    assert [sum(below("muown", loss)) for loss in (half, twice)] == [3, 5]
    assert [sum(below("muon", loss)) for loss in (half, twice)] == [0, 2]
    assert [len(below(name, 0)) for name in ("muown", "muon")] == [5, 5]
    assert f"0.04 cost {cost(OURS, 2)} nat" in (ROOT / "docs" / "tuning.md").read_text()


def test_the_rates_that_ablations_hold_are_what_the_comparison_chose(report: Path) -> None:
    manifest = json.loads((report / "runs" / "teaser-s" / "sweep.json").read_text())
    assert {name: best["value"] for name, best in manifest["chosen"].items()} == BEST
    assert not any(best["edge"] for best in manifest["chosen"].values())


def test_muons_plateau(report: Path) -> None:
    (trunk,) = (report / "runs" / "teaser-s").glob("muon-lr0.005-seed0-????????")
    lines = [line for line in RunFolder(trunk).read_metrics() if "angle_mean" in line]
    angles = {line["tokens"] / 1e6: line["angle_mean"] for line in lines}
    (begun, first), *_, (_, last) = ((t, a) for t, a in angles.items() if t > 30)
    page = DOCS.read_text()
    assert begun < 31
    assert f"from 30M to 80M tokens it falls by {100 * (1 - last / first):.0f}%" in page
    short = {t: a for t, a in angles.items() if t < 20}
    assert min(short.values()) == short[max(short)] > 1.1 * last  # "still falling"
    assert f"the plateau is at {last:.4f} instead of √(2ηλ) = {sqrt(2 * 0.005 * 0.1):.3f}" in page
    assert f"= 39 steps, which would bring the plateau down by √39 to {sqrt(1e-3 / 39):.4f}" in page


def test_training_losses(report: Path) -> None:
    """What the lead over NorMuon is not."""

    def behind_by(sweep: str, name: str, seed: str, end: str) -> float:
        ends = {}
        for other in (OURS, name):
            pattern = f"{other.replace('_', '-')}-lr{BEST[other]:g}-seed{seed}-????????{end}"
            (folder,) = (report / "runs" / sweep).glob(pattern)
            ends[other] = trained(folder)
        return ends[name] - ends[OURS]

    ahead = [-behind_by("closest-s", "normuon", seed, "") for seed in "1234"]
    assert min(ahead) > 0
    told = f"NorMuon's training loss is {min(ahead):.3f} to {max(ahead):.3f} below AngularMuown's"
    assert told in DOCS.read_text()
    first = behind_by("teaser-s", "normuon", "0", "-to5493")
    assert f"on seed 0, which chose the rates, it is {first:.3f} above" in DOCS.read_text()
    told = f"training loss is {min(ahead):.3f} to {max(ahead):.3f} lower on seeds 1 to 4"
    assert f"{told} ({first:.3f} higher on seed 0)" in readme()
    assert all(behind_by("teaser-s", "normuon", seed, "-to2747") < 0 for seed in "012")
    spans = []
    for name in ("muown", "muon", "adamw"):
        gaps = [behind_by("teaser-s", name, seed, "-to5493") for seed in "012"]
        spans.append(f"{min(gaps):.3f} to {max(gaps):.3f}")
    assert "by {}, {} and {} on seeds 0 to 2".format(*spans) in DOCS.read_text()


def test_a_longer_cool_down(report: Path) -> None:
    gains = [-float(r["longer - normal"]) for r in cells(report, "teaser-s-cool-downs")]
    assert f"{min(gains):.3f} to {max(gains):.3f} better" in DOCS.read_text()
    told = f"20% were {min(gains):.3f} to {max(gains):.3f} nat better for every optimizer"
    assert told in (ROOT / "docs" / "tuning.md").read_text()


def test_the_closest_pair(report: Path, losses: Losses) -> None:
    found: dict[str, dict[str, float]] = {"angular_muown": {}, "normuon": {}}
    for row in cells(report, "closest-s-runs"):
        found[row["line"]][row["seed"]] = float(row["90M tokens"])
    ours, other = found[OURS], found["normuon"]
    assert list(ours) == list(other) == list("1234")
    gaps = [other[seed] - ours[seed] for seed in ours]
    means = (sum(found.values()) / 4 for found in (ours, other))
    told = (
        f"AngularMuown is {min(gaps):.3f} to {max(gaps):.3f} below it at 90M tokens: "
        "{:.4f} against {:.4f} in the mean".format(*means)
    )
    assert told in DOCS.read_text()
    first = (behind(losses, "normuon", seed, "90M") for seed in "12")
    assert "they are {:.3f} and {:.3f} apart".format(*first) in DOCS.read_text()
    assert "Seeds 3 and 4 alone: {:.3f} and {:.3f}.".format(*gaps[2:]) in DOCS.read_text()
    (pair,) = cells(report, "closest-s-pairs")
    high, low = (-float(end) for end in pair["95% interval"].split(" to "))
    mean = -float(pair["mean difference"])
    told = f"its mean lead over NorMuon is {mean:.3f} ({low:.3f} to {high:.3f})"
    assert told in (ROOT / "README.md").read_text()
