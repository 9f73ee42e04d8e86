"""Rivals, AdamW at its best, widths: the docs say what the kept runs say."""

from math import exp, log, log2
from pathlib import Path

from angular_lab.experiment_plan import SETTLED as BEST
from angular_lab.intervals import student_interval
from angular_lab.statistics import tokens_to_reach
from tests.evidence.kept import OURS, ROOT, Losses, cells, mean, readme, trained, words
from tests.evidence.test_beyond import averages, throughput

HYPERBALL, DECOUPLED = "hyperball", "magnitude_direction, falling rate"
CHOSEN = {OURS: "0.02", HYPERBALL: "0.005", DECOUPLED: "0.01"}
LONGER = "90M, longer cool-down"


def ends(report: Path) -> dict[str, dict[str, tuple[float, float]]]:
    """Validation and training loss, by line and seed, at the best rates."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for row in cells(report, "rivals-s-runs"):
        if row["lr"] == CHOSEN[row["line"]]:
            folder = report / "runs" / "rivals-s" / row["folder"]
            both = float(row["90M tokens"]), trained(folder)
            found.setdefault(row["line"], {})[row["seed"]] = both
    return found


def test_a_rival_is_ahead(report: Path, losses: Losses) -> None:
    found = ends(report)
    ours, rival = found[OURS], found[DECOUPLED]
    below = {seed: ours[seed][0] - rival[seed][0] for seed in "012"}
    average = mean(below[seed] for seed in "12")
    assert min(below.values()) > 0.005  # "on every seed"
    told = (
        f"**MagnitudeDirection is {average:.3f} below AngularMuown at 90M tokens, on every seed**"
    )
    by_seed = (
        f"({below['1']:.3f} and {below['2']:.3f} on seeds 1 and 2, {below['0']:.3f} on seed 0)"
    )
    assert f"{told} {by_seed}" in words()
    lower = [ours[seed][1] - rival[seed][1] for seed in "012"]
    assert f"its training loss is {min(lower):.3f} to {max(lower):.3f} lower" in words()
    assert f"At 90M tokens it is {average:.3f} below AngularMuown" in readme()
    longer = {seed: losses[OURS, BEST[OURS], seed, LONGER] for seed in "012"}
    above = {seed: rival[seed][0] - longer[seed] for seed in "012"}
    after = mean(longer[seed] for seed in "12"), mean(above[seed] for seed in "12")
    told = f"AngularMuown is at {after[0]:.4f}, {after[1]:.3f} below MagnitudeDirection"
    by_seed = f"({above['1']:.3f} and {above['2']:.3f}, {above['0']:.3f} on seed 0)"
    assert f"{told} {by_seed}" in words()
    assert f"AngularMuown has {after[0]:.4f}, {after[1]:.3f} below it" in readme()
    slower = []
    for seed in "012":
        (folder,) = (report / "runs" / "teaser-s").glob(
            f"angular-muown-lr0.02-seed{seed}-????????-to5493-longer"
        )
        slower.append(trained(folder) - rival[seed][1])
    assert f"with a training loss that is {min(slower):.3f} to {max(slower):.3f} higher" in words()
    v2 = mean(averages(report)[OURS][seed][1] for seed in (1, 2))
    assert f"by its average (v2) it is at {v2:.4f} after the normal one" in words()


def test_an_angle_that_does_not_fall(report: Path, losses: Losses) -> None:
    found = ends(report)
    loss = {line: mean(runs[seed][0] for seed in "12") for line, runs in found.items()}
    above = loss[HYPERBALL] - loss[OURS]
    assert f"Hyperball is {above:.3f} above AngularMuown, between Muon and AdamW" in words()
    at = {name: mean(losses[name, BEST[name], s, "90M"] for s in "12") for name in BEST}
    assert at["muon"] < loss[HYPERBALL] < at["adamw"]
    assert f"The other rival, Hyperball, is {above:.3f} above it" in readme()


def test_grids_of_rivals_are_closed(report: Path) -> None:
    rows = {row["line"]: row for row in cells(report, "rivals-s-loss-by-value")}
    for line in (HYPERBALL, DECOUPLED):
        rates = {float(k): float(v) for k, v in rows[line].items() if k[0].isdigit() and v}
        best = min(rates, key=rates.__getitem__)
        assert best == float(CHOSEN[line])
        assert min(rates) < best < max(rates)


def test_adamw_with_a_rate_apart(report: Path, losses: Losses) -> None:
    runs = [r for r in cells(report, "tuned-adamw-s-runs") if r["line"] == "adamw"]
    tuned = {r["seed"]: float(r["90M tokens"]) for r in runs if r["aux_lr"] == "0.016"}
    plain = {seed: losses["adamw", BEST["adamw"], seed, "90M"] for seed in "012"}
    gains = {seed: plain[seed] - tuned[seed] for seed in "012"}
    gain = mean(gains[seed] for seed in "12")
    told = f"At 90M tokens it gains {gain:.3f} in the mean over seeds 1 and 2 ({gains['0']:.3f} on"
    assert told in words()
    (pair,) = cells(report, "tuned-adamw-s-pairs")
    lead = -float(pair["mean difference"])
    assert f"AngularMuown's lead over it is {lead:.3f} then instead of 0.106" in words()
    early = next(r for r in cells(report, "aux-lr-s-pairs") if "adamw" in r["claim"])
    told = f"lead is {-float(early['mean difference']):.3f} instead of 0.185 at 22.5M tokens"
    assert f"{told} and {lead:.3f} instead of 0.106 at 90M" in words()

    both = faster(losses, tuned)
    assert "the speed-up in tokens {:.2f} and {:.2f}".format(*both) in words()
    rate = {name: row["tokens_per_second"] for name, row in throughput().items()}
    in_time = mean(both) * rate[OURS] / rate["adamw"]
    told = f"AngularMuown's lead {lead:.3f}, the speed-up {mean(both):.2f}"
    assert f"{told} in tokens and {in_time:.2f} in wall-clock" in readme()
    assert f"it is {gain:.3f} better at 90M tokens" in readme()


def faster(losses: Losses, others: dict[str, float]) -> list[float]:
    """How many times fewer tokens ours needs for another's loss at 90M, on seeds 1 and 2."""
    found = []
    for seed in "12":
        horizons = {t: float(t) * 1e6 for t in ("22.5", "45", "67.5", "90")}
        curve = [(n, losses[OURS, BEST[OURS], seed, f"{t}M"]) for t, n in horizons.items()]
        if needed := tokens_to_reach(curve, others[seed]):
            found.append(90e6 / needed)
    return found


