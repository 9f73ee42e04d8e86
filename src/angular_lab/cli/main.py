"""The command angular-lab: prepare, train, branch, trunk, sweep, theory, show, sample, export, ...

Exit codes: 0 done, 2 bad input, 3 loss not finite, 4 a worker process died, 75 stopped by SIGTERM,
Ctrl-C or the end of its time (saved: run again, with --resume auto where it is a single run), 130
interrupted by a second Ctrl-C (not saved).
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from angular_lab.cli.cluster import add_ranks
from angular_lab.cli.experiments import add_experiments
from angular_lab.cli.prepare import add_prepare, given_of
from angular_lab.config.named_runs import RECIPES, recipe
from angular_lab.config.overrides import count, override
from angular_lab.config.spec import Spec
from angular_lab.training.signals import (
    INTERRUPTED,
    PREEMPTED,
    WORKER_DIED,
    Preempted,
    Sigterm,
    WorkerDied,
)

BAD_INPUT, NOT_FINITE = 2, 3
AVERAGE = "an average that the run keeps, instead of its weights"
STOPPING = "stopping: saves after this step; press Ctrl-C again to leave at once without saving\n"


def default_folder(spec: Spec) -> Path:
    o = spec.optim
    return Path("runs") / f"{spec.recipe}-{o.name}-lr{o.lr:g}-seed{spec.seed}"


def _is_first_rank() -> bool:
    """From torchrun's environment, without importing torch."""
    return os.environ.get("RANK", "0") == "0"


def _say(folder: Path) -> None:
    """Where a run lies; of many ranks, from one."""
    if _is_first_rank():
        print(folder)


