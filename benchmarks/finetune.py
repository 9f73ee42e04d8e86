"""Fine-tuning: AdamW, AngularMuown and Muon on another text, all weights or LoRA adapters.

    python benchmarks/finetune.py runs/s-angular_muown-... --json results/finetune.json

The base is a finished run of the lab. Its model is fine-tuned on every third source file of the
running Python's standard library, with the run's own tokenizer; a fifth of those files is held out.
All methods have a warm-up over a tenth of the steps, then a linear fall to zero, the same clipping
and the same batches. The seed sets the order of the batches and the adapters' start.

The first seed chooses the settings: one after the other, each over three values around its start,
with more values until the best is inside; the learning rate once more at the end. The other seeds
judge. The file holds every trial, with the loss on the held-out files and on the base's own
validation text, which shows what the model forgets.
"""

import argparse
import json
import math
import multiprocessing
import platform
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from finetune_trial import METHODS, RANK, Job, Settings, Trial, describe_base, run_trial

from angular_lab.data.corpus import stdlib_documents
from angular_lab.data.evaluated_text import tokenizer_of
from angular_lab.data.prepare import prepare
from angular_lab.data.shards import Manifest
from angular_lab.experiments.statistics import paired_differences, student_interval
from angular_lab.run_folder import RunFolder, git_state, write_atomically
from angular_lab.training.start import data_place

EXTENSIONS = 4  # further values on one side of a grid
Losses = Callable[[list[Settings]], list[float]]

# Written before the first run.
PREDICTION = (
    "Full: AngularMuown and AdamW within 0.02 nat of each other, AngularMuown ahead on the model "
    "that it pre-trained, AdamW level or ahead on the one that AdamW pre-trained. Its best lr is a "
    "third to a tenth of pre-training's, aux_lr that of AdamW, radius_lr below lr. LoRA: the two "
    "within 0.02 nat, both 0.1 to 0.3 above full fine-tuning. Muon full: like AngularMuown. "
    "Forgetting follows the loss on the new text: the lower the one, the higher the other."
)


# -- the search ------------------------------------------------------------------------------------


@dataclass
class Study:
    """All trials of a benchmark, and the file that they are written to."""

    arguments: argparse.Namespace
    pool: Executor
    content: dict[str, Any]
    trials: list[Trial] = field(default_factory=list)

    def job(self, method: str, seed: int) -> Job:
        a = self.arguments
        sizes = (a.epochs, a.batch, a.eval_tokens, a.device, a.steps, a.rank)
        return Job(str(a.base), str(a.text), method, seed, *sizes)

    def run(self, method: str, seed: int, wanted: list[Settings]) -> list[Trial]:
        job = self.job(method, seed)
        waiting = [self.pool.submit(run_trial, job, settings) for settings in wanted]
        done = [future.result() for future in waiting]
        for trial in done:
            print(_line(trial), flush=True)
        self.trials += done
        self.write()
        return done

    def write(self) -> None:
        content = self.content | {"summary": summary(self.trials), "trials": self.trials}
        write_atomically(self.arguments.json, json.dumps(content, indent=1) + "\n")

    def search(self, name: str) -> None:
        """Choose the settings on the first seed, then run the others."""
        method, first, *others = METHODS[name], *self.arguments.seeds
        known: dict[tuple[float, ...], Trial] = {}

        def losses(wanted: list[Settings]) -> list[float]:
            new = [s for s in wanted if tuple(s.values()) not in known]
            for trial in self.run(name, first, new):
                known[tuple(trial["settings"].values())] = trial
            return [_loss(known[tuple(s.values())]) for s in wanted]

        best = dict(method.start)
        for axis in method.axes:
            best = closed(best, axis, method.factors[axis], losses, self.arguments.extend)
        for seed in others:
            self.run(name, seed, [best])


def closed(
    start: Settings,
    axis: str,
    factor: float,
    losses: Losses,
    extensions: int = EXTENSIONS,
) -> Settings:
    """Return the best along one axis: three values, and more while the best is at an edge."""
    grid = [start | {axis: _rounded(start[axis] * factor**i)} for i in (-1, 0, 1)]
    found = losses(grid)
    for _ in range(extensions):
        best = grid[found.index(min(found))]
        if best not in (grid[0], grid[-1]):
            break
        side = 1 / factor if best is grid[0] else factor
        further = best | {axis: _rounded(best[axis] * side)}
        grid = [further, *grid] if best is grid[0] else [*grid, further]
        found = losses(grid)
    return grid[found.index(min(found))]


