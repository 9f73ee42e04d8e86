"""Lightning: a per-step schedule for one optimizer, and the angle monitor as a callback.

    def configure_optimizers(self):
        optimizer = AngularMuown.for_model(self, lr=0.02)
        steps = int(self.trainer.estimated_stepping_batches)
        return per_step(optimizer, wsd_schedule(optimizer, steps))

    Trainer(callbacks=[AngleMonitorCallback(every=50)], gradient_clip_val=1.0, ...)

Fabric needs none of this: `fabric.setup(model, optimizer)` works with the optimizer directly.
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from angular_muown.integrations.loggers import AngleLog, log_angles


def per_step(
    optimizer: Optimizer, schedule: LRScheduler | Callable[[int], float]
) -> dict[str, Any]:
    """Return a value for `configure_optimizers` that steps the schedule after every optimizer step.

    Lightning steps a bare scheduler only once per epoch.

    Args:
        optimizer: any torch optimizer.
        schedule: a torch scheduler of this optimizer, such as `wsd_schedule(optimizer, steps)`, or
            a function of the step whose value the learning rate is multiplied by.
    """
    if not isinstance(schedule, LRScheduler):
        schedule = LambdaLR(optimizer, schedule)
    if schedule.optimizer is not optimizer:
        raise ValueError(
            f"schedule={type(schedule).__name__} belongs to another optimizer "
            f"({type(schedule.optimizer).__name__}): construct it with the optimizer that is passed"
        )
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": schedule, "interval": "step"},
    }


class AngleMonitorCallback(Callback):
    """Send angles, radii and kappa to the trainer's loggers every `every` steps."""

    def __init__(self, every: int = 50, prefix: str = "muown", per_parameter: bool = True) -> None:
        self.settings: dict[str, Any] = {
            "every": every, "prefix": prefix, "per_parameter": per_parameter,
        }  # fmt: skip
        self.logs: list[AngleLog] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def send(values: dict[str, float], step: int) -> None:
            for logger in trainer.loggers:  # loggers write on the first rank only
                logger.log_metrics(values, step=step)

        # Not earlier: strategies replace parameters, and sharded ones load state by a dummy step.
        self.logs = [log_angles(pl_module, o, send, **self.settings) for o in trainer.optimizers]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def _close(self) -> None:
        for log in self.logs:
            log.close()
        self.logs = []
