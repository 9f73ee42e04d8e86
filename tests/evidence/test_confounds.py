"""Confounds, angles, and runs that were made twice: the docs say what the kept runs say."""

from pathlib import Path

from angular_lab.experiments.definition import SETTLED as BEST
from angular_lab.run_folder import RunFolder
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
    told = f"it is {gain:.3f} better at 22.5M tokens (mean over seeds 1 and 2), where"
    assert f"{told} AngularMuown's lead is {gap:.3f}" in readme()
    muon, ours = apart("muon", "0.004"), apart(OURS, "0.008")
    assert muon[0] > muon[1]  # "no other gains"
    assert ours[0] > ours[1]
    told = "(Muon {:.4f} against {:.4f}, AngularMuown {:.4f} against {:.4f})"
    assert told.format(*muon, *ours) in words()
    rows = {row["line"]: row for row in cells(report, "aux-lr-s-final-loss")}
    best = {name: float(row["best aux_lr"]) for name, row in rows.items()}
    assert [best[name] for name in ("normuon", "muown")] == [BEST["normuon"], BEST["muown"]]
    apart_at = {name: float(row["ours at 22.5M"]) for name, row in rows.items()}
    usual_at = {name: mean(losses[name, BEST[name], s, "22.5M"] for s in "12") for name in BEST}
    assert sorted(apart_at, key=apart_at.__getitem__) == sorted(usual_at, key=usual_at.__getitem__)


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
    assert f"So Muown is {whole - quarter:.3f} better than the comparison has it" in words()
    assert f"by that of its row lengths, by {whole - quarter:.3f} at 22.5M" in words()
    ours = radius[OURS, "0.016", "0"], losses[OURS, 0.02, "0", "22.5M"]
    assert "1.6e-2 has {:.4f}, the comparison's 2e-2 {:.4f}".format(*ours) in words()
    own = mean(radius[OURS, "0.016", seed] for seed in "12")
    usual = mean(losses[OURS, 0.02, seed, "22.5M"] for seed in "12")
    assert f"on seeds 1 and 2 it is {own:.4f} against {usual:.4f}" in words()


def test_the_larger_model_in_words(report: Path) -> None:
    rows = {row.pop("line"): row for row in cells(report, "larger-s-read-out")}
    ours, other = ({k: float(v) for k, v in rows[name].items()} for name in (OURS, "normuon"))
    by = {name: other[name] - ours[name] for name in ours}
    best = min(ours.values()) - min(other.values())
    assert (
        f"By the weights AngularMuown is {by['weights']:.3f} below NorMuon, by averages over a "
        f"tenth of the steps {by['average, 0.1']:.3f}; over a fifth it is "
        f"{-by['average, 0.2']:.3f} above, over two fifths {-by['average, 0.4']:.3f}, and with "
        f"each at its best window {best:.3f} above"
    ) in words()
    folders = [path for path in (report / "runs" / "larger-s").iterdir() if path.is_dir()]
    runs = {RunFolder(folder).read_spec().optim.name: folder for folder in folders}
    logs = {name: RunFolder(folder).read_metrics() for name, folder in runs.items()}

    def ahead(key: str, begin: int, end: int) -> float:
        """NorMuon, in the mean over these steps."""
        means = {
            name: mean(x[key] for x in log if begin <= x["step"] <= end and key in x)
            for name, log in logs.items()
        }
        return means[OURS] - means["normuon"]

    last = trained(runs[OURS]) - trained(runs["normuon"])
    first = ahead("loss", 1200, 1300)
    told = f"NorMuon's training loss is {last:.3f} lower** over the last 14 logged losses"
    assert told in words()
    assert f"1,200 to 1,300 of the first pass, it is {first:.3f} lower already" in words()
    tenth = [ahead("val_loss_averaged_0.1", step, step) for step in (1000, 2000)]
    assert "{:.3f} lower at 32.8M tokens and {:.3f} at 65.5M".format(*tenth) in words()
    kappas = [line["kappa"] for line in logs[OURS] if "kappa" in line]
    assert f"κ is at {kappas[-1]:.2f} at the end" in words()
    short = (
        f"{by['weights']:.3f} below NorMuon by the weights, {by['average, 0.1']:.3f}",
        f"{best:.3f} above it with each at its best window",
    )
    assert all(text in readme() and text in words() for text in short)
    assert f"NorMuon's training loss is {last:.3f} lower." in readme()