def _rounded(value: float) -> float:
    """The same value from either side."""
    return float(f"{value:.4g}")


def _loss(trial: Trial) -> float:
    return math.inf if trial["loss"] is None else trial["loss"]


def _line(trial: Trial) -> str:
    settings = " ".join(f"{key}={value:g}" for key, value in trial["settings"].items())
    return (
        f"{trial['method']:34} seed {trial['seed']} "
        f"{_loss(trial):.4f} prose {trial['prose_loss'] or math.inf:.4f} "
        f"{trial['seconds']:5.1f} s  {settings}"
    )


# -- the summary -----------------------------------------------------------------------------------


def summary(trials: list[Trial]) -> list[dict[str, Any]]:
    """Return every method at its best, on the seeds that judge, with the differences from AdamW in
    the same mode."""
    rows = []
    for method in dict.fromkeys(t["method"] for t in trials):
        own, adamw = (_judged(trials, name) for name in (method, f"AdamW, {_mode(method)}"))
        tried = [t for t in trials if t["method"] == method]
        first = [t for t in tried if t["seed"] == tried[0]["seed"]]
        row: dict[str, Any] = {
            "method": method,
            "settings": min(first, key=_loss)["settings"],
            "trials_of_the_first_seed": len(first),
            "seeds": [*own],
        }
        rows.append(row | {key: _statistics(own, adamw, key) for key in ("loss", "prose_loss")})
    return rows


def _mode(method: str) -> str:
    return method.split(", ")[1]


def _judged(trials: list[Trial], method: str) -> dict[int, Trial]:
    """Return the trials of the seeds that judge; nothing while the search is running."""
    own = [t for t in trials if t["method"] == method]
    return {t["seed"]: t for t in own if t["seed"] != own[0]["seed"] and t["loss"] is not None}


def _statistics(own: dict[int, Trial], adamw: dict[int, Trial], key: str) -> dict[str, Any]:
    if not own:
        return {}
    values = {seed: trial[key] for seed, trial in own.items()}
    found: dict[str, Any] = {
        "mean": fmean(values.values()),
        "interval": student_interval([*values.values()]),
    }
    pairs = paired_differences(values, {seed: trial[key] for seed, trial in adamw.items()})
    if pairs.differences:
        found["minus_adamw"] = pairs.mean
        found["minus_adamw_interval"] = student_interval(pairs.differences)
    return found


# -- the command -----------------------------------------------------------------------------------


def prepare_text(out: Path, base: Path) -> Manifest:
    """Return the text's manifest. A folder that is prepared already is taken as it is."""
    manifest = Manifest.load(out)
    if manifest is None:
        manifest = prepare(
            islice(stdlib_documents(), 0, None, 3),
            tokenizer_of(data_place(RunFolder(base).read_spec())),
            out,
            val_fraction=0.2,
            progress=False,
            source=f"every third file of the standard library of Python "
            f"{platform.python_version()}",
        )
    return manifest


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", type=Path, help="a finished run's folder")
    parser.add_argument("--text", type=Path, default=Path("data/code"), help="prepared on demand")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--steps", type=int, help="instead of epochs")
    parser.add_argument("--rank", type=int, default=RANK, help="of the adapters")
    parser.add_argument("--eval-tokens", type=int, default=2**19)
    parser.add_argument("--extend", type=int, default=EXTENSIONS, help="values beyond an edge")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    manifest = prepare_text(arguments.text, arguments.base)
    content = {
        "command": " ".join(["python", *sys.argv]),
        "git": git_state(),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "prediction": PREDICTION,
        "text": manifest.arguments["source"],
        "text_fingerprint": manifest.fingerprint,
        "text_tokens": {name: split.tokens for name, split in manifest.splits.items()},
    }
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(arguments.processes, context) as pool,
        ThreadPoolExecutor(len(arguments.methods)) as threads,
    ):
        study = Study(arguments, pool, content)
        content["base"] = pool.submit(describe_base, study.job("AdamW, full", 0)).result()
        for future in [threads.submit(study.search, method) for method in arguments.methods]:
            future.result()


if __name__ == "__main__":
    main()
