"""Adapters for dashboards. JSON lines are written always; these are on top."""

import importlib
from typing import Any, Protocol

from angular_lab.rundir import RunDir
from angular_lab.spec import Spec


class Logger(Protocol):
    def log(self, step: int, values: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, spec: Spec, run: RunDir) -> None:
        self.writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run.path))

    def log(self, step: int, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        self.writer.close()


class Tracker:
    """W&B and trackio share this interface: init, log, finish."""

    def __init__(self, module: str, spec: Spec, run: RunDir) -> None:
        self.module = _import(module, module)
        name = run.path.name
        resume = {"id": name, "resume": "allow"} if module == "wandb" else {"resume": "allow"}
        self.module.init(project="angular-lab", name=name, config=spec.to_dict(), **resume)

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.module.log(values, step=step)

    def close(self) -> None:
        self.module.finish()


LOGGERS = {
    "tensorboard": TensorBoard,
    "wandb": lambda spec, run: Tracker("wandb", spec, run),
    "trackio": lambda spec, run: Tracker("trackio", spec, run),
}


def make_loggers(spec: Spec, run: RunDir) -> list[Logger]:
    names = [name for name in spec.loggers.split(",") if name]
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"loggers={spec.loggers}: '{name}' is not one of {', '.join(LOGGERS)}")
    return [LOGGERS[name](spec, run) for name in names]


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"this logger needs the package {package}: pip install {package}"
        ) from None
