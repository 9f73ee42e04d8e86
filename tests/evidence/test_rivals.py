"""Rivals, AdamW with a rate apart, widths: the docs say what the kept runs say."""

from math import exp, log, log2
from pathlib import Path

from angular_lab.experiments.definition import SETTLED as BEST
from angular_lab.experiments.statistics import student_interval, tokens_to_reach, verdict
from angular_lab.run_folder import RunDir
from tests.evidence.kept import OURS, ROOT, Losses, cells, mean, readme, trained, words
from tests.evidence.test_beyond import throughput
from tests.evidence.test_step_times import RIVALS, by_optimizer

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


def test_a_rival_is_ahead(report: Path) -> None:
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
    (pair,) = (row for row in cells(report, "rivals-s-pairs") if row["claim"].endswith(DECOUPLED))
    low, high = map(float, pair["95% interval"].split(" to "))
    assert low < 0 < high  # "though the interval over two seeds includes zero"
    lower = [ours[seed][1] - rival[seed][1] for seed in "012"]
    assert f"its training loss is {min(lower):.3f} to {max(lower):.3f} lower" in words()
    assert f"At 90M tokens it is {average:.3f} below AngularMuown" in readme()
    again = " and ".join(f"{ours[seed][0]:.4f}" for seed in "12")
    assert f"AngularMuown as it was run again beside them ({again})" in readme()


def test_hardly_below_the_rival_after_a_longer_cool_down(report: Path, losses: Losses) -> None:
    rival = ends(report)[DECOUPLED]
    longer = {seed: losses[OURS, BEST[OURS], seed, LONGER] for seed in "012"}
    below = {seed: rival[seed][0] - longer[seed] for seed in "012"}
    sides = ({int(s): x[s] for s in "12"} for x in (longer, {s: v for s, (v, _) in rival.items()}))
    assert verdict(*sides).outcome == "inconclusive"
    assert min(below.values()) > 0  # "on all three seeds"
    at, two = mean(longer[seed] for seed in "12"), f"{below['1']:.3f} and {below['2']:.3f}"
    told = f"it is at {at:.4f}, slightly below MagnitudeDirection on all three seeds (by {two}, "
    assert f"{told}{below['0']:.3f} on seed 0), too little for the rule above" in words()
    told = f"AngularMuown has {at:.4f}: {two} below it, too little to count by our rule"
    assert told in readme()
    slower = []
    for seed in "012":
        (folder,) = (report / "runs" / "teaser-s").glob(
            f"angular-muown-lr0.02-seed{seed}-????????-to5493-longer"
        )
        slower.append(trained(folder) - rival[seed][1])
    assert f"with a training loss that is {min(slower):.3f} to {max(slower):.3f} higher" in words()


def test_angles_of_rivals(report: Path) -> None:
    def angles(line: str, begin: float, end: float) -> list[float]:
        """On seed 0, between these millions of tokens."""
        name = line.replace(", ", "--").replace("_", "-").replace(" ", "-")
        (folder,) = (report / "runs" / "rivals-s").glob(f"{name}-lr{CHOSEN[line]}-seed0-*")
        log = RunDir(folder).read_metrics()
        return [
            x["angle_mean"] for x in log if begin <= x["tokens"] / 1e6 <= end and "angle_mean" in x
        ]

    pairs = list(zip(angles(OURS, 20, 50), angles(DECOUPLED, 20, 50), strict=True))
    apart = max(ours / rival for ours, rival in pairs) - 1
    assert min(ours / rival for ours, rival in pairs) > 1
    assert f"From 20M to 50M tokens the two angles are within {100 * apart:.0f}%" in words()
    last = [angles(line, 79, 81)[-1] for line in (OURS, DECOUPLED)]
    assert last[1] < 0.4 * last[0]  # "falls faster"
    assert all(round(angle, 3) == 0.005 for angle in angles(HYPERBALL, 2, 80))


def test_an_angle_that_does_not_fall(report: Path, losses: Losses) -> None:
    found = ends(report)
    loss = {line: mean(runs[seed][0] for seed in "12") for line, runs in found.items()}
    above = loss[HYPERBALL] - loss[OURS]
    assert f"Hyperball is {above:.3f} above AngularMuown, between Muon and AdamW" in words()
    at = {name: mean(losses[name, BEST[name], s, "90M"] for s in "12") for name in BEST}
    assert at["muon"] < loss[HYPERBALL] < at["adamw"]
    assert f"Hyperball, the other rival, is {above:.3f} above AngularMuown" in readme()
    ahead = loss[OURS] - loss[DECOUPLED]
    log_page = (ROOT / "docs" / "log.md").read_text()
    assert f"Hyperball is {above:.3f} behind" in log_page
    assert f"falls to the end, is {ahead:.3f} ahead" in log_page