def test_rows_of_the_readmes_table(report: Path, losses: Losses) -> None:
    rows = {
        ("rivals", DECOUPLED): "MagnitudeDirection, at its own schedule",
        ("rivals", HYPERBALL): "Hyperball",
        ("tuned-adamw", "adamw"): "AdamW, eight times its rate for embeddings, head and norms",
    }
    for (sweep, line), title in rows.items():
        runs = [row for row in cells(report, f"{sweep}-s-runs") if row["line"] == line]
        chosen = runs[-1]["lr"], runs[-1].get("aux_lr")  # what the last seed ran with
        same = (r for r in runs if (r["lr"], r.get("aux_lr")) == chosen)
        at = {row["seed"]: float(row["90M tokens"]) for row in same}
        pairs = cells(report, f"{sweep}-s-pairs")
        (pair,) = (row for row in pairs if row["claim"].endswith(f"below {line}"))
        high, low = (-float(end) for end in pair["95% interval"].split(" to "))
        above = f"{-float(pair['mean difference']):.3f} ({low:.3f} to {high:.3f})"
        logs = [log(ratio) for ratio in faster(losses, at)]
        times = "below 1"  # never reached
        if logs:
            ends = student_interval(logs, 0.95)
            assert ends
            times = f"{exp(mean(logs)):.2f} ({exp(ends[0]):.2f} to {exp(ends[1]):.2f})"
        assert f"\n| {title} | {at['1']:.4f} | {at['2']:.4f} | {above} | {times} |" in readme()


def vertex(rates: dict[float, float]) -> float:
    """Of the parabola through the best rate and its neighbours, over the rate's logarithm."""
    ordered = sorted(rates)
    middle = ordered.index(min(rates, key=rates.__getitem__))
    low, best, high = (rates[ordered[middle + i]] for i in (-1, 0, 1))
    return float(2 ** (log2(ordered[middle]) + (low - high) / (2 * (low - 2 * best + high))))


def test_the_best_rate_over_widths(report: Path) -> None:
    vertices = []
    for row in cells(report, "width-s-loss-by-value"):
        rates = {float(k): float(v) for k, v in row.items() if k[0].isdigit() and v}
        assert len(rates) == 4
        best = min(rates, key=rates.__getitem__)  # told with four digits
        assert round(log2(best), 2) == -6  # "at all three widths"
        vertices.append(vertex(rates))
    assert len(vertices) == 3
    told = "lies at {:.4f}, {:.4f} and {:.4f}".format(*vertices)
    assert told in words()
    share = 100 * (1 - vertices[-1] / vertices[0])
    for page in (words(), (ROOT / "docs" / "tuning.md").read_text()):
        assert f"falls by {share:.0f}% from width 256 to 640" in page
    assert "at widths 256, 384 and 640 the best rate is the same" in readme()
