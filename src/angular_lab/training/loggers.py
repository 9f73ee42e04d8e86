"""Dashboards: TensorBoard, W&B and trackio, in addition to metrics.jsonl.

The library's `integrations.loggers` logs angles to a writer that the user has opened. Here writers
are opened, so that a resumed run continues in the same place and shows every step once.

A dashboard may lag behind metrics.jsonl, after a kill or because it was added later: a logger that
is opened is first sent the lines that it lacks. It may also be ahead, with steps that the resumed
run takes again: W&B and trackio cannot remove them, so they are not sent twice. The run takes the
same steps again, so the values are the same apart from rounding.
"""

import hashlib
import importlib
import io
import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from angular_lab.config.overrides import as_typed, keys, override
from angular_lab.config.spec import Spec
from angular_lab.errors import UserError
from angular_lab.run_folder import SPEC, RunFolder, read_run
from angular_lab.text import command
from angular_lab.training.nonfinite import NotFinite
from angular_lab.training.signals import PREEMPTED, Preempted

MODULES = {"tensorboard": "torch.utils.tensorboard"}  # if it differs from the logger's name
log = logging.getLogger(__name__)


class Logger(Protocol):
    last: int  # the newest step that the dashboard has

    def log(self, step: int, values: dict[str, Any]) -> None: ...
    def close(self, summary: dict[str, Any]) -> None: ...
    @property
    def place(self) -> str: ...


