"""Adapters for dashboards. JSON lines are written always; these are on top."""

import hashlib
import importlib
import json
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from angular_lab.config.overrides import keys
from angular_lab.config.spec import Spec
from angular_lab.run_folder import RunFolder

MODULES = {"tensorboard": "torch.utils.tensorboard"}  # where the name is not the module's


class Logger(Protocol):
    def log(self, step: int, values: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Hides what an earlier attempt logged after `step`: those steps are taken again."""

    def __init__(self, spec: Spec, run: RunFolder, step: int) -> None:
        module = _import(MODULES["tensorboard"], "tensorboard")
        _wait_for_later_name(run.path)
        self.writer = module.SummaryWriter(str(run.path), purge_step=step + 1)

    def log(self, step: int, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(key, value, step)
        self.writer.flush()  # a kill loses what is not on disk, and resuming does not log it again

    def close(self) -> None:
        self.writer.close()


def _wait_for_later_name(folder: Path) -> None:
    """Event files are read in the order of their names, which begin with the second they are made
    in: wait for the next second after an attempt that was stopped within this one."""
    made = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    if made:
        time.sleep(min(1.0, max(0.0, max(made) + 1 - time.time())))


class Tracker:
    """W&B and trackio share this interface: init, log, finish."""

    def __init__(self, module: str, spec: Spec, run: RunFolder) -> None:
        self.module, shown = _import(module, module), spec.dashboard
        own = {"name": f"{run.path.name}-{run_id(spec, run)[:8]}"}  # trackio knows runs by name
        if module == "wandb":
            tags = list(shown.tags)
            own = {"name": run.path.name, "id": run_id(spec, run)}
            own |= {"entity": shown.entity, "tags": tags or None}
        self.module.init(
            project=shown.project, group=shown.group, config=spec.to_dict(),
            resume="allow", **own,
        )  # fmt: skip

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.module.log(values, step=step)

    def close(self) -> None:
        self.module.finish()


def run_id(spec: Spec, run: RunFolder) -> str:
    """Return the same id whenever a run is resumed, and another for any other run: a hash of the
    folder and of the settings that a resumed run keeps. Defaults are left out, so that a new
    setting changes no id."""
    usual, changing = Spec(), ("data", "parent", "loggers")
    settings = {
        key: value
        for key in keys(spec)
        if key not in changing and not key.startswith("dashboard.")
        if (value := attrgetter(key)(spec)) != attrgetter(key)(usual)
    }
    content = json.dumps([str(run.path.resolve()), settings], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


LOGGERS: dict[str, Callable[[Spec, RunFolder, int], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": lambda spec, run, _: Tracker("wandb", spec, run),
    "trackio": lambda spec, run, _: Tracker("trackio", spec, run),
}


def check_loggers(spec: Spec) -> None:
    """Raise ValueError if a logger is unknown, not installed or without its key, or if none has a
    use for a setting of the dashboard."""
    for key in ("entity", "tags"):
        value = getattr(spec.dashboard, key)
        if value and "trackio" in _names(spec) and "wandb" not in _names(spec):
            raise ValueError(f"dashboard.{key}={value}: only wandb has {key}; leave it empty")
    for name in _names(spec):
        if name not in LOGGERS:
            raise ValueError(f"loggers={spec.loggers}: '{name}' is not one of {', '.join(LOGGERS)}")
        module = _import(MODULES.get(name, name), name)
        if name == "wandb" and not _has_key(module):
            raise ValueError(
                f"loggers={spec.loggers}: W&B has no valid API key; run wandb login, or set "
                "WANDB_API_KEY or WANDB_MODE=offline"
            )


def _has_key(wandb: Any) -> bool:
    """True if W&B can log: with a key, or without a server."""
    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return True
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except wandb.errors.Error:  # a key that cannot be one
        return False


def make_loggers(spec: Spec, run: RunFolder, step: int) -> list[Logger]:
    """For a run that continues after `step`."""
    return [LOGGERS[name](spec, run, step) for name in _names(spec)]


def _names(spec: Spec) -> list[str]:
    return list(spec.loggers)


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"this logger needs the package {package}: pip install {package}"
        ) from None
