"""Confounds, angles, and runs that were made twice: the docs say what the kept runs say."""

from pathlib import Path

from angular_lab.experiment_plan import SETTLED as BEST
from angular_lab.rundir import RunDir
from tests.evidence.kept import OURS, Losses, cells, mean, readme, trained, words


def finals(report: Path, sweep: str) -> dict[tuple[str, ...], float]:
    """At the shortest horizon, by line, value and seed."""
    axis = {"aux-lr": "aux_lr", "radius": "radius_lr"}.get(sweep, "lr")
    return {
        (row["line"], row[axis], row["seed"]): float(row["22.5M tokens"])
        for row in cells(report, f"{sweep}-s-runs")
        if row["22.5M tokens"]
    }


def test_the_rate_of_embeddings_in_words(report: Path, losses: Losses) -> None:
    aux = finals(report, "aux-lr")

    def apart(name: str, value: str) -> tuple[float, float]:
        """Mean over seeds 1 and 2, at that rate and at the hidden matrices'."""
        usual = mean(losses[name, BEST[name], seed, "22.5M"] for seed in "12")
        return mean(aux[name, value, seed] for seed in "12"), usual

    first = losses["adamw", BEST["adamw"], "0", "22.5M"] - aux["adamw", "0.016", "0"]
    own, usual = apart("adamw", "0.016")
    gain, gap = usual - own, usual - apart(OURS, "0.008")[1]
    told = f"at 1.6e-2 it gains {first:.3f} on seed 0, and {gain:.3f} in the mean over seeds 1"
    assert told in words()
    assert gain > gap / 4
    assert f"more than a quarter of the {gap:.3f} by which AngularMuown is below it" in words()
    assert f"it is {gain:.3f} better at 22.5M tokens, where AngularMuown's lead is {gap:.3f}" in (
        readme()
    )
    muon, ours = apart("muon", "0.004"), apart(OURS, "0.008")
    assert muon[0] > muon[1]  # "no other gains"
    assert ours[0] > ours[1]
    told = "(Muon {:.4f} against {:.4f}, AngularMuown {:.4f} against {:.4f})"
    assert told.format(*muon, *ours) in words()
    best = {row["line"]: float(row["best aux_lr"]) for row in cells(report, "aux-lr-s-final-loss")}
    assert [best[name] for name in ("normuon", "muown")] == [BEST["normuon"], BEST["muown"]]


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
    ours = radius[OURS, "0.016", "0"], losses[OURS, 0.02, "0", "22.5M"]
    assert "1.6e-2 has {:.4f}, the comparison's 2e-2 {:.4f}".format(*ours) in words()
    own = mean(radius[OURS, "0.016", seed] for seed in "12")
    usual = mean(losses[OURS, 0.02, seed, "22.5M"] for seed in "12")
    assert f"on seeds 1 and 2 it is {own:.4f} against {usual:.4f}" in words()


def test_the_larger_model_in_words(report: Path) -> None:
    rows = {row.pop("line"): row for row in cells(report, "larger-s-read-out")}
    ours, other = ({k: float(v) for k, v in rows[name].items()} for name in (OURS, "normuon"))
    behind = {name: other[name] - ours[name] for name in ours}
    told = (
        f"AngularMuown is {behind['weights']:.3f} below NorMuon, {behind['average, 0.1']:.3f} "
        f"where both are averaged over a tenth of the steps, and {-behind['average, 0.2']:.3f} "
        "above where it is a fifth"
    )
    assert told in words()
    runs = {
        RunDir(folder).read_spec().optim.name: folder
        for folder in (report / "runs" / "larger-s").iterdir()
        if folder.is_dir()
    }
    early = {n: RunDir(f).read_metrics() for n, f in runs.items()}
    at = {n: next(x["val_loss"] for x in m if x["step"] == 2000) for n, m in early.items()}
    told = f"at 65.5M tokens, NorMuon is {at[OURS] - at['normuon']:.3f} ahead"
    assert told in words()
    gap = trained(runs[OURS]) - trained(runs["normuon"])
    assert f"NorMuon's training loss is {gap:.3f} lower** over the last 140 steps" in words()
    told = f"{behind['weights']:.3f} below NorMuon in validation loss, {gap:.3f} above it in"
    assert told in readme()
    assert f"{behind['weights']:.3f} below it in validation loss and {gap:.3f} above it" in words()


def test_the_best_rate_of_one_width_in_words(report: Path) -> None:
    ends = [v for (line, _, _), v in finals(report, "width").items() if line == "d = 384"]
    assert "(22.5M tokens, seed 0: {:.4f}, {:.4f}, {:.4f}, {:.4f})".format(*ends) in words()
    assert min(ends) == ends[1]


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
