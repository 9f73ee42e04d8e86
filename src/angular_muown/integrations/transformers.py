"""transformers' Trainer and TRL's SFTTrainer.

    trainer = Trainer(
        model,
        TrainingArguments(out, **wsd_arguments(5000, warmup_steps=100, decay_steps=500)),
        train_dataset=data,
        optimizer_cls_and_kwargs=planned(lr=0.02, aux_lr=2e-3, warmup_steps=100),
    )

The Trainer would sort parameters by its own rule (decayed or not) and so hand embeddings to the
matrix rule. Whatever is no Optimizer class it calls with the model instead, and plan sorts them.
"""

import inspect
from typing import Any

from torch import nn

from angular_muown.engine import Engine
from angular_muown.optimizers import AngularMuown
from angular_muown.params.plan import plan

PLANS = frozenset(inspect.signature(plan).parameters)


class PlannedOptimizer:
    """What the Trainer makes and calls: `PlannedOptimizer()(model, **settings)`."""

    def __call__(
        self, model: nn.Module, optimizer: type[Engine] = AngularMuown, **settings: Any
    ) -> Engine:
        sorting = {key: value for key, value in settings.items() if key in PLANS}
        stepping = {key: value for key, value in settings.items() if key not in PLANS}
        return optimizer(plan(model, **sorting), **stepping)


def planned(
    optimizer: type[Engine] = AngularMuown, **settings: Any
) -> tuple[type[PlannedOptimizer], dict[str, Any]]:
    """The Trainer's `optimizer_cls_and_kwargs`.

    Args:
        optimizer: a member of the family.
        settings: arguments of `plan` (blocks, aux_lr, head, ...) and of the optimizer (lr,
            warmup_steps, ...), by name. TrainingArguments.learning_rate and .weight_decay are not
            looked at.
    """
    return PlannedOptimizer, {"optimizer": optimizer, **settings}


def wsd_arguments(total_steps: int, warmup_steps: int = 0, decay_steps: int = 0) -> dict[str, Any]:
    """TrainingArguments of a linear warm-up, a constant rate and a linear decay to 0; the Trainer's
    own "warmup_stable_decay" decays by a cosine unless told otherwise."""
    if min(warmup_steps, decay_steps) < 0 or warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} and decay_steps={decay_steps} do not fit into "
            f"total_steps={total_steps}: they must be >= 0 and add up to no more than it"
        )
    return {
        "max_steps": total_steps,
        "warmup_steps": warmup_steps,
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": decay_steps, "decay_type": "linear"},
    }
