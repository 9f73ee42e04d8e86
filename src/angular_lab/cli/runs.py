"""The commands about single runs: train, check, resume, extend, branch, trunk, show, sample,
export, demo, named-runs.

Commands import what they need when they run: torch takes seconds.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from angular_lab.config.branches import steps_or_share
from angular_lab.config.named_runs import NAMED_RUNS, named_run
from angular_lab.config.overrides import count, help_text, override
from angular_lab.config.spec import CHANGEABLE, Spec
from angular_lab.errors import UserError
from angular_lab.log import is_first_rank
from angular_lab.run_folder import RUNS, RunFolder
from angular_lab.status.screen import CLEAR, Shown

if TYPE_CHECKING:
    from angular_lab.training.build import Models
    from angular_lab.training.signals import Sigterm

AVERAGE = "evaluate an average that the run keeps, instead of its weights"
STOPPING = "stopping: saves after this step; press Ctrl-C again to exit at once without saving\n"
STEP = "step of a checkpoint; default: the newest"
log = logging.getLogger(__name__)


def _spec(arguments: argparse.Namespace) -> Spec:
    sampling = getattr(arguments, "sample_every", None)
    more = [] if sampling is None else [f"sample_every={sampling}"]
    return override(named_run(arguments.named_run), [*arguments.overrides, *more])


def _print_folder(folder: Path) -> None:
    if is_first_rank():
        print(folder)


def _stoppable() -> "Sigterm":
    """Return the context of a command that trains: SIGTERM and the first Ctrl-C save and exit."""
    from angular_lab.training.signals import Sigterm

    notice = f"{CLEAR * sys.stderr.isatty()}{STOPPING}"  # in place of the status line
    return Sigterm(signal.SIGINT, notice=notice if is_first_rank() else "")


def _resume(text: str) -> str | int:
    if text in ("auto", "never"):
        return text
    try:
        return count(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write auto, never or a step") from None


def horizons(text: str) -> list[int]:
    try:
        steps = sorted({count(part) for part in text.split(",")})
    except ValueError:
        steps = []
    if not steps or steps[0] < 2:
        raise argparse.ArgumentTypeError(
            f"'{text}': write numbers of steps of at least 2, separated by commas, as in 1000,2000"
        )
    return steps


def _points(text: str) -> list[int | Fraction]:
    return [_point(part) for part in text.split(",")]


def _point(text: str) -> int | Fraction:
    try:
        return steps_or_share(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text}: write steps, or a share like 80%") from None


def _train(
    spec: Spec,
    out: Path,
    arguments: argparse.Namespace,
    models: "Models | None" = None,
    shown: Shown = "all",
) -> None:
    from angular_lab.training.start import train

    resume = arguments.resume
    step = resume if isinstance(resume, int) else None
    if resume == "auto":
        _note_fresh_start(out)
    _refuse(spec, out, arguments.device)
    with _stoppable():
        train(
            spec, out, resume != "never", arguments.device, models=models, resume_step=step,
            shown=shown,
        )  # fmt: skip
    _print_folder(out)


def _refuse(spec: Spec, out: Path, device: str) -> None:
    """Refuse a new run that cannot work, before anything is written."""
    from angular_lab.check import refuse

    if is_first_rank() and not RunFolder(out).started:
        refuse(spec, out, device)


def check(arguments: argparse.Namespace) -> int:
    """Check a run; return 2 if it cannot work."""
    from angular_lab.check import check as examine
    from angular_lab.check import passed, to_json, to_text
    from angular_lab.training.start import default_folder

    spec = _spec(arguments)
    out = arguments.out or default_folder(spec)
    findings = examine(spec, out, arguments.device)
    if is_first_rank():
        print(to_json(out, findings) if arguments.json else to_text(out, findings))
    return 0 if passed(findings) else 2


def train(arguments: argparse.Namespace) -> None:
    from angular_lab.training.start import default_folder

    spec = _spec(arguments)
    _train(spec, arguments.out or default_folder(spec), arguments)


def branch(arguments: argparse.Namespace) -> None:
    """Make a cooldown from each point. All are checked before the first one starts."""
    from angular_lab.training.build import Models
    from angular_lab.training.start import branch_specs

    specs = branch_specs(arguments.run, arguments.at, arguments.decay)
    if len(specs) > 1 and (arguments.out or isinstance(arguments.resume, int)):
        option = "--out" if arguments.out else "--resume STEP"
        raise UserError(
            f"{option} is for one branch, and --at has {len(specs)} points: leave it out"
        )
    models, shown = Models(), "all" if len(specs) == 1 else "steps"
    for spec in specs:
        name = f"{arguments.run.name}-at{spec.parent_step}-decay{spec.decay_steps}"
        out = arguments.out or arguments.run.with_name(name)
        _train(override(spec, arguments.overrides), out, arguments, models, shown)


def resume(arguments: argparse.Namespace) -> None:
    from angular_lab.training.start import resume

    with _stoppable():
        resume(arguments.run, arguments.overrides, arguments.device, arguments.start, "all")
    _print_folder(arguments.run)


def extend(arguments: argparse.Namespace) -> None:
    from angular_lab.training.start import extend

    with _stoppable():
        extend(arguments.run, arguments.to, arguments.overrides, arguments.device, "all")
    _print_folder(arguments.run)


def trunk(arguments: argparse.Namespace) -> None:
    """Train at a constant learning rate, then cool down to every horizon."""
    from angular_lab.config.branches import branch_point, cooldown_spec, trunk_spec
    from angular_lab.training.build import Models
    from angular_lab.training.start import data_id, default_folder, extend_trunk, train
    from angular_lab.trunks import trunk_folder

    base = _spec(arguments)
    share = base.schedule.decay if arguments.decay is None else arguments.decay
    starts = {horizon: branch_point(horizon, share) for horizon in arguments.horizons}
    spec = trunk_spec(base, list(starts.values()))
    out: Path = arguments.out or trunk_folder(Path(RUNS), spec, data_id(spec))
    models = Models()  # one for all: compiled once, branch points in memory
    _refuse(spec, out, arguments.device)
    with _stoppable():
        extend_trunk(spec, out, arguments.device, models, "all")
        for horizon, start in starts.items():
            cooldown = cooldown_spec(spec, str(out), start, horizon)
            named = out.with_name(f"{out.name}-to{horizon}")
            folder = named if arguments.out else default_folder(cooldown)
            if (run := RunFolder(folder)).started:  # it may have left another trunk
                cooldown = replace(cooldown, parent=run.read_spec().parent)
            train(cooldown, folder, True, arguments.device, models=models)
            _print_folder(folder)


def show(arguments: argparse.Namespace) -> None:
    from angular_lab.cli.inspect import show_run

    if arguments.named_run not in NAMED_RUNS and show_run(arguments):
        return
    from angular_lab.show import describe

    print(describe(_spec(arguments)))


def sample(arguments: argparse.Namespace) -> None:
    from angular_lab.data.evaluated_text import tokenizer_of
    from angular_lab.sample import check_sampling, generate, load_run
    from angular_lab.training.start import prepared_data

    names = ("length", "temperature", "seed")
    settings = {key: x for key in names if (x := getattr(arguments, key)) is not None}
    check_sampling(**{key: x for key, x in settings.items() if key != "seed"})
    model = load_run(arguments.run, average=arguments.average, step=arguments.step)
    tokenizer = tokenizer_of(prepared_data(RunFolder(arguments.run).read_spec()))
    print(generate(model, tokenizer, arguments.prompt, **settings))


def export(arguments: argparse.Namespace) -> None:
    from angular_lab.data.evaluated_text import tokenizer_of
    from angular_lab.data.prepare import TOKENIZER
    from angular_lab.export.huggingface import check_target
    from angular_lab.export.huggingface import export as write
    from angular_lab.sample import load_run
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
        ("check", check, "check a run before it starts: memory and time of a real step, disk, "
         "data, schedule", "named_run"),
        ("branch", branch, "cool down from checkpoints of a run", "run"),
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
        if name == "check":
            sub.add_argument("--json", action="store_true", help="print JSON instead of text")
        _add_options(sub, name)
    _add_continuing(add, device)
    _add_uses(add)


def _add_options(sub: argparse.ArgumentParser, name: str) -> None:
    """Add the options that only some of the commands have."""
    if name in ("train", "branch"):
        sub.add_argument(
            "--resume", type=_resume, default="never", metavar="auto|never|STEP",
            help="continue from the newest checkpoint, or from that of a step",
        )  # fmt: skip
    if name == "train":
        sub.add_argument("--sample-every", metavar="STEPS", help="generate text every N steps; "
                         "the same as sample_every=STEPS")  # fmt: skip
    if name == "branch":
        sub.add_argument(
            "--at",
            type=_points,
            required=True,
            metavar="POINT,POINT",
            help="where to start: steps, or shares of the run's steps like 80%%",
        )
        sub.add_argument("--decay", type=_point, metavar="STEPS|SHARE",
                         help="of a cooldown: steps, or a share like 20%% of all steps to its "
                         "end; default: the run's schedule.decay")  # fmt: skip
    if name == "trunk":
        sub.add_argument("--horizons", type=horizons, required=True, metavar="STEPS,STEPS",
                         help="where the cooldowns end")  # fmt: skip
        sub.add_argument("--decay", type=float, help="share of each; default: the run's own")


def _add_continuing(add: Add, device: dict[str, Any]) -> None:
    summary = "continue a stopped run with its own settings; key=value changes how it is run"
    longer = "continue a run at a constant learning rate to more steps"
    for name, function, text in (("resume", resume, summary), ("extend", extend, longer)):
        sub = add(name, function, text, "run", epilog=changeable())
        sub.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
        sub.add_argument("--device", **device)
        if name == "resume":
            from_help = "continue from that checkpoint, and replace what came after it"
            sub.add_argument("--from", dest="start", type=count, metavar="STEP", help=from_help)
        else:
            sub.add_argument("--to", type=count, metavar="STEPS", required=True,
                             help="steps of the run in all")  # fmt: skip


def changeable() -> str:
    """List the settings that `resume` may change."""
    rows = help_text(Spec()).splitlines()
    chosen = [row for row in rows if row.split("=")[0].strip() in CHANGEABLE]
    return "\n".join(["settings that may change, and their usual defaults:", *chosen])


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