class TensorBoard:
    """Log scalars; hide what an earlier attempt logged after `step`, which is taken again."""

    def __init__(self, spec: Spec, run: RunFolder, step: int) -> None:
        module = _import(MODULES["tensorboard"], "tensorboard")
        self.folder, self.last = run.path, min(step, _shown(run.path)[0])
        _wait_for_later_name(run.path)
        self.writer = module.SummaryWriter(str(run.path), purge_step=self.last + 1)
        self.settings = {key: attrgetter(key)(spec) for key in keys(spec)}
        rows = [f"| {key} | {as_typed(value)} |" for key, value in self.settings.items()]
        self.writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]))

    def log(self, step: int, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(key, value, step)
        self.writer.flush()  # a kill loses what is not on disk, and a resume does not log it again
        self.last = step

    def close(self, summary: dict[str, Any]) -> None:
        """Add the settings and, of a finished run, the final values to the tab HPARAMS."""
        if summary["state"] == "done":
            from torch.utils.tensorboard.summary import hparams

            final = {k: v for k, v in summary.items() if isinstance(v, int | float)}
            texts = {k: v if isinstance(v, int | float) else as_typed(v)
                     for k, v in self.settings.items()}  # fmt: skip
            # not add_hparams, which writes to another folder, as another run
            for record in hparams(texts, {f"final/{key}": 0.0 for key in final}):
                self.writer.file_writer.add_summary(record)
            for key, value in final.items():
                self.writer.add_scalar(f"final/{key}", value, self.last)
        self.writer.close()

    @property
    def place(self) -> str:
        return _tensorboard_place(self.folder)


def _tensorboard_place(folder: Path) -> str:
    return f"view it with {shlex.join(['tensorboard', '--logdir', str(folder)])}"


def _shown(folder: Path) -> tuple[int, int]:
    """Return the last step that TensorBoard shows of a run, and the step of its final values; 0 if
    it shows none."""
    if not any(folder.glob("events.out.tfevents.*")):
        return 0, 0
    module = _import("tensorboard.backend.event_processing.event_accumulator", "tensorboard")
    events = module.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    there = events.Tags()["scalars"]
    # every line has its tokens, while a loss that is not finite is not sent
    last, final = (
        max((event.step for event in events.Scalars(key)), default=0) if key in there else 0
        for key in ("tokens", "final/tokens")
    )
    return last, final


def _wait_for_later_name(folder: Path) -> None:
    """Wait until a new event file sorts after the existing ones.

    TensorBoard reads event files in the order of their names, which begin with the second of their
    creation; an earlier attempt may have stopped within the current second.
    """
    seconds = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    if seconds:
        time.sleep(min(1.0, max(0.0, max(seconds) + 1 - time.time())))


class Wandb:
    """Log to W&B, as one run however often it is resumed.

    Online, W&B says which step comes next. Offline, every attempt has a file of its own, and when
    they are synchronized, a later file replaces an earlier one: each file has to hold all steps.
    """

    def __init__(self, spec: Spec, run: RunFolder, live: bool = True) -> None:
        wandb, dashboard = _import("wandb", "wandb"), spec.dashboard
        # what this machine does now says nothing about a run that was trained earlier
        quiet = {} if live else {"x_disable_stats": True, "console": "off", "silent": True}
        self.run = wandb.init(
            project=dashboard.project, entity=dashboard.entity, group=group_of(spec),
            tags=[*dict.fromkeys([*dashboard.tags, spec.optim.name])], id=run_id(spec, run),
            name=run.path.name, config=spec.to_dict(), resume="allow", settings=quiet,
        )  # fmt: skip
        self.last = 0 if self.run.offline else self.run.starting_step - 1

    def log(self, step: int, values: dict[str, Any]) -> None:
        if step > self.last:
            self.run.log({k: v for k, v in values.items() if k != "step"}, step=step)
            self.last = step

    def close(self, summary: dict[str, Any]) -> None:
        self.run.summary.update(summary)
        if summary["state"] == "stopped":
            self.run.mark_preempting()  # W&B then shows it as preempted, not as crashed
        self.run.finish(exit_code=EXIT_CODES[summary["state"]])

    @property
    def place(self) -> str:
        if not self.run.offline:
            return f"run {self.run.id} at {self.run.url}"
        folder = Path(os.path.relpath(Path(self.run.dir).parent))
        return f"run {self.run.id}; send it with wandb sync {folder}"


# W&B shows a run as finished only if its exit code is 0.
EXIT_CODES = {"done": 0, "diverged": 3, "stopped": PREEMPTED, "failed": 1, "unfinished": 1}


class Trackio:
    """Log to trackio, which has neither ids nor tags: the name carries a part of the id."""

    def __init__(self, spec: Spec, run: RunFolder, live: bool = True) -> None:
        trackio, dashboard = _import("trackio", "trackio"), spec.dashboard
        monitoring = {} if live else {"auto_log_gpu": False, "auto_log_cpu": False}
        with _one_line():
            self.run = trackio.init(
                project=dashboard.project, name=f"{run.path.name}-{run_id(spec, run)[:8]}",
                group=group_of(spec), config=spec.to_dict(), resume="allow", embed=False,
                **monitoring,
            )  # fmt: skip
        self.finish, self.project = trackio.finish, dashboard.project
        self.last = self.run._next_step - 1  # of local and remote runs; there is no public name
        if live:
            log.info("trackio: %s", self.place)

    def log(self, step: int, values: dict[str, Any]) -> None:
        if step > self.last:
            # "step" is a name that trackio reserves, and it warns about each one
            self.run.log({k: v for k, v in values.items() if k != "step"}, step=step)
            self.last = step

    def close(self, summary: dict[str, Any]) -> None:
        with _one_line():
            self.finish()

    @property
    def place(self) -> str:
        return f"run {self.run.name}; view it with trackio show --project {self.project}"


@contextmanager
def _one_line() -> Iterator[None]:
    """Hide what trackio prints to stdout, which is for the run's folder; keep its warnings."""
    with redirect_stdout(io.StringIO()) as printed:
        yield
    for line in printed.getvalue().splitlines():
        if "warning" in line.lower():
            log.warning(line)


def group_of(spec: Spec) -> str:
    """Return the group that was set, else the named run."""
    return spec.dashboard.group or spec.name


def run_id(spec: Spec, run: RunFolder) -> str:
    """Return an id that stays the same when a run is resumed and differs between runs.

    It is a hash of the folder and of the settings with which the run was started, without those of
    the dashboard. Defaults are left out, so that ids stay the same when a new version adds a
    setting.
    """
    if (run.path / SPEC).exists():
        spec = run.info.undo_changes(spec)
    defaults, changeable = Spec(), ("data", "parent", "loggers")
    settings = {
        key: value
        for key in keys(spec)
        if key not in changeable and not key.startswith("dashboard.")
        if (value := attrgetter(key)(spec)) != attrgetter(key)(defaults)
    }
    content = json.dumps([str(run.path.resolve()), settings], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


LOGGERS: dict[str, Callable[[Spec, RunFolder, int], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": lambda spec, run, _: Wandb(spec, run),
    "trackio": lambda spec, run, _: Trackio(spec, run),
}


def check_loggers(spec: Spec) -> None:
    """Raise ValueError if a logger is unknown, not installed or lacks its API key, or if no logger
    supports a setting of the dashboard."""
    for key in ("entity", "tags"):
        value = getattr(spec.dashboard, key)
        if value and "trackio" in _names(spec) and "wandb" not in _names(spec):
            raise UserError(f"dashboard.{key}={as_typed(value)}: only wandb has {key}; omit it")
    for name in _names(spec):
        if name not in LOGGERS:
            raise UserError(f"loggers={name}: it must be one of {', '.join(LOGGERS)}")
        module = _import(MODULES.get(name, name), name)
        if name == "wandb" and not _has_key(module):
            raise UserError(
                "loggers=wandb: W&B has no valid API key; run wandb login, or set WANDB_API_KEY or "
                "WANDB_MODE=offline"
            )


def _has_key(wandb: Any) -> bool:
    """True if W&B has an API key or needs none."""
    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return True
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except wandb.errors.Error:  # a malformed key
        return False


def make_loggers(spec: Spec, run: RunFolder, step: int) -> list[Logger]:
    """Open the loggers of a run that continues after `step`, and send what they lack."""
    loggers = [LOGGERS[name](spec, run, step) for name in _names(spec)]
    for logger in loggers:
        _send(logger, run, step)
    return loggers


def _send(logger: Logger, run: RunFolder, until: int | None = None) -> list[int]:
    """Send the logged lines that the dashboard lacks; return their steps."""
    timing = run.read_timing()
    sent = []
    for line in run.read_metrics():
        if line.step > logger.last and (until is None or line.step <= until):
            logger.log(line.step, {**line.to_dict(), **timing.get(line.step, {})})
            sent.append(line.step)
    return sent


def close_loggers(loggers: Sequence[Logger], run: RunFolder, error: object = None) -> None:
    """Close the loggers of a run that has ended, by an error or after its last step."""
    state = "failed" if error else "done"
    for kind, name in ((Preempted, "stopped"), (NotFinite, "diverged")):
        state = name if isinstance(error, kind) else state
    summary = summary_of(run, state) if loggers else {}
    for logger in loggers:
        logger.close(summary)


def summary_of(run: RunFolder, state: str) -> dict[str, Any]:
    """Return what a dashboard's list of runs shows of a run."""
    read = read_run(run.path, [])
    losses = [*read.values("val_loss").values()] if read else []
    values = {
        "state": state,
        "tokens": read.metrics[-1].tokens if read and read.metrics else None,
        "final_val_loss": losses[-1] if losses and state == "done" else None,
        "best_val_loss": min(losses, default=None),
        "median_tokens_per_second": read.speed if read else None,
    }
    return {key: value for key, value in values.items() if value is not None}


# --- a run that was trained without this dashboard ---


@dataclass(frozen=True)
class Sent:
    """What was sent of a run."""

    logger: str
    steps: list[int]
    last: int  # of the dashboard
    place: str

    def __str__(self) -> str:
        what = f"{self.logger} has all steps up to {self.last} already"
        if self.steps:
            what = f"sent {len(self.steps)} steps, up to {self.last}, to {self.logger}"
        return f"{what}: {self.place}"


def send_run(name: str, folder: Path, assignments: Sequence[str] = ()) -> Sent:
    """Send what a run has logged to a dashboard, without the steps that it has already.

    W&B offline cannot know them: it writes all steps to a new folder, which replaces an earlier
    one when it is synchronized.

    Raises UserError if a process is training the run: two writers would disagree.
    """
    run = RunFolder(folder)
    spec = _with_dashboard(run.read_spec(), name, assignments)
    check_loggers(spec)
    metrics = run.read_metrics()
    if not metrics:
        raise UserError(f"{folder} has not logged a step yet: there is nothing to send")
    if not run.try_claim():
        raise UserError(
            f"{folder} is being trained: send it when it has ended, or stop it and add the "
            f"dashboard with {command('resume', folder, f'loggers={name}')}"
        )
    try:
        read, end = read_run(folder, []), metrics[-1].step
        state = read.status if read else "unfinished"
        shown, final = _shown(folder) if name == "tensorboard" else (0, 0)
        if shown >= end and (state != "done" or final >= end):
            return Sent(name, [], end, _tensorboard_place(folder))
        logger = {"wandb": Wandb, "trackio": Trackio}.get(name)
        opened: Logger = logger(spec, run, False) if logger else TensorBoard(spec, run, end)
        steps, place = _send(opened, run), opened.place
        opened.close(summary_of(run, state))
        return Sent(name, steps, opened.last, place)
    finally:
        run.release()


def _with_dashboard(spec: Spec, name: str, assignments: Sequence[str]) -> Spec:
    for assignment in assignments:
        if not assignment.startswith("dashboard."):
            raise UserError(
                f"log-to ... {assignment}: a run that exists keeps its settings; only dashboard.* "
                "can be given"
            )
    return override(spec, [f"loggers={name}", *assignments])


def _names(spec: Spec) -> list[str]:
    return list(spec.loggers)


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"this logger needs the package {package}: pip install {package}") from None
