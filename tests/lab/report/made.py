"""Runs and sweeps written by hand, as training leaves them, and readers of a report's files."""

import csv
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

from angular_lab.config.spec import ModelSpec, OptimSpec, ScheduleSpec, Spec
from angular_lab.experiments import published as paper
from angular_lab.run_folder import RUNS, RunFolder
from angular_lab.sweeps.sweep_file import SWEEPS, ArmRecord, SweepRecord, TrialRecord

OURS = "angular_muown"
HORIZONS = (100, 200, 300, 400)
Losses = Mapping[int, float]  # by horizon
Grid = Mapping[float, Mapping[int, Losses | None]]  # by value and seed; None: diverged
Line = dict[str, Any]


def spec_of(name: str = OURS, **values: Any) -> Spec:
    base = Spec(
        batch=4,
        steps=HORIZONS[-1],
        model=ModelSpec(vocabulary=257, sequence=250, layers=1, width=8, heads=1),
        optim=OptimSpec(name=name, weight_decay=0.1 if name == "adamw" else 0.0),
        schedule=ScheduleSpec(warmup=10),
    )
    return replace(base, **values)


def write_lines(
    folder: Path, spec: Spec, lines: Iterable[Line], data: str = "tokens", speed: float = 1000.0
) -> Path:
    """Write a finished run with these metrics; tokens follow from the step."""
    folder.mkdir(parents=True, exist_ok=True)
    run = RunFolder(folder)
    run.write_spec(spec, {"device": "cpu"}, data)
    for line in lines:
        run.append(run.metrics_path, {"tokens": line["step"] * spec.tokens_per_step, **line})
        run.append(run.timing_path, {"step": line["step"], "tokens_per_second": speed})
    run.finish()
    return folder


def write_run(folder: Path, spec: Spec, final: float, **values: Any) -> Path:
    """Write a run whose loss falls to `final` at the last step."""

    def line(step: int) -> Line:
        late = (step - spec.parent_step) / (spec.steps - spec.parent_step)
        values: Line = {
            "step": step,
            "loss": final + 1.01 - late,
            "lr": spec.optim.lr,
            "angle_mean": 0.5 / sqrt(step),
            "row_norm_mean": sqrt(step),
        }
        if step % 50 == 0 or step == spec.steps:
            values["val_loss"] = final if step == spec.steps else final + 1 - late
        return values

    steps = range(spec.parent_step + 10, spec.steps + 1, 10)
    return write_lines(folder, spec, map(line, steps), **values)


def sweep_file(root: Path) -> Path:
    """Return the only sweep of a store."""
    (path,) = (root / SWEEPS).glob("*.json")
    return path


def edit_sweep(root: Path, **values: Any) -> None:
    """Set fields of a sweep's record; a function is applied to the present value."""
    path = sweep_file(root)
    record = SweepRecord.read(path)
    changed = {k: v(getattr(record, k)) if callable(v) else v for k, v in values.items()}
    replace(record, **changed).write(path)


def write_record(
    root: Path,
    trials: Sequence[TrialRecord],
    optimizers: Mapping[str, str] | None = None,
    name: str = "",
    **values: Any,
) -> Path:
    """Write the file of a sweep over the learning rate, named as its store unless given.

    `optimizers` are by arm. Ours is expected below every other arm.
    """
    optimizers = optimizers or {OURS: OURS}
    ours = next((arm for arm in optimizers if arm.partition(",")[0] == OURS), None)
    grids = {arm: sorted({t.value for t in trials if t.arm == arm}) for arm in optimizers}
    record = SweepRecord(
        experiment="teaser",
        scale="s",
        title="A sweep for a test",
        data="tokens",
        horizons=tuple(sorted({horizon for trial in trials for horizon in trial.runs})),
        seeds=tuple(dict.fromkeys(trial.seed for trial in trials)),
        arms=tuple(ArmRecord(x, optimizers[x], "optim.lr", tuple(grids[x])) for x in optimizers),
        trials=tuple(trials),
        chosen={},
        ours=ours,
        pairs=tuple((ours, arm) for arm in optimizers if arm != ours) if ours else (),
    )
    replace(record, **values).write(root / SWEEPS / f"{name or root.name}.json")
    return root


