"""Angles, radii and kappa to a dashboard, with one line.

    log_angles(model, optimizer, SummaryWriter("runs/a"))      # TensorBoard
    log_angles(model, optimizer, wandb.init(project="p"))      # Weights & Biases
    log_angles(model, optimizer, trackio)                      # after trackio.init(project="p")

From then on every `every`-th step of the optimizer, any torch optimizer, is measured and written.
Needs none of the three: a writer is known by its methods.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from angular_muown.engine import Engine
from angular_muown.monitor import AngleMonitor

Send = Callable[[dict[str, float], int], Any]  # values by name, the optimizer's step


def log_angles(
    model: nn.Module,
    optimizer: Optimizer,
    writer: Any,
    *,
    every: int = 50,
    prefix: str = "muown",
    per_parameter: bool = True,
) -> "AngleLog":
    """Write what `AngleMonitor` measures, as `prefix/angle_mean`, `prefix/kappa` and so on.

    Args:
        writer: a TensorBoard SummaryWriter, a run of W&B or the module wandb, a run of trackio or
            the module trackio, any function (values, step); None measures and writes nothing,
            which is for ranks other than the first: measuring sharded weights takes all of them.
        every: steps from one measurement to the next.
        per_parameter: `prefix/angle_mean/<parameter>` as well, not only means over all of them.
    """
    send = sender(writer, prefix)  # first: what is refused leaves no hooks behind
    return AngleLog(AngleMonitor(model, optimizer, every), send, prefix, per_parameter)


class AngleLog:
    """A monitor whose measurements are sent as soon as they are there; `close()` ends it."""

    def __init__(
        self, monitor: AngleMonitor, send: Send, prefix: str, per_parameter: bool = True
    ) -> None:
        self.monitor, self.send = monitor, send
        self.prefix, self.per_parameter = prefix, per_parameter
        # After the monitor's own hook, which was registered before.
        self._hook = monitor.optimizer.register_step_post_hook(self._write)

    def close(self) -> None:
        self._hook.remove()
        self.monitor.close()

    def _write(self, optimizer: Optimizer, *_: Any) -> None:
        if values := self.monitor.read():
            kept = (key for key in values if self.per_parameter or "/" not in key)
            named = {f"{self.prefix}/{key}": values[key] for key in kept}
            self.send(named, self._step(optimizer))

    def _step(self, optimizer: Optimizer) -> int:
        """How many steps were taken: for this package's optimizers also before a resume."""
        if isinstance(optimizer, Engine):
            return max(int(group["step"]) for group in optimizer.param_groups)
        return self.monitor.steps


def sender(writer: Any, prefix: str) -> Send:
    """How a writer takes values."""
    if writer is None:
        return lambda values, step: None
    if hasattr(writer, "add_scalar"):  # TensorBoard
        return lambda values, step: [writer.add_scalar(k, v, step) for k, v in values.items()]
    if hasattr(writer, "define_metric"):  # W&B
        # Its own steps only go up, and rows are theirs to number: so each measurement is a row
        # that is complete, whatever the user logs and when, with the optimizer's step as its axis.
        axis = f"{prefix}/step"
        writer.define_metric(axis, hidden=True)
        writer.define_metric(f"{prefix}/*", step_metric=axis)
        return lambda values, step: writer.log({**values, axis: step}, commit=True)
    if hasattr(writer, "log"):  # trackio
        return lambda values, step: writer.log(values, step=step)
    if callable(writer):
        return writer
    raise TypeError(
        f"writer={writer!r} has neither add_scalar (TensorBoard) nor log (W&B, trackio), and is no "
        "function (values, step)"
    )
