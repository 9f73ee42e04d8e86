"""The commands eval and log-to: a run's weights on other text, its numbers in a dashboard."""

import argparse
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from angular_lab.cli.runs import AVERAGE, STEP
from angular_lab.config.overrides import count
from angular_lab.errors import UserError

if TYPE_CHECKING:
    from angular_lab.evaluations import Evaluation

RUN = "run folder, or an id that `angular-lab ls` shows"
BATCH = 32  # sequences per forward pass, at most, if the run does not say


def evaluate(arguments: argparse.Namespace) -> None:
    """Evaluate a checkpoint on each text; nothing is recorded if one of them cannot be read."""
    from angular_lab.evaluations import record
    from angular_lab.inspect.listing import find_run
    from angular_lab.report.tables import text_table

    folder = find_run(arguments.run)
    results = _evaluations(folder, arguments)
    record(folder, results)
    if arguments.json:
        print(json.dumps([result.to_dict() for result in results], indent=2))
    else:
        print(text_table([result.row for result in results]))


def _evaluations(folder: Path, arguments: argparse.Namespace) -> list["Evaluation"]:
    from angular_lab.data.evaluated_text import read_text
    from angular_lab.evaluations import Evaluation
    from angular_lab.run_folder import RunFolder
    from angular_lab.sample import load_run
    from angular_lab.training import checkpoint
    from angular_lab.training.evaluate import autocast_of, text_loss
    from angular_lab.training.ranks import choose_device
    from angular_lab.training.start import prepared_data

    run, window = RunFolder(folder), arguments.average
    spec = run.read_spec()
    limit = arguments.tokens or spec.eval_tokens
    data = prepared_data(spec)
    texts = [read_text(path, data, spec.model.vocabulary, limit) for path in arguments.on]
    device = choose_device(arguments.device)
    model = load_run(folder, str(device), window, arguments.step)
    step = arguments.step or max(checkpoint.steps(run.checkpoints))
    autocast = autocast_of(spec, device)
    batch, results = spec.micro_batch or min(spec.batch, BATCH), []
    for text in texts:
        loss = text_loss(model, text.ids, spec.model.sequence, batch, autocast)
        named = str(text.path), text.fingerprint
        results.append(Evaluation(step, window, *named, loss, text.tokens, text.bytes))
    return results


def log_to(arguments: argparse.Namespace) -> None:
    """Send runs to a dashboard; all are found before the first one is sent."""
    from angular_lab.inspect.listing import find_run
    from angular_lab.training.loggers import send_run

    words = [*arguments.runs, *arguments.overrides]
    assignments = [word for word in words if word.startswith("dashboard.") and "=" in word]
    runs = [word for word in words if word not in assignments]
    if not runs:
        raise UserError(f"log-to {arguments.dashboard}: give at least one run folder")
    for folder in [find_run(text) for text in runs]:
        sent = send_run(arguments.dashboard, folder, [*_group(folder), *assignments])
        print(f"{folder.name}: {sent}")


def _group(folder: Path) -> list[str]:
    """Return the setting that groups a run under its sweep, if it has one and no group is set."""
    from angular_lab.run_folder import RunFolder
    from angular_lab.sweeps.sweep_file import SWEEPS, SweepRecord

    if RunFolder(folder).read_spec().dashboard.group is None:
        for path in sorted((folder.resolve().parents[1] / SWEEPS).glob("*.json")):
            with suppress(UserError):  # a report says what is wrong with it
                trials = SweepRecord.read(path).trials
                if any(folder.resolve().name in trial.all_runs for trial in trials):
                    return [f"dashboard.group={path.stem}"]
    return []


def _tokens(text: str) -> int:
    try:
        number = count(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: write an integer of at least 1, as in 100k")
    return number


def _dashboard(text: str) -> str:
    from angular_lab.training.loggers import LOGGERS  # imports torch, which is slow

    if text not in LOGGERS:
        raise argparse.ArgumentTypeError(f"{text}: it must be one of {', '.join(LOGGERS)}")
    return text


def add_evaluate(add: Callable[..., argparse.ArgumentParser]) -> None:
    summary = "evaluate a run on other text: loss, bits per byte, perplexity"
    sub = add("eval", evaluate, summary)
    sub.add_argument("run", help=RUN)
    sub.add_argument("--on", type=Path, action="append", required=True, metavar="TEXT",
                     help="a prepared folder, of which the validation split counts, or a file or "
                     "folder of text; several --on are evaluated one after the other")  # fmt: skip
    sub.add_argument("--step", type=count, help=STEP)
    sub.add_argument("--average", type=float, metavar="WINDOW", help=AVERAGE)
    sub.add_argument("--tokens", type=_tokens, metavar="N",
                     help="tokens to predict, at most; default: the run's eval_tokens")  # fmt: skip
    sub.add_argument("--device", default="", help="cpu or cuda; default: cuda if available")
    sub.add_argument("--json", action="store_true", help="print JSON instead of text")
    summary = "send a dashboard the logged steps that it lacks; W&B offline gets all steps"
    sub = add("log-to", log_to, summary)
    sub.add_argument("dashboard", type=_dashboard, help="tensorboard, wandb or trackio")
    sub.add_argument("runs", nargs="+", metavar="run", help=f"{RUN}; or dashboard.KEY=VALUE")
    sub.set_defaults(overrides=[])
