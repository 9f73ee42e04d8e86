"""`make demo`: train four optimizers on a corpus that every machine has, and open a report."""

import logging
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from angular_lab.config.named_runs import named_run
from angular_lab.config.spec import Spec
from angular_lab.data.evaluated_text import tokenizer_of
from angular_lab.models import build_model
from angular_lab.report.report import summary, text_table, write_report
from angular_lab.run_folder import RunFolder
from angular_lab.sample import generate, load_run
from angular_lab.training.ranks import Ranks
from angular_lab.training.start import data_folder, train

log = logging.getLogger(__name__)
# name, lr, aux_lr, weight decay: the best of each grid in results/demo_grid.json. One seed is not
# evidence: these runs do not rank the optimizers.
RUNS = (
    ("adamw", 2e-3, 2e-3, 0.1),
    ("muon", 0.02, 2e-3, 0.1),
    ("muown", 0.04, 8e-3, 0.0),
    ("angular_muown", 0.04, 4e-3, 0.0),
)
OURS = RUNS[-1][0]
COOLDOWN = 0.5  # share of the steps, as in the library's wsd_schedule
PROMPT = "def "


def demo_spec(
    name: str, lr: float, aux_lr: float, weight_decay: float, steps: int | None = None
) -> Spec:
    """Return the run of one optimizer: nano, with the cooldown that the documentation advises."""
    base = named_run("nano")
    steps = base.steps if steps is None else steps
    optim = replace(base.optim, name=name, lr=lr, aux_lr=aux_lr, weight_decay=weight_decay)
    warmup = min(base.schedule.warmup, steps)
    schedule = replace(base.schedule, warmup=warmup, decay=COOLDOWN)
    return replace(base, optim=optim, steps=steps, schedule=schedule)


def run_demo(out: Path, steps: int | None = None) -> Path:
    """Train the four runs, print their table and samples, and return the path of the report."""
    specs = [demo_spec(*run, steps) for run in RUNS]
    _say_what_comes(specs)
    folders = []
    for i, spec in enumerate(specs, 1):
        optim = spec.optim
        log.info("\nRun %d of %d: %s, lr %g", i, len(specs), optim.name, optim.lr)
        folders.append(train(spec, out / "runs" / f"{optim.name}-{spec.steps}", resume=True).path)
    size = f"One seed, {specs[0].steps} steps, a tiny model"
    notes = [
        f"{size}: this demonstrates the lab, not which optimizer is best.",
        _about_kappa(specs[-1]),
    ]
    print("\n" + text_table([summary(RunFolder(folder)) for folder in folders]))
    print("".join(f"\n{note}" for note in notes))
    before, after = _samples(specs[-1], folders[-1])
    print(f"\nbefore training:\n{before!r}\n\nafter training with {OURS}:\n{after}\n")
    texts = [("A sample before training", before), (f"... and after training with {OURS}", after)]
    page = write_report(folders, out, "Four optimizers on Python's standard library", texts, notes)
    print(f"The curves: {out / 'curves.svg'}. The report about all four runs:")
    if sys.stdout.isatty():
        webbrowser.open(page.resolve().as_uri())
    return page


def _say_what_comes(specs: Sequence[Spec]) -> None:
    spec = specs[0]
    log.info(
        "Training a transformer of %d layers, width %d, on the source code of Python's standard "
        "library: %d optimizers, %d steps each, about a minute each on one CPU core. The first run "
        "also prepares the text.",
        spec.model.layers, spec.model.width, len(specs), spec.steps,
    )  # fmt: skip


def _about_kappa(spec: Spec) -> str:
    """Say how far kappa fell, and what lowers the angle instead."""
    return (
        f"In the {OURS} run kappa falls from 1 to {spec.kappa(spec.steps):.2f}: it takes thousands "
        f"of steps. In a run this short the cooldown, the last {COOLDOWN:.0%} of the steps, lowers "
        "the angle."
    )


def _samples(spec: Spec, folder: Path) -> tuple[str, str]:
    """Return the continuation of a prompt before and after the training of a run."""
    tokenizer = tokenizer_of(data_folder(spec, Ranks(0, 1, torch.device("cpu"))))
    untrained = build_model(spec.model)
    untrained.init_weights(spec.seed)
    return generate(untrained, tokenizer, PROMPT), generate(load_run(folder), tokenizer, PROMPT)
