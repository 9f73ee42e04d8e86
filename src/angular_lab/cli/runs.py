"""The commands about single runs: train, branch, trunk, show, sample, export, demo, named-runs.

Commands import what they need when they run: torch takes seconds.
"""

import argparse
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from angular_lab.config.named_runs import NAMED_RUNS, named_run
from angular_lab.config.overrides import count, help_text, override
from angular_lab.config.spec import Spec
from angular_lab.log import is_first_rank

if TYPE_CHECKING:
    from angular_lab.training.signals import Sigterm

AVERAGE = "evaluate an average that the run keeps, instead of its weights"
STOPPING = "stopping: saves after this step; press Ctrl-C again to exit at once without saving\n"
STEP = "step of a checkpoint; default: the newest"
log = logging.getLogger(__name__)


def _spec(arguments: argparse.Namespace) -> Spec:
    return override(named_run(arguments.named_run), arguments.overrides)


def _print_folder(folder: Path) -> None:
    if is_first_rank():
        print(folder)


def _stoppable() -> "Sigterm":
    """Return the context of a command that trains: SIGTERM and the first Ctrl-C save and exit."""
    from angular_lab.training.signals import Sigterm

    return Sigterm(signal.SIGINT, notice=STOPPING if is_first_rank() else "")


def _resume(text: str) -> str | int:
    if text in ("auto", "never"):
        return text
    try:
        return count(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write auto, never or a step") from None


def _horizons(text: str) -> list[int]:
    try:
        steps = sorted({count(part) for part in text.split(",")})
    except ValueError:
        steps = []
    if not steps or steps[0] < 2:
        raise argparse.ArgumentTypeError(
            f"'{text}': write numbers of steps of at least 2, separated by commas, as in 1000,2000"
        )
    return steps


def _train(spec: Spec, out: Path, arguments: argparse.Namespace) -> None:
    from angular_lab.training.start import train

    resume = arguments.resume
    step = resume if isinstance(resume, int) else None
    if resume == "auto":
        _note_fresh_start(out)
    with _stoppable():
        train(spec, out, resume != "never", arguments.device, resume_step=step)
    _print_folder(out)


def train(arguments: argparse.Namespace) -> None:
    from angular_lab.training.start import default_folder

    spec = _spec(arguments)
    _train(spec, arguments.out or default_folder(spec), arguments)


def branch(arguments: argparse.Namespace) -> None:
    from angular_lab.run_folder import RunFolder
    from angular_lab.training.start import branch_spec

    parent: Path = arguments.run
    spec = branch_spec(RunFolder(parent), arguments.at, arguments.decay)
    name = f"{parent.name}-at{arguments.at}-decay{arguments.decay}"
    out = arguments.out or parent.with_name(name)
    _train(override(spec, arguments.overrides), out, arguments)


def trunk(arguments: argparse.Namespace) -> None:
    """Train at a constant learning rate, then cool down to every horizon."""
    from angular_lab.config.branches import branch_point, cooldown_spec, trunk_spec
    from angular_lab.training.build import Models
    from angular_lab.training.start import default_folder, train

    base = _spec(arguments)
    share = base.schedule.decay if arguments.decay is None else arguments.decay
    starts = {horizon: branch_point(horizon, share) for horizon in arguments.horizons}
    spec = trunk_spec(base, list(starts.values()))
    out: Path = arguments.out or default_folder(spec)
    models = Models()  # one for all: compiled once, branch points in memory
    with _stoppable():
        train(spec, out, True, arguments.device, models=models)
        for horizon, start in starts.items():
            cooldown = cooldown_spec(spec, str(out), start, horizon)
            named = out.with_name(f"{out.name}-to{horizon}")
            folder = named if arguments.out else default_folder(cooldown)
            train(cooldown, folder, True, arguments.device, models=models)
            _print_folder(folder)


def show(arguments: argparse.Namespace) -> None:
    from angular_lab.cli.inspect import show_run

    if arguments.named_run not in NAMED_RUNS and show_run(arguments):
        return
    from angular_lab.show import describe

    print(describe(_spec(arguments)))


def sample(arguments: argparse.Namespace) -> None:
    from angular_lab.run_folder import RunFolder
    from angular_lab.sample import check_sampling, generate, load_run, tokenizer_of
    from angular_lab.training.start import prepared_data

    names = ("length", "temperature", "seed")
    settings = {key: x for key in names if (x := getattr(arguments, key)) is not None}
    check_sampling(**{key: x for key, x in settings.items() if key != "seed"})
    model = load_run(arguments.run, average=arguments.average, step=arguments.step)
    tokenizer = tokenizer_of(prepared_data(RunFolder(arguments.run).read_spec()))
    print(generate(model, tokenizer, arguments.prompt, **settings))


def export(arguments: argparse.Namespace) -> None:
    from angular_lab.data.prepare import TOKENIZER
    from angular_lab.export.huggingface import check_target
    from angular_lab.export.huggingface import export as write
    from angular_lab.run_folder import RunFolder
    from angular_lab.sample import load_run, tokenizer_of
    from angular_lab.training.start import data_place

    check_target(arguments.out, arguments.overwrite)
    model = load_run(arguments.run, average=arguments.average, step=arguments.step)
    spec = RunFolder(arguments.run).read_spec()
    data = data_place(spec)
    tokenizer = tokenizer_of(data) if (data / TOKENIZER).exists() else None
    write(model, spec.model, arguments.out, tokenizer, arguments.overwrite)
    if tokenizer is None or tokenizer.for_transformers is None:
        why = "it is bytes" if tokenizer else f"{data} has no {TOKENIZER}"
        log.warning("exported without a tokenizer: %s", why)
    print(arguments.out)


def export_speedrun(arguments: argparse.Namespace) -> None:
    from angular_lab.export.speedrun import export_speedrun

    print(export_speedrun(arguments.out, arguments.overwrite))


def demo(arguments: argparse.Namespace) -> None:
    from angular_lab.demo import run_demo

    print(run_demo(arguments.out, arguments.steps))


def _note_fresh_start(out: Path) -> None:
    from angular_lab.run_folder import RunFolder

    if not RunFolder(out).started:
        log.info("%s: nothing to resume, it starts from the beginning", out)


def list_named_runs(_: argparse.Namespace) -> None:
    for name, make in NAMED_RUNS.items():
        m = make().model
        print(f"{name:12}  {m.kind}: {m.layers} layers, width {m.width}, sequence {m.sequence}")


Add = Callable[..., argparse.ArgumentParser]


def add_commands(add: Add) -> None:
    keys = f"settings and their defaults:\n{help_text(Spec())}"
    device: dict[str, Any] = {"default": "", "help": "cpu or cuda; default: cuda if available"}
    for name, function, summary, first in (
        ("train", train, "train a named run", "named_run"),
        ("branch", branch, "cool down from a checkpoint of a run", "run"),
        ("trunk", trunk, "train at a constant learning rate, and cool down to several horizons",
         "named_run"),
        ("show", show, "describe a run before it starts: settings, size, time; or, for a run "
         "folder, what differs from its named run", "named_run"),
    ):  # fmt: skip
        sub = add(name, function, summary, first, epilog=keys)
        sub.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
        if name != "show":
            sub.add_argument("--out", type=Path, help="run folder; default: one of its own in runs")
            sub.add_argument("--device", **device)
        if name in ("train", "branch"):
            sub.add_argument(
                "--resume", type=_resume, default="never", metavar="auto|never|STEP",
                help="continue from the newest checkpoint, or from that of a step",
            )  # fmt: skip
        if name == "branch":
            sub.add_argument("--at", type=count, required=True, help="step to start from")
            sub.add_argument("--decay", type=count, required=True, help="steps of the cooldown")
        if name == "trunk":
            sub.add_argument("--horizons", type=_horizons, required=True, metavar="STEPS,STEPS",
                             help="where the cooldowns end")  # fmt: skip
            sub.add_argument("--decay", type=float, help="share of each; default: the run's own")
    _add_uses(add)


def _add_uses(add: Add) -> None:
    sub = add("sample", sample, "generate text from a run", "run", "prompt")
    sub.add_argument("--length", type=int, help="number of tokens")
    sub.add_argument("--temperature", type=float, help="0: always the likeliest token")
    sub.add_argument("--seed", type=int, help="of the random choice of tokens")
    sub.add_argument("--average", type=float, metavar="WINDOW", help=AVERAGE)
    sub.add_argument("--step", type=count, help=STEP)
    sub = add(
        "export", export, "write the weights in the layout of Hugging Face transformers", "run"
    )
    sub.add_argument("--out", type=Path, required=True, help="folder for the weights")
    sub.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    sub.add_argument("--average", type=float, metavar="WINDOW", help=AVERAGE)
    sub.add_argument("--step", type=count, help=STEP)
    summary = "write one self-contained script for the speedrun's optimization track"
    sub = add("export-speedrun", export_speedrun, summary)
    sub.add_argument("--out", type=Path, required=True, help="file to write")
    sub.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    sub = add("demo", demo, "train four optimizers on this machine's Python code, and report")
    sub.add_argument("--out", type=Path, default=Path("demo"), help="default: demo")
    sub.add_argument("--steps", type=int, help="per run; default: those of nano")
    add("named-runs", list_named_runs, "list the named runs")