def test_their_steps_take_longer() -> None:
    rows = by_optimizer(RIVALS, "gpt124")
    ours, *theirs = (rows[n]["ms"] for n in ("AngularMuown", "Hyperball", "MagnitudeDirection"))
    told = "{:.1f} ms (Hyperball) and {:.1f} ms (MagnitudeDirection)".format(*theirs)
    assert f"{told}, where AngularMuown's takes {ours:.1f} in the same run" in words()
    assert (
        f"takes {theirs[1]:.1f} ms for the matrices of a 124M model, AngularMuown's {ours:.1f}"
        in readme()
    )


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
    first = {r["aux_lr"]: float(r["90M tokens"]) for r in runs if r["seed"] == "0"}
    assert sorted(first, key=first.__getitem__)[:2] == ["0.016", "0.008"]
    near = first["0.008"] - first["0.016"]
    assert f"Eight times is best again, four times only {near:.3f} behind" in words()
    gains = [losses["adamw", BEST["adamw"], seed, "90M"] - tuned[seed] for seed in "120"]
    told = "it gains {:.3f} and {:.3f} on seeds 1 and 2 ({:.3f} on seed 0)".format(*gains)
    assert f"At 90M tokens {told}, less than at 22.5M" in words()
    assert f"At 90M tokens AdamW gains {mean(gains[:2]):.3f} by it" in readme()
    for page, told in (
        ("tuning", "tokens, {:.3f} at 90M"),
        ("log", "at 90M AdamW gains {:.3f}, and"),
    ):
        assert told.format(mean(gains[:2])) in (ROOT / "docs" / f"{page}.md").read_text()


def test_the_lead_over_that_adamw(report: Path, losses: Losses) -> None:
    def lead(sweep: str, tokens: float) -> float:
        pairs = cells(report, f"{sweep}-s-pairs")
        rows = (r for r in pairs if "adamw" in r["claim"] and round(float(r["tokens"])) == tokens)
        return -float(next(rows)["mean difference"])

    early, late = (
        [lead(sweep, tokens) for sweep in (apart, "teaser")]
        for apart, tokens in (("aux-lr", 22495232), ("tuned-adamw", 89997312))
    )
    told = "lead is {:.3f} instead of {:.3f} at 22.5M tokens".format(*early)
    assert "{} and {:.3f} instead of {:.3f} at 90M".format(told, *late) in words()
    runs = [r for r in cells(report, "tuned-adamw-s-runs") if r["aux_lr"] == "0.016"]
    both = faster(losses, {r["seed"]: float(r["90M tokens"]) for r in runs})
    usual = faster(losses, {s: losses["adamw", BEST["adamw"], s, "90M"] for s in "12"})
    told = "AngularMuown's lead over it is {:.3f} then instead of {:.3f}".format(*late)
    speeds = "{:.2f} and {:.2f} on the two seeds instead of {:.2f} and {:.2f}".format(*both, *usual)
    assert f"{told}, the speed-up in tokens {speeds}" in words()
    rate = {name: row["tokens_per_second"] for name, row in throughput().items()}
    in_time = mean(both) * rate[OURS] / rate["adamw"]
    told = f"lead is then {late[0]:.3f} and its speed-up {mean(both):.2f}"
    assert f"{told} in tokens and {in_time:.2f} in wall-clock" in readme()
    told = f"for {mean(both):.2f} times fewer tokens and {in_time:.2f} times less time even against"
    assert told in readme()
    (muon,) = (r for r in cells(report, "teaser-s-speed-up") if r["over"] == "muon")
    assert f"From Muon probably, for {float(muon['in tokens']):.2f} times fewer tokens" in readme()
    leads = []
    for table in ("teaser-s-pairs-longer", "teaser-s-pairs"):
        rows = [row for row in cells(report, table) if row["claim"].endswith("below muon")]
        leads.append(-float(rows[-1]["mean difference"]))
    assert "the lead is {:.3f} instead of {:.3f}, and NorMuon has most".format(*leads) in readme()


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
            ends = student_interval(logs)
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
    told = f"is the same at widths 256, 384 and 640; interpolated, it falls by {share:.0f}%"
    assert told in readme()
