"""transformers' Trainer and TRL's SFTTrainer.

    trainer = Trainer(
        model,
        TrainingArguments(out, **wsd_arguments(5000, warmup_steps=100, decay_steps=500)),
        train_dataset=data,
        optimizer_cls_and_kwargs=planned(lr=0.02, aux_lr=2e-3, warmup_steps=100),
    )

For an Optimizer class, the Trainer groups parameters by weight decay alone, so embeddings would get
the matrix rule. It calls any other class with the model, which lets `plan` make the groups.
"""

import inspect
from typing import Any

from torch import nn

from angular_muown.engine import Engine
from angular_muown.optimizers import AngularMuown
from angular_muown.params.plan import plan

PLAN_ARGUMENTS = frozenset(inspect.signature(plan).parameters)


class PlannedOptimizer:
    """A factory that the Trainer calls as `PlannedOptimizer()(model, **settings)`."""

    def __call__(
        self, model: nn.Module, optimizer: type[Engine] = AngularMuown, **settings: Any
    ) -> Engine:
        for_plan = {key: value for key, value in settings.items() if key in PLAN_ARGUMENTS}
        rest = {key: value for key, value in settings.items() if key not in PLAN_ARGUMENTS}
        return optimizer(plan(model, **for_plan), **rest)


def planned(
    optimizer: type[Engine] = AngularMuown, **settings: Any
) -> tuple[type[PlannedOptimizer], dict[str, Any]]:
    """Return a value for the Trainer's `optimizer_cls_and_kwargs`.

    Args:
        optimizer: a member of the family.
        settings: arguments of `plan` (blocks, aux_lr, head, ...) and of the optimizer (lr,
            warmup_steps, ...). TrainingArguments.learning_rate and .weight_decay are ignored.
    """
    return PlannedOptimizer, {"optimizer": optimizer, **settings}


def wsd_arguments(total_steps: int, warmup_steps: int = 0, decay_steps: int = 0) -> dict[str, Any]:
    """Return TrainingArguments for a linear warmup, a constant phase and a linear decay to 0.

    The default of the Trainer's "warmup_stable_decay" is a cosine decay.
    """
    if min(warmup_steps, decay_steps) < 0 or warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} and decay_steps={decay_steps} do not fit into "
            f"total_steps={total_steps}: they must be >= 0 and add up to at most that"
        )
    return {
        "max_steps": total_steps,
        "warmup_steps": warmup_steps,
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": decay_steps, "decay_type": "linear"},
    }