def test_another_rate_over_a_short_horizon(report: Path, losses: Losses) -> None:
    ends = [v for (line, _, _), v in finals(report, "width").items() if line == "d = 384"]
    early = [losses[name, BEST[name], "0", "22.5M"] for name in (OURS, "normuon")]
    told = "has {:.4f} at 22.5M on seed 0 instead of {:.4f}, where NorMuon has {:.4f}"
    assert told.format(ends[1], *early) in words()


def test_a_fifth_less_of_a_rate_is_noise(report: Path, losses: Losses) -> None:
    """0.016 or 2^-6 instead of 0.02: of all rates, the row lengths', the embeddings'."""
    usual = losses[OURS, 0.02, "0", "22.5M"]
    width = finals(report, "width")
    near = [
        next(v for (line, lr, _), v in width.items() if (line, lr[:6]) == ("d = 384", "0.0156")),
        finals(report, "radius")[OURS, "0.016", "0"],
        finals(report, "aux-lr")[OURS, "0.016", "0"],
    ]
    moved = [loss - usual for loss in near]
    assert min(moved) < 0 < max(moved)  # "in either direction"
    assert f"moved a run by up to {max(map(abs, moved)):.3f}" in words()


def test_verdicts_are_of_five_thousandths_and_one_sign(report: Path) -> None:
    rows = [
        row for path in (report / "tables").glob("*-pairs*.csv") for row in cells(report, path.stem)
    ]
    real = [row for row in rows if row["verdict"] in ("holds", "reversed")]
    assert real
    assert all(abs(float(row["mean difference"])) >= 0.005 for row in real)
    assert all("of one sign" in row["reason"] for row in real)


def losses_before(folder: Path, step: int) -> list[float]:
    return [line["loss"] for line in RunFolder(folder).read_metrics() if line["step"] < step]


def test_the_same_run_twice(report: Path) -> None:
    """Nine runs of the comparison were made again, with averages that change nothing."""
    same: set[tuple[str, int]] = set()
    gaps = {2747: 0.0, 5493: 0.0}
    names = [f"{name.replace('_', '-')}-lr{BEST[name]:g}" for name in (OURS, "normuon", "adamw")]
    for name in (f"{name}-seed{seed}-????????" for name in names for seed in range(3)):
        (again,), (first,) = ((report / "runs" / s).glob(name) for s in ("average-s", "teaser-s"))
        spec = RunFolder(again).read_spec()
        trunks = [losses_before(folder, 4944) for folder in (again, first)]
        if trunks[0] == trunks[1]:
            same.add((spec.optim.name, spec.seed))
        for end in gaps:
            ends = [RunFolder(Path(f"{p}-to{end}")).read_metrics()[-1] for p in (again, first)]
            gaps[end] = max(gaps[end], abs(ends[0]["val_loss"] - ends[1]["val_loss"]))
    assert same == {(OURS, 0), ("normuon", 0), ("adamw", 0), ("adamw", 1)}
    told = f"they end {gaps[2747]:.4f} apart at most after 45M tokens and {gaps[5493]:.4f} after"
    assert told in words()


def test_the_same_run_once_more(report: Path) -> None:
    """AngularMuown beside the rivals, with tables from the CPU."""
    same, gap = [], 0.0
    for seed in range(3):
        name = f"{OURS.replace('_', '-')}-lr0.02-seed{seed}-????????"
        sweeps = ("rivals-s", "teaser-s", "average-s")
        new, *earlier = (next((report / "runs" / s).glob(name)) for s in sweeps)
        firsts = {losses_before(folder, 11)[0] for folder in (new, *earlier)}
        assert len(firsts) <= 2
        if losses_before(new, 4944) == losses_before(earlier[0], 4944):
            same.append(seed)
        branch = Path(f"{earlier[0]}-to5493")
        last, before = (RunFolder(folder).read_metrics()[-1]["val_loss"] for folder in (new, branch))
        gap = max(gap, abs(last - before))
    assert same == [0, 2]
    assert f"and end {gap:.4f} from them at most on any seed" in words()
