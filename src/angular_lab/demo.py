"""`make demo`: train four optimizers on a corpus that every machine has, and open a report."""

import logging
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path

import torch

from angular_lab.config.named_runs import named_run
from angular_lab.config.spec import Spec
from angular_lab.models import build_model
from angular_lab.report.report import summary, text_table, write_report
from angular_lab.run_folder import RunFolder
from angular_lab.sample import generate, load_run, tokenizer_of
from angular_lab.training.ranks import Ranks
from angular_lab.training.start import data_folder, train

log = logging.getLogger(__name__)
# name, lr, aux_lr, weight decay: the best of each grid in results/demo_grid.json (for AdamW, the
# lower of two equally good learning rates: the higher one diverged once). 300 steps are few for
# kappa to decay, and one seed is not evidence: these runs do not rank the optimizers.
RUNS = (
    ("adamw", 2e-3, 2e-3, 0.1),
    ("muon", 0.01, 4e-3, 0.1),
    ("muown", 0.02, 8e-3, 0.0),
    ("angular_muown", 0.04, 4e-3, 0.0),
)
PROMPT = "def "


def demo_spec(
    name: str, lr: float, aux_lr: float, weight_decay: float, steps: int | None = None
) -> Spec:
    base = named_run("nano")
    optim = replace(base.optim, name=name, lr=lr, aux_lr=aux_lr, weight_decay=weight_decay)
    steps = base.steps if steps is None else steps
    schedule = replace(base.schedule, warmup=min(base.schedule.warmup, steps))
    return replace(base, optim=optim, steps=steps, schedule=schedule)


def run_demo(out: Path, steps: int | None = None) -> Path:
    folders = []
    for name, lr, aux_lr, weight_decay in RUNS:
        spec = demo_spec(name, lr, aux_lr, weight_decay, steps)
        log.info("\n%s, lr %g", name, lr)
        folders.append(train(spec, out / "runs" / f"{name}-{spec.steps}", resume=True).path)
    data = data_folder(spec, Ranks(0, 1, torch.device("cpu")))
    tokenizer = tokenizer_of(data)
    untrained = build_model(spec.model)
    untrained.init_weights(spec.seed)
    before = generate(untrained, tokenizer, PROMPT)
    after = generate(load_run(folders[-1]), tokenizer, PROMPT)
    size = f"One seed, {spec.steps} steps, a tiny model"
    note = f"{size}: this demonstrates the lab, not which optimizer is best."
    print("\n" + text_table([summary(RunFolder(folder)) for folder in folders]))
    print(f"\n{note}")
    print(f"\nbefore training:\n{before!r}\n\nafter training with {RUNS[-1][0]}:\n{after}")
    texts = [
        ("A sample before training", before),
        (f"... and after training with {RUNS[-1][0]}", after),
    ]
    page = write_report(folders, out, "Four optimizers on Python's standard library", texts, [note])
    if sys.stdout.isatty():
        webbrowser.open(page.resolve().as_uri())
    return page