def write_sweep(
    root: Path,
    methods: Mapping[str, tuple[str, Grid]],
    batches: Mapping[str, int] | None = None,
    **values: Any,
) -> Path:
    """Write a store with a sweep of (optimizer, grid) by arm; seed 0 chooses."""
    trials, chosen = [], {}
    for arm, (optimizer, grid) in methods.items():
        ends: dict[float, float] = {}
        for value, by_seed in grid.items():
            for seed, losses in by_seed.items():
                name = f"{''.join(c if c.isalnum() else '-' for c in arm)}-lr{value:g}-seed{seed}"
                optim = replace(spec_of(optimizer).optim, lr=value)
                batch = (batches or {}).get(arm, spec_of().batch)
                spec = spec_of(optimizer, seed=seed, optim=optim, batch=batch)
                runs, trunk = _write_trial(root / RUNS, name, spec, losses)
                trials.append(TrialRecord(arm, value, seed, runs, trunk))
                if losses and seed == 0:
                    ends[value] = losses[max(losses)]
        if ends:
            chosen[arm] = min(ends, key=ends.__getitem__)
    optimizers = {arm: optimizer for arm, (optimizer, _) in methods.items()}
    return write_record(root, trials, optimizers, **{"chosen": chosen, **values})


def _write_trial(
    store: Path, name: str, spec: Spec, losses: Losses | None
) -> tuple[dict[int, str], str | None]:
    """Write the runs of a trial; return their names by horizon, and the trunk's."""
    if losses is None:
        write_run(store / name, spec, 9.0)
        RunFolder(store / name).record_divergence("the loss is nan")
        return {spec.steps: name}, None
    if len(losses) == 1:
        write_run(store / name, replace(spec, steps=max(losses)), losses[max(losses)])
        return {max(losses): name}, None
    constant = replace(spec.schedule, kind="constant")
    trunk = replace(spec, steps=int(0.9 * max(losses)), schedule=constant)
    write_run(store / name, trunk, min(losses.values()) + 0.2)
    for h, loss in losses.items():
        branch = replace(spec, steps=h, parent=name, parent_step=int(0.9 * h))
        write_run(store / f"{name}-to{h}", branch, loss)
    return {h: f"{name}-to{h}" for h in losses}, name


def paper_teaser(root: Path, seeds: tuple[int, ...] = (0,)) -> Path:
    """Write the paper's figure as if we had run it, the same on every seed."""
    methods = {
        name: (
            name,
            {row.best_rate: {s: dict(zip(HORIZONS, row.losses, strict=True)) for s in seeds}},
        )
        for name, row in paper.TEASER.items()
    }
    return write_sweep(root, methods)


def choosing(root: Path, **values: Any) -> Path:
    """Write two methods with grids; seed 0 chooses, 1 and 2 judge."""
    ours: Grid = {
        0.01: {0: {100: 3.2, 200: 3.1}},
        0.02: {0: {100: 3.0, 200: 2.8}, 1: {100: 3.04, 200: 2.84}, 2: {100: 3.02, 200: 2.82}},
        0.04: {0: {100: 3.1, 200: 2.9}},
    }
    theirs: Grid = {
        0.001: {0: {100: 3.3, 200: 3.2}},
        0.002: {0: {100: 3.1, 200: 3.0}, 1: {100: 3.13, 200: 2.94}, 2: {100: 3.11, 200: 2.92}},
    }
    return write_sweep(root, {"adamw": ("adamw", theirs), OURS: (OURS, ours)}, **values)


def one_horizon(root: Path) -> Path:
    """Write AngularMuown at one learning rate, and AdamW over a grid of another setting."""
    ours: Grid = {0.02: {0: {400: 2.9}, 1: {400: 2.92}, 2: {400: 2.94}}}
    theirs: Grid = {0.008: {0: {400: 3.2}}, 0.016: {0: {400: 3.0}, 1: {400: 3.02}, 2: {400: 3.0}}}
    write_sweep(root, {OURS: (OURS, ours), "adamw": ("adamw", theirs)}, experiment="tuned-adamw")

    def change(arm: ArmRecord) -> ArmRecord:
        return replace(arm, axis="optim.aux_lr") if arm.label == "adamw" else arm

    edit_sweep(root, arms=lambda arms: tuple(map(change, arms)))
    return root


def edit_json(path: Path, **values: Any) -> None:
    """Set values of a JSON file; a function is applied to the present value."""
    content = json.loads(path.read_text())
    changed = {k: v(content[k]) if callable(v) else v for k, v in values.items()}
    path.write_text(json.dumps(content | changed))


def table(out: Path, name: str) -> list[dict[str, str]]:
    with open(out / "tables" / f"{name}.csv") as file:
        return list(csv.DictReader(file))


def visible(page: Path) -> str:
    """Return the page's words, without figures, script and style."""
    text = re.sub(r"<(svg|script|style).*?</\1>", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", text)))
