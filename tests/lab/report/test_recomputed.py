"""Two numbers of every table, recomputed from metrics.jsonl, timing.jsonl and the files of paces.

The recomputations read JSON and CSV and use none of the lab's readers, statistics or tables. A
table without one fails.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path
from random import Random
from statistics import fmean, median, stdev
from typing import Any

import pytest

from angular_lab import run_folder
from angular_lab.cli.main import main
from angular_lab.config.spec import Spec
from angular_lab.pace.record import Pace, Timed
from angular_lab.report import page
from angular_lab.report.read import collect, read_paces
from angular_lab.report.report import make_report
from angular_lab.report.results import speed_table
from angular_lab.run_folder import RUNS
from angular_lab.status.device_use import DeviceUse
from angular_lab.sweeps.sweep_file import TrialRecord
from tests.lab.report.made import OURS, edit_sweep, spec_of, table, write_lines, write_record

HORIZONS, SEEDS, WINDOW = (200, 400), (0, 1, 2), 3
AVERAGED = f"val_loss_averaged_{WINDOW}"
# The loss of each method at its learning rates; 200 steps cost 0.2 more than 400.
GRIDS = {
    "adamw": {0.001: 3.3, 0.002: 3.2, 0.004: 3.25},
    "normuon": {0.008: 3.14},
    OURS: {0.01: 3.2, 0.02: 3.1, 0.04: 3.3},
}
BEST = {"adamw": 0.002, "normuon": 0.008, OURS: 0.02}
T95 = {2: 12.706205, 3: 4.302653}  # Student's quantile, by the number of values
NOISE = Random(24)


# -- the folders, as training leaves them ----------------------------------------------------------


def _spec(optimizer: str, lr: float, seed: int, **values: Any) -> Spec:
    base = spec_of(optimizer, seed=seed, average=(WINDOW,), **values)
    return replace(base, optim=replace(base.optim, lr=lr))


def _write(folder: Path, spec: Spec, final: float) -> str:
    """Write a run whose numbers all differ, and that ends near `final`."""

    def line(step: int) -> dict[str, Any]:
        near = final + 0.01 * NOISE.random() + (spec.steps - step) / 100
        values = {"step": step, "loss": near - 0.1, "lr": spec.optim.lr, "grad_norm": 1.0}
        values |= {"angle_mean": 0.01 * (1 + NOISE.random()), "row_norm_mean": 1.0}
        if step % 20 == 0:
            averaged = near - 0.02 * NOISE.random()
            values |= {"val_loss": near, AVERAGED: averaged, "val_bits_per_byte": near / 2}
        return values

    steps = range(spec.parent_step + 2, spec.steps + 1, 2)
    write_lines(folder, spec, map(line, steps), speed=1e5 * (1 + NOISE.random()))
    return folder.name


def _trials(root: Path, arm: str, value: float, seed: int, loss: float) -> list[TrialRecord]:
    """Write a trunk, its cooldowns at both horizons, and a longer one at the last."""
    spec, name = _spec(arm, value, seed), f"{arm}-lr{value:g}-seed{seed}"
    constant = replace(spec.schedule, kind="constant")
    trunk = _write(root / name, replace(spec, steps=360, schedule=constant), loss + 0.3)
    runs = {}
    for horizon in HORIZONS:
        start = int(0.9 * horizon)
        end = loss + (0.2 if horizon == HORIZONS[0] else 0)
        cooldown = replace(spec, steps=horizon, parent=trunk, parent_step=start)
        runs[horizon] = _write(root / f"{name}-to{horizon}", cooldown, end)
    half = replace(spec.schedule, decay=0.5)
    longer = replace(spec, steps=400, schedule=half, parent=trunk, parent_step=200)
    variant = {400: _write(root / f"{name}-half", longer, loss - 0.05)}
    return [
        TrialRecord(arm, value, seed, runs, trunk),
        TrialRecord(f"{arm}, cooldown 50%", value, seed, variant, trunk),
    ]


def _write_teaser(root: Path) -> None:
    trials = [
        trial
        for arm, grid in GRIDS.items()
        for value, loss in grid.items()
        for seed in (SEEDS if value == BEST[arm] else SEEDS[:1])
        for trial in _trials(root / RUNS, arm, value, seed, loss)
    ]
    varied = {f"{arm}, cooldown 50%": arm for arm in GRIDS}
    write_record(root, trials, {**dict(zip(GRIDS, GRIDS, strict=True)), **varied}, chosen=BEST)
    pairs = tuple((OURS, arm) for arm in GRIDS if arm != OURS)

    def as_variants(arms: Any) -> Any:
        return tuple(replace(arm, variant_of=varied.get(arm.label)) for arm in arms)

    edit_sweep(root, arms=as_variants, pairs=pairs, ours=OURS, horizons=HORIZONS, seeds=SEEDS)


def _write_speedrun(root: Path) -> None:
    trials = []
    for seed in SEEDS:
        spec = replace(_spec(OURS, 0.02, seed), average=())
        name = _write(root / RUNS / f"run-seed{seed}", spec, 3.2)
        trials.append(TrialRecord(OURS, 0.02, seed, {400: name}))
    write_record(root, trials, experiment="speedrun", chosen={OURS: 0.02})


def _write_pace(folder: Path, use: DeviceUse) -> None:
    """Write the times of two optimizers with the settings of the sweep."""
    timed = tuple(
        Timed(
            _spec(name, BEST[name], 0).optim,
            tuple(tuple(ms * (1 + NOISE.random()) for _ in range(4)) for _ in range(5)),
            memory_gib=2 + NOISE.random(),
        )
        for name, ms in (("adamw", 0.010), (OURS, 0.012))
    )
    Pace(
        spec=_spec(OURS, 0.02, 0), device="NVIDIA H200", reference="adamw", warmup=5, lead_in=2,
        order=(), timed=timed, threads=2, use=(use, use), versions={}, git={}, data="tokens",
    ).write(folder)  # fmt: skip


class Made:
    """A report, and its sources read without the lab."""

    def __init__(self, root: Path, out: Path) -> None:
        self.root, self.out = root, out

    def rows(self, name: str) -> list[dict[str, str]]:
        return table(self.out, name)

    def lines(self, run: str, file: str = "metrics") -> list[dict[str, Any]]:
        (folder,) = self.root.glob(f"*/runs/{run}")
        return [json.loads(text) for text in (folder / f"{file}.jsonl").read_text().splitlines()]

    def final(self, arm: str, seed: int, end: str = "to400", key: str = "val_loss") -> float:
        """Return the last validation loss of a method at its best learning rate."""
        return self.at(arm, BEST[arm], seed, end, key)

    def at(self, arm: str, lr: float, seed: int, end: str, key: str = "val_loss") -> float:
        lines = self.lines(f"{arm}-lr{lr:g}-seed{seed}-{end}")
        return [line[key] for line in lines if key in line][-1]

    def mean(self, arm: str, end: str = "to400", key: str = "val_loss") -> float:
        """Return the mean over the seeds that did not choose the learning rate."""
        return fmean(self.final(arm, seed, end, key) for seed in SEEDS[1:])

    def differences(self, other: str, end: str = "to400", key: str = "val_loss") -> list[float]:
        return [self.final(OURS, s, end, key) - self.final(other, s, end, key) for s in SEEDS[1:]]

    def log_speed_ups(self, other: str, key: str = "val_loss") -> list[float]:
        """Return the logs of how many times fewer tokens ours needs for the other's loss."""
        logs = []
        for seed in SEEDS[1:]:
            first, last = (self.final(OURS, seed, end, key) for end in ("to200", "to400"))
            share = (first - self.final(other, seed, "to400", key)) / (first - last)
            logs.append(log(400 / (200 * 2**share)))
        return logs

    def speed_up(self, other: str, key: str = "val_loss") -> float:
        return exp(fmean(self.log_speed_ups(other, key)))

    def pace(self, shared: bool = False) -> dict[str, list[float]]:
        """Return the seconds per step by round, for each optimizer."""
        files = [x for x in self.root.glob("pace/*.json") if ("shared" in x.name) == shared]
        content = json.loads(files[0].read_text())
        return {x["optim"]["name"]: [*map(fmean, x["seconds"])] for x in content["timed"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("recomputed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "git_state", dict)
        patch.setattr(page, "save", lambda panel, stem: "<svg></svg>")
        _write_teaser(root / "teaser")
        _write_speedrun(root / "speedrun")
        for i, name in enumerate(("adamw", OURS)):
            _write(root / "single/runs" / name, _spec(name, BEST[name], i), 3.3 + i)
        idle = DeviceUse(0.1, 8)
        _write_pace(root / "pace", idle)
        _write_pace(root / "pace", replace(idle, gpu=True, others=1, others_mib=1.0))
        make_report([root], root / "report")
    return Made(root, root / "report")


# -- the tables ------------------------------------------------------------------------------------

Check = Callable[[Made, list[dict[str, str]]], None]
CHECKS: dict[str, Check] = {}


def of_table(*names: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return add


def row_of(rows: list[dict[str, str]], **cells: Any) -> dict[str, str]:
    """Return the row with these cells; underscores in names are spaces."""
    wanted = {key.replace("_", " "): str(value) for key, value in cells.items()}
    (row,) = [row for row in rows if wanted.items() <= row.items()]
    return row


def same(cell: str, value: float) -> None:
    assert float(cell) == pytest.approx(value, rel=1e-9)


def loss_at(tokens: str, row: dict[str, str]) -> str:
    """Return our loss, in a table that may have the paper's as well."""
    (cell,) = [row[name] for name in (f"ours at {tokens}", f"at {tokens}") if name in row]
    return cell


def interval(values: list[float]) -> tuple[float, float]:
    half = T95[len(values)] * stdev(values) / sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


@of_table("teaser-final-loss")
def final_loss(made: Made, rows: list[dict[str, str]]) -> None:
    same(loss_at("400k", row_of(rows, method=OURS)), made.mean(OURS))
    same(loss_at("200k", row_of(rows, method="adamw")), made.mean("adamw", "to200"))
    grid = {lr: made.at("adamw", lr, 0, "to400") for lr in GRIDS["adamw"]}
    same(row_of(rows, method="adamw")["best lr"], min(grid, key=grid.__getitem__))


@of_table("teaser-loss-by-value")
def loss_by_value(made: Made, rows: list[dict[str, str]]) -> None:
    same(row_of(rows, method="adamw")["0.004"], made.at("adamw", 0.004, 0, "to400"))
    same(row_of(rows, method=OURS)["0.01"], made.at(OURS, 0.01, 0, "to400"))


@of_table("teaser-speed-up")
def speed_up(made: Made, rows: list[dict[str, str]]) -> None:
    factor = made.speed_up("adamw")
    same(row_of(rows, over="adamw")["in tokens"], factor)
    same(row_of(rows, over="normuon")["in tokens"], made.speed_up("normuon"))
    times = made.pace()
    per_step = median(a / b for a, b in zip(times["adamw"], times[OURS], strict=True))
    same(row_of(rows, over="adamw")["less time on NVIDIA H200"], factor * per_step)
    assert row_of(rows, over="normuon")["less time on NVIDIA H200"] == "", "it was not timed"


@of_table("teaser-pairs")
def pairs(made: Made, rows: list[dict[str, str]]) -> None:
    differences = made.differences("adamw")
    row = row_of(rows, claim=f"{OURS} is below adamw", tokens=400_000.0)
    same(row["mean difference"], fmean(differences))
    low, high = interval(differences)
    assert row["95% interval"] == f"{low:+.4f} to {high:+.4f}"


@of_table("pairs")
def all_pairs(made: Made, rows: list[dict[str, str]]) -> None:
    pairs(made, rows)


@of_table("claims")
def claims(made: Made, rows: list[dict[str, str]]) -> None:
    factors = made.log_speed_ups("adamw")
    low, high = map(exp, interval(factors))
    reason = next(r["reason"] for r in rows if "AdamW" in r["the paper's claim"])
    assert f"speed-up {', '.join(f'{exp(x):.2f}' for x in factors)} where" in reason
    assert f"(95% interval {low:.2f} to {high:.2f})" in reason


@of_table("teaser-training")
def training(made: Made, rows: list[dict[str, str]]) -> None:
    runs = [made.lines(f"{OURS}-lr0.02-seed{seed}-to400") for seed in SEEDS[1:]]
    losses = [fmean(line["loss"] for line in lines[-14:]) for lines in runs]
    row = row_of(rows, method=OURS)
    same(row["training"], fmean(losses))
    same(row["validation"], made.mean(OURS))
    same(row["validation - training"], made.mean(OURS) - fmean(losses))


@of_table("teaser-cooldown-50")
def cooldown(made: Made, rows: list[dict[str, str]]) -> None:
    row = row_of(rows, method="adamw")
    same(row["50% of the steps"], made.mean("adamw", "half"))
    same(row["50% - usual"], made.mean("adamw", "half") - made.mean("adamw"))


@of_table("teaser-pairs-cooldown-50")
def pairs_after_cooldown(made: Made, rows: list[dict[str, str]]) -> None:
    for other in ("adamw", "normuon"):
        row = row_of(rows, claim=f"{OURS} is below {other}")
        same(row["mean difference"], fmean(made.differences(other, "half")))


@of_table("teaser-average")
def average(made: Made, rows: list[dict[str, str]]) -> None:
    ends = {"method": OURS, "lr": 0.02, "evaluated": "after the cooldown", "tokens": 400_000}
    row = row_of(rows, **ends)
    runs = [[made.final(OURS, s, "to400", key) for s in SEEDS] for key in ("val_loss", AVERAGED)]
    same(row["weights"], fmean(runs[0]))
    same(row["average"], fmean(runs[1]))
    same(row["mean difference"], fmean(b - a for a, b in zip(*runs, strict=True)))


@of_table("teaser-final-loss-averaged")
def final_loss_averaged(made: Made, rows: list[dict[str, str]]) -> None:
    same(row_of(rows, method=OURS)["average, 3"], made.mean(OURS, key=AVERAGED))
    same(row_of(rows, method="adamw")["weights"], made.mean("adamw"))


@of_table("teaser-pairs-averaged")
def pairs_averaged(made: Made, rows: list[dict[str, str]]) -> None:
    for other in ("adamw", "normuon"):
        row = row_of(rows, claim=f"{OURS} is below {other}", tokens=400_000.0)
        same(row["mean difference"], fmean(made.differences(other, key=AVERAGED)))


@of_table("teaser-speed-up-averaged")
def speed_up_averaged(made: Made, rows: list[dict[str, str]]) -> None:
    for other in ("adamw", "normuon"):
        row = row_of(rows, window=WINDOW, over=other)
        same(row["in tokens"], made.speed_up(other, AVERAGED))


@of_table("teaser-runs")
def every_trial(made: Made, rows: list[dict[str, str]]) -> None:
    row = row_of(rows, method="adamw", lr=0.004, seed=0)
    same(row["400k tokens"], made.at("adamw", 0.004, 0, "to400"))
    ends = ("", "-to200", "-to400")
    logs = [made.lines(f"adamw-lr0.004-seed0{end}", "timing") for end in ends]
    same(row["tokens/s"], fmean(median(x["tokens_per_second"] for x in log) for log in logs))


@of_table("speedrun-runs")
def every_trial_of_the_speedrun(made: Made, rows: list[dict[str, str]]) -> None:
    for seed in SEEDS:
        same(row_of(rows, seed=seed)["400k tokens"], _speedrun_loss(made, seed))


def _speedrun_loss(made: Made, seed: int) -> float:
    return made.lines(f"run-seed{seed}")[-1]["val_loss"]


@of_table("speedrun-final-loss")
def speedrun_final_loss(made: Made, rows: list[dict[str, str]]) -> None:
    (row,) = rows
    same(loss_at("400k", row), fmean(_speedrun_loss(made, seed) for seed in SEEDS))
    assert row["seeds"] == "3 seeds (0, 1, 2)"


@of_table("speedrun-speedrun")
def speedrun_rule(made: Made, rows: list[dict[str, str]]) -> None:
    mean = fmean(_speedrun_loss(made, seed) for seed in SEEDS)
    same(rows[0]["mean loss"], mean)
    same(rows[0]["(target - mean) * sqrt(n)"], (3.28 - mean) * sqrt(3))


@of_table("single-runs-1-summary")
def single_runs(made: Made, rows: list[dict[str, str]]) -> None:
    for name in ("adamw", OURS):
        last, row = made.lines(name)[-1], row_of(rows, optimizer=name)
        same(row["validation loss"], last["val_loss"])
        same(row["bits per byte"], last["val_bits_per_byte"])
        same(row["of the average, 3"], last[AVERAGED])
        speeds = [x["tokens_per_second"] for x in made.lines(name, "timing")]
        same(row["tokens/s"], median(speeds))


@of_table("pace-1-custom-nvidia-h200", "pace-2-custom-nvidia-h200")
def pace(made: Made, rows: list[dict[str, str]]) -> None:
    """No factor where the device was shared."""
    shared = "time / adamw's" not in rows[0]
    times = made.pace(shared)
    ours = row_of(rows, optimizer=OURS)
    same(ours["ms per step"], 1e3 * median(times[OURS]))
    same(ours["tokens/s"], 4 * 250 / median(times[OURS]))
    if not shared:
        ratios = (a / b for a, b in zip(times[OURS], times["adamw"], strict=True))
        same(ours["time / adamw's"], median(ratios))


def test_every_table_has_a_recomputation(made: Made) -> None:
    written = {path.stem for path in (made.out / "tables").glob("*.csv")}
    assert written == CHECKS.keys()


@pytest.mark.parametrize("name", CHECKS)
def test_two_numbers_of_the_table(made: Made, name: str) -> None:
    CHECKS[name](made, made.rows(name))


def test_one_pace_has_factors_and_the_shared_one_has_none(made: Made) -> None:
    heads = [made.rows(name)[0] for name in sorted(CHECKS) if name.startswith("pace-")]
    assert sorted("time / adamw's" in head for head in heads) == [False, True]


def test_a_pace_on_other_tokens_gives_no_factor(made: Made) -> None:
    """A step with few distinct tokens takes longer: its embedding adds up their gradients."""
    (sweep, *_), _ = collect([made.root / "teaser"], [])
    paces = read_paces([made.root], [])
    for tokens, expected in (("tokens", True), ("others", False)):
        sweep.paces = [replace(pace, data=tokens) for pace in paces]
        table = speed_table(sweep)
        assert table is not None
        assert any("less time" in column for column in table.columns) == expected


def test_two_numbers_of_ls_and_compare(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made.root / "single/runs"
    lines = {name: made.lines(name) for name in ("adamw", OURS)}
    losses = {
        name: {x["tokens"]: x["val_loss"] for x in logged if "val_loss" in x}
        for name, logged in lines.items()
    }
    assert main(["ls", str(folder), "--json"]) == 0
    for run in json.loads(capsys.readouterr().out):
        assert run["last_loss"] == lines[run["optimizer"]][-1]["val_loss"]
        assert run["best_loss"] == min(losses[run["optimizer"]].values())
    assert main(["compare", str(folder / "adamw"), str(folder / OURS), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    for row in compared["losses"]:
        assert row["losses"] == {
            "A": losses["adamw"][row["tokens"]],
            "B": losses[OURS][row["tokens"]],
        }
    assert len(compared["losses"]) == 20
    (best,) = (row for row in compared["reached"] if row["of"] == "B")
    tokens = [x for x, value in losses["adamw"].items() if value <= best["loss"]]
    before = max(x for x in losses["adamw"] if x < tokens[0])
    high, low = losses["adamw"][before], losses["adamw"][tokens[0]]
    share = (high - best["loss"]) / (high - low)
    assert best["tokens"]["A"] == pytest.approx(before * (tokens[0] / before) ** share)