def _resume(text: str) -> str | int:
    if text in ("auto", "never"):
        return text
    try:
        return count(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write auto, never or a step") from None


def _resumption(chosen: str | int) -> dict[str, Any]:
    """What `--resume` means for `runs.train`."""
    return {
        "resume": chosen != "never",
        "resume_step": chosen if isinstance(chosen, int) else None,
    }


def _stoppable() -> Sigterm:
    """The context of a command that trains: SIGTERM and the first Ctrl-C save and exit."""
    return Sigterm(signal.SIGINT, notice=STOPPING if _is_first_rank() else "")


def train(arguments: argparse.Namespace) -> None:
    from angular_lab.training.start import train as run

    spec = override(recipe(arguments.recipe), arguments.overrides)
    out = arguments.out or default_folder(spec)
    with _stoppable():
        run(spec, out, device=arguments.device, **_resumption(arguments.resume))
    _say(out)


def branch(arguments: argparse.Namespace) -> None:
    from angular_lab.run_folder import RunDir
    from angular_lab.training.start import branch_spec
    from angular_lab.training.start import train as run

    parent: Path = arguments.run
    spec = override(branch_spec(RunDir(parent), arguments.at, arguments.decay), arguments.overrides)
    out = arguments.out or parent.with_name(
        f"{parent.name}-at{arguments.at}-decay{arguments.decay}"
    )
    with _stoppable():
        run(spec, out, device=arguments.device, **_resumption(arguments.resume))
    _say(out)


def trunk(arguments: argparse.Namespace) -> None:
    """A constant-rate run and its cool-downs to every horizon."""
    from angular_lab.run_folder import RunDir
    from angular_lab.training.build import Models
    from angular_lab.training.start import branch_spec, trunk_spec
    from angular_lab.training.start import train as run

    base = override(recipe(arguments.recipe), arguments.overrides)
    horizons = sorted(count(text) for text in arguments.horizons.split(","))
    share = base.schedule.decay if arguments.decay is None else arguments.decay
    spec, branches = trunk_spec(base, [(horizon, share) for horizon in horizons])
    out: Path = arguments.out or default_folder(spec).with_name(
        default_folder(spec).name + "-trunk"
    )
    models = Models()  # one for all: compiled once, branch points in memory
    with _stoppable():
        run(spec, out, True, arguments.device, models=models)
        for at, length in branches:
            folder = out.with_name(f"{out.name}-to{at + length}")
            run(branch_spec(RunDir(out), at, length), folder, True, arguments.device, models=models)
            _say(folder)


def show(arguments: argparse.Namespace) -> None:
    from angular_lab.show import describe

    print(describe(override(recipe(arguments.recipe), arguments.overrides)))


def sample(arguments: argparse.Namespace) -> None:
    from angular_lab.run_folder import RunDir
    from angular_lab.sample import check_sampling, generate, load_run, tokenizer_of
    from angular_lab.training.ranks import Ranks
    from angular_lab.training.start import data_folder

    check_sampling(**given_of(arguments, "length", "temperature"))
    model = load_run(arguments.run, average=arguments.average, step=arguments.step)
    spec = RunDir(arguments.run).read_spec()
    tokenizer = tokenizer_of(data_folder(spec, Ranks(0, 1, next(model.parameters()).device)))
    given = given_of(arguments, "length", "temperature", "seed")
    print(generate(model, tokenizer, arguments.prompt, **given))


def export(arguments: argparse.Namespace) -> None:
    from angular_lab.data.prepare import TOKENIZER
    from angular_lab.export.huggingface import export as write
    from angular_lab.run_folder import RunDir
    from angular_lab.sample import load_run, tokenizer_of
    from angular_lab.training.start import data_place

    model = load_run(arguments.run, average=arguments.average, step=arguments.step)
    spec = RunDir(arguments.run).read_spec()
    data = data_place(spec)
    tokenizer = tokenizer_of(data) if (data / TOKENIZER).exists() else None
    write(model, spec.model, arguments.out, tokenizer)
    if tokenizer is None or tokenizer.for_transformers is None:
        why = "bytes" if tokenizer else f"no {TOKENIZER} in {data}"
        print(f"without a tokenizer: {why}", file=sys.stderr)
    print(arguments.out)


def speedrun(arguments: argparse.Namespace) -> None:
    from angular_lab.export.speedrun import export_speedrun

    print(export_speedrun(arguments.out))


def demo(arguments: argparse.Namespace) -> None:
    from angular_lab.demo import run_demo

    print(run_demo(arguments.out, arguments.steps))


def recipes(_: argparse.Namespace) -> None:
    for name, make in RECIPES.items():
        m = make().model
        print(f"{name:12}  {m.kind}: {m.layers} layers, width {m.width}, sequence {m.sequence}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="angular-lab", description="The pre-training lab.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, function: object, summary: str, *first: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary)
        for argument in first:
            sub.add_argument(argument, type=Path if argument == "run" else str)
        sub.set_defaults(function=function)
        return sub

    _add_runs(add)
    sub = add("show", show, "print a run before it runs", "recipe")
    sub.add_argument("overrides", nargs="*", metavar="key=value")
    sub = add("sample", sample, "text from a run", "run", "prompt")
    sub.add_argument("--length", type=int)
    sub.add_argument("--temperature", type=float)
    sub.add_argument("--seed", type=int)
    sub.add_argument("--average", type=float, help=AVERAGE)
    sub.add_argument("--step", type=count, help="a checkpoint's step; default: the newest")
    sub = add("export", export, "weights in the layout of Hugging Face transformers", "run")
    sub.add_argument("--out", type=Path, required=True)
    sub.add_argument("--average", type=float, help=AVERAGE)
    sub.add_argument("--step", type=count, help="a checkpoint's step; default: the newest")
    sub = add("export-speedrun", speedrun, "one script for the speedrun's optimization track")
    sub.add_argument("--out", type=Path, required=True)
    add_prepare(add)
    sub = add("demo", demo, "four optimizers on text this machine has, and a report")
    sub.add_argument("--out", type=Path, default=Path("demo"))
    sub.add_argument("--steps", type=int, default=0)
    add("recipes", recipes, "list the named runs")
    add_experiments(add)
    add_ranks(add)
    return parser


def _add_runs(add: Callable[..., argparse.ArgumentParser]) -> None:
    for name, function, summary, first in (
        ("train", train, "train a recipe", "recipe"),
        ("branch", branch, "cool down from a step that a run kept", "run"),
        ("trunk", trunk, "a constant-rate run and its cool-downs to several horizons", "recipe"),
    ):
        sub = add(name, function, summary, first)
        sub.add_argument("overrides", nargs="*", metavar="key=value")
        sub.add_argument("--out", type=Path, help="run folder")
        if name != "trunk":
            sub.add_argument(
                "--resume", type=_resume, default="never", metavar="auto|never|STEP",
                help="continue from the newest checkpoint, or from that of a step",
            )  # fmt: skip
        sub.add_argument("--device", default="", help="cpu or cuda; default: what there is")
        if name == "branch":
            sub.add_argument("--at", type=count, required=True, help="step to start from")
            sub.add_argument("--decay", type=count, required=True, help="steps of the cool-down")
        if name == "trunk":
            sub.add_argument("--horizons", required=True, help="steps, comma-separated")
            sub.add_argument("--decay", type=float, help="share of each; default: the recipe's")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    arguments.began = time.monotonic()
    settings = [word for word in rest if "=" in word and not word.startswith("-")]
    taken = settings if "overrides" in arguments else []
    if strange := [word for word in rest if word not in taken]:
        parser.error(f"unrecognized: {' '.join(strange)}")
    if settings:  # key=value may also stand behind an option
        arguments.overrides = [*arguments.overrides, *settings]
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    try:
        return _attempt(arguments)
    except Preempted as stopped:
        _report(f"stopped: {stopped}")
        return PREEMPTED
    except WorkerDied as error:
        print(f"error: {error}", file=sys.stderr)
        return WORKER_DIED
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as interrupt:
        _report(": ".join(["interrupted", *interrupt.args]))
        return INTERRUPTED


def _attempt(arguments: argparse.Namespace) -> int:
    from angular_lab.training.nonfinite import NotFinite  # slow: it imports torch
    from angular_lab.training.ranks import stop_ranks

    try:
        arguments.function(arguments)
    except NotFinite as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_FINITE
    finally:
        stop_ranks()
    return 0


def _report(text: str) -> None:
    """Print what is the same on all ranks, once."""
    if _is_first_rank():
        print(text, file=sys.stderr)
