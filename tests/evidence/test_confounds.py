"""Confounds, angles, and runs that were made twice: the docs say what the kept runs say."""

from pathlib import Path

from angular_lab.experiment_plan import SETTLED as BEST
from angular_lab.rundir import RunDir
from tests.evidence.kept import OURS, Losses, cells, mean, readme, words


def finals(report: Path, sweep: str) -> dict[tuple[str, ...], float]:
    """At the shortest horizon, by line, value and seed."""
    axis = {"aux-lr": "aux_lr", "radius": "radius_lr"}.get(sweep, "lr")
    return {
        (row["line"], row[axis], row["seed"]): float(row["22.5M tokens"])
        for row in cells(report, f"{sweep}-s-runs")
        if row["22.5M tokens"]
    }


def test_the_rate_of_embeddings_in_words(report: Path, losses: Losses) -> None:
    aux, angles = finals(report, "aux-lr"), finals(report, "angles")
    usual = {seed: losses["adamw", BEST["adamw"], seed, "22.5M"] for seed in "01"}
    gains = [usual[seed] - aux["adamw", "0.008", seed] for seed in "01"]
    most = usual["0"] - aux["adamw", "0.016", "0"]
    told = "at 8e-3 it gains {:.3f} on seed 0 and {:.3f} on seed 1".format(*gains)
    assert f"{told}, at 1.6e-2 {most:.3f} on seed 0" in words()
    gap = angles["adamw", "0.002", "0"] - angles[OURS, "0.02", "0"]
    assert f"the {gap:.3f} that separate it from AngularMuown there" in words()
    told = "it is {:.3f} and {:.3f} better at 22.5M tokens on two seeds".format(*gains)
    assert f"{told}, {most:.3f} on one at a still higher rate" in readme()


def test_angles_in_words(report: Path) -> None:
    angles = finals(report, "angles")
    flat = angles["angular_muown, kappa = 1", "0.02", "0"] - angles[OURS, "0.02", "0"]
    assert f"that costs {flat:.3f} of loss" in words()
    decay = angles["muon, decay 0.1", "0.005", "0"] - angles["muon, no decay", "0.005", "0"]
    assert f"holds the angle up and costs {decay:.3f}" in words()


def test_split_or_fused_in_words(report: Path) -> None:
    pairs = cells(report, "split-qkv-s-pairs")
    split = {r["claim"].partition(",")[0]: -float(r["mean difference"]) for r in pairs}
    assert f"most ({split['muon']:.3f}), AngularMuown and NorMuon by" in words()
    assert f"NorMuon by {split[OURS]:.3f} and {split['normuon']:.3f}." in words()
    ends = finals(report, "split-qkv")
    harm = [ends["muown, split", "0.016", s] - ends["muown, fused", "0.016", s] for s in "120"]
    told = f"are {harm[0]:.3f} and {harm[1]:.3f} better, on seed 0 {-harm[2]:.3f} worse"
    assert told in words()


def test_the_row_lengths_rate_in_words(report: Path, losses: Losses) -> None:
    radius = finals(report, "radius")
    quarter, whole = (radius["muown", rate, "0"] for rate in ("0.004", "0.016"))
    assert f"{quarter:.4f} instead of {whole:.4f}" in words()
    quarter = mean(radius["muown", "0.004", seed] for seed in "12")
    whole = mean(losses["muown", BEST["muown"], seed, "22.5M"] for seed in "12")
    assert f"{quarter:.4f} against {whole:.4f} on seeds 1 and 2" in words()
    assert f"That is {whole - quarter:.3f} more than the comparison gives it" in words()
    assert f"({losses[OURS, 0.02, '0', '22.5M']:.4f} at 2e-2, in the comparison)" in words()


def test_verdicts_are_of_five_thousandths_and_one_sign(report: Path) -> None:
    rows = [
        row for path in (report / "tables").glob("*pairs*.csv") for row in cells(report, path.stem)
    ]
    real = [row for row in rows if row["verdict"] in ("holds", "reversed")]
    assert real
    assert all(abs(float(row["mean difference"])) >= 0.005 for row in real)
    assert all("of one sign" in row["reason"] for row in real)


def losses_before(folder: Path, step: int) -> list[float]:
    return [line["loss"] for line in RunDir(folder).read_metrics() if line["step"] < step]


def test_the_same_run_twice(report: Path) -> None:
    """Nine runs of the comparison were made again, with averages that change nothing."""
    same: set[tuple[str, int]] = set()
    gaps = {2747: 0.0, 5493: 0.0}
    names = [f"{name.replace('_', '-')}-lr{BEST[name]:g}" for name in (OURS, "normuon", "adamw")]
    for name in (f"{name}-seed{seed}-????????" for name in names for seed in range(3)):
        (again,), (first,) = ((report / "runs" / s).glob(name) for s in ("average-s", "teaser-s"))
        spec = RunDir(again).read_spec()
        trunks = [losses_before(folder, 4944) for folder in (again, first)]
        if trunks[0] == trunks[1]:
            same.add((spec.optim.name, spec.seed))
        for end in gaps:
            ends = [RunDir(Path(f"{p}-to{end}")).read_metrics()[-1] for p in (again, first)]
            gaps[end] = max(gaps[end], abs(ends[0]["val_loss"] - ends[1]["val_loss"]))
    assert same == {(OURS, 0), ("normuon", 0), ("adamw", 0), ("adamw", 1)}
    told = f"they end {gaps[2747]:.4f} apart at most after 45M tokens and {gaps[5493]:.4f} after"
    assert told in words()
