"""Log angles, radii and kappa to a dashboard with one line.

    log_angles(model, optimizer, SummaryWriter("runs/a"))      # TensorBoard
    log_angles(model, optimizer, wandb.init(project="p"))      # Weights & Biases
    log_angles(model, optimizer, trackio)                      # after trackio.init(project="p")

This measures and logs every `every` steps of any torch optimizer. None of the three packages is
required: writers are recognized by their methods.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from angular_muown.engine import Engine
from angular_muown.monitor import AngleMonitor

Send = Callable[[dict[str, float], int], Any]  # (values by name, optimizer step)


def log_angles(
    model: nn.Module,
    optimizer: Optimizer,
    writer: Any,
    *,
    every: int = 50,
    prefix: str = "muown",
    per_parameter: bool = True,
) -> "AngleLog":
    """Log the measurements of `AngleMonitor` as `prefix/angle_mean`, `prefix/kappa` and so on.

    Args:
        writer: a TensorBoard SummaryWriter, a W&B run or the wandb module, a trackio run or the
            trackio module, or any function of (values, step). None measures without logging: pass
            it on all ranks but the first, because measuring sharded weights takes every rank.
        every: number of steps between measurements.
        per_parameter: also log `prefix/angle_mean/<parameter>` and so on, not only overall values.
    """
    send = sender(writer, prefix)  # first: an invalid writer must leave no hooks behind
    return AngleLog(AngleMonitor(model, optimizer, every), send, prefix, per_parameter)


class AngleLog:
    """Send the measurements of a monitor as soon as they are available, until `close()`."""

    def __init__(
        self, monitor: AngleMonitor, send: Send, prefix: str, per_parameter: bool = True
    ) -> None:
        self.monitor, self.send = monitor, send
        self.prefix, self.per_parameter = prefix, per_parameter
        # Runs after the monitor's hook, which was registered earlier.
        self._hook = monitor.optimizer.register_step_post_hook(self._write)

    def close(self) -> None:
        self._hook.remove()
        self.monitor.close()

    def _write(self, optimizer: Optimizer, *_: Any) -> None:
        if values := self.monitor.read():
            keys = (key for key in values if self.per_parameter or "/" not in key)
            self.send({f"{self.prefix}/{key}": values[key] for key in keys}, self._step(optimizer))

    def _step(self, optimizer: Optimizer) -> int:
        """Return the steps taken; this package's optimizers include those before a resume."""
        if isinstance(optimizer, Engine):
            return max(int(group["step"]) for group in optimizer.param_groups)
        return self.monitor.steps


def sender(writer: Any, prefix: str) -> Send:
    """Return a function that logs to the writer."""
    if writer is None:
        return lambda values, step: None
    if hasattr(writer, "add_scalar"):  # TensorBoard
        return lambda values, step: [writer.add_scalar(k, v, step) for k, v in values.items()]
    if hasattr(writer, "define_metric"):  # W&B
        # W&B numbers its rows itself, and only upwards. So each measurement is a complete row with
        # the optimizer's step as its x axis, independent of what the user logs.
        axis = f"{prefix}/step"
        writer.define_metric(axis, hidden=True)
        writer.define_metric(f"{prefix}/*", step_metric=axis)
        return lambda values, step: writer.log({**values, axis: step}, commit=True)
    if hasattr(writer, "log"):  # trackio
        return lambda values, step: writer.log(values, step=step)
    if callable(writer):
        return writer
    raise TypeError(
        f"writer={writer!r} has neither add_scalar (TensorBoard) nor log (W&B, trackio): pass such "
        "a writer, a function of (values, step), or None"
    )
