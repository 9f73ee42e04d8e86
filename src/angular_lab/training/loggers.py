"""Dashboards: TensorBoard, W&B and trackio, in addition to metrics.jsonl.

The library's `integrations.loggers` logs angles to a writer that the user has opened. Here writers
are opened, so that a resumed run continues in the same place and shows every step once.
"""

import hashlib
import importlib
import json
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from angular_lab.config.overrides import as_typed, keys
from angular_lab.config.spec import Spec
from angular_lab.errors import UserError
from angular_lab.run_folder import SPEC, RunFolder

MODULES = {"tensorboard": "torch.utils.tensorboard"}  # if it differs from the logger's name


class Logger(Protocol):
    def log(self, step: int, values: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Log scalars; hide what an earlier attempt logged after `step`, which is taken again."""

    def __init__(self, spec: Spec, run: RunFolder, step: int) -> None:
        module = _import(MODULES["tensorboard"], "tensorboard")
        _wait_for_later_name(run.path)
        self.writer = module.SummaryWriter(str(run.path), purge_step=step + 1)

    def log(self, step: int, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(key, value, step)
        self.writer.flush()  # a kill loses what is not on disk, and a resume does not log it again

    def close(self) -> None:
        self.writer.close()


def _wait_for_later_name(folder: Path) -> None:
    """Wait until a new event file sorts after the existing ones.

    TensorBoard reads event files in the order of their names, which begin with the second of their
    creation; an earlier attempt may have stopped within the current second.
    """
    seconds = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    if seconds:
        time.sleep(min(1.0, max(0.0, max(seconds) + 1 - time.time())))


class Tracker:
    """Log to W&B or trackio, which share an interface: init, log, finish."""

    def __init__(self, module: str, spec: Spec, run: RunFolder) -> None:
        self.module, dashboard = _import(module, module), spec.dashboard
        identity = {"name": f"{run.path.name}-{run_id(spec, run)[:8]}"}  # trackio has no ids
        if module == "wandb":
            tags = list(dashboard.tags)
            identity = {"name": run.path.name, "id": run_id(spec, run)}
            identity |= {"entity": dashboard.entity, "tags": tags or None}
        self.module.init(
            project=dashboard.project, group=dashboard.group, config=spec.to_dict(),
            resume="allow", **identity,
        )  # fmt: skip

    def log(self, step: int, values: dict[str, Any]) -> None:
        # trackio warns at every step about a key that it reserves
        self.module.log({k: v for k, v in values.items() if k != "step"}, step=step)

    def close(self) -> None:
        self.module.finish()


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
    "wandb": lambda spec, run, _: Tracker("wandb", spec, run),
    "trackio": lambda spec, run, _: Tracker("trackio", spec, run),
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
    """Open the loggers of a run that continues after `step`."""
    return [LOGGERS[name](spec, run, step) for name in _names(spec)]


def _names(spec: Spec) -> list[str]:
    return list(spec.loggers)


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"this logger needs the package {package}: pip install {package}") from None
