"""transformers' Trainer and TRL's SFTTrainer, where the Trainer has to construct the optimizer.

Where it does not have to, nothing is needed from here: make the optimizer with
`AngularMuown.for_model(model, ...)` and pass `Trainer(..., optimizers=(optimizer, scheduler))`.
Under FSDP, or in a hyperparameter search, the Trainer makes the optimizer itself:

    arguments = TrainingArguments(out, **wsd_arguments(5000, lr=0.02))
    trainer = Trainer(model, arguments, train_dataset=data,
                      optimizer_cls_and_kwargs=planned(arguments=arguments))

For an Optimizer class, the Trainer groups parameters by weight decay alone, so embeddings would get
the matrix rule. It calls any other class with the model, which lets `plan` make the groups.
"""

import inspect
from typing import Any

from torch import nn

from angular_muown.engine import Engine
from angular_muown.optimizers import AngularMuown
from angular_muown.schedules import COOLDOWN, WARMUP, check_lengths
from angular_muown.warn import warn


class PlannedOptimizer:
    """A factory that the Trainer calls as `PlannedOptimizer()(model, **settings)`."""

    def __call__(
        self, model: nn.Module, optimizer: type[Engine] = AngularMuown, **settings: Any
    ) -> Engine:
        return optimizer.for_model(model, **settings)


def planned(
    optimizer: type[Engine] = AngularMuown, *, arguments: Any = None, **settings: Any
) -> tuple[type[PlannedOptimizer], dict[str, Any]]:
    """Return a value for the Trainer's `optimizer_cls_and_kwargs`.

    The Trainer hands the model to the optimizer, but not its TrainingArguments. Pass them here as
    well: `lr` is then `arguments.learning_rate`, and kappa stays at 1 during
    `arguments.warmup_steps`. A setting that is passed here counts; a UserWarning names a
    learning rate or weight decay of the arguments that is not used. Without `arguments`, all of
    them are ignored.

    Args:
        optimizer: a member of the family.
        arguments: the TrainingArguments of the Trainer.
        settings: arguments of `for_model`, such as lr, aux_lr, blocks or momentum.
    """
    if not isinstance(optimizer, type):
        raise TypeError(
            f"optimizer={optimizer!r} is not a member of the family: pass TrainingArguments by "
            "name, planned(arguments=...)"
        )
    if arguments is not None:
        taken = inspect.signature(optimizer.for_model).parameters  # not every member has kappa
        values = {key: x for key, x in _from_arguments(arguments).items() if key in taken}
        settings = {**values, **settings}
        _warn_about_unused(arguments, settings)
    return PlannedOptimizer, {"optimizer": optimizer, **settings}


def _from_arguments(arguments: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"lr": arguments.learning_rate}
    warmup, total = arguments.warmup_steps, arguments.max_steps
    if 0 < warmup < 1 and total <= 0:
        raise ValueError(
            f"arguments.warmup_steps={warmup!r} is a fraction, and arguments.max_steps={total!r} "
            "does not give the number of steps: set max_steps, or give warmup_steps as an integer"
        )
    return {**values, "warmup_steps": int(arguments.get_warmup_steps(total))}


def _warn_about_unused(arguments: Any, settings: dict[str, Any]) -> None:
    if arguments.learning_rate != settings["lr"]:
        warn(
            f"TrainingArguments.learning_rate={arguments.learning_rate!r} is not used: "
            f"lr={settings['lr']!r} is; set both to the same value, or leave out lr",
        )
    decays = {"weight_decay", "aux_weight_decay"} & settings.keys()
    if arguments.weight_decay and not decays:
        warn(
            f"TrainingArguments.weight_decay={arguments.weight_decay!r} is not used: pass "
            "aux_weight_decay=... for the parameters of AdamW, weight_decay=... for the lengths of "
            "the matrices' rows",
        )


def wsd_arguments(
    total_steps: int, *, lr: float = 0.02, warmup: float = WARMUP, cooldown: float = COOLDOWN
) -> dict[str, Any]:
    """Return TrainingArguments for a linear warm-up, a constant phase and a linear cooldown to 0.

    The default of the Trainer's "warmup_stable_decay" is a cosine cooldown.

    Args:
        total_steps: number of optimizer steps; it becomes `max_steps`.
        lr: becomes `learning_rate`. The Trainer does not hand it to the optimizer of `planned`
            unless that gets the arguments.
        warmup: a fraction of total_steps (float below 1) or a number of steps (int).
        cooldown: likewise.
    """
    steps = check_lengths(total_steps, warmup=warmup, cooldown=cooldown)
    return {
        "learning_rate": lr,
        "max_steps": total_steps,
        "warmup_steps": steps["warmup"],
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": steps["cooldown"], "decay_type": "linear"},
    }
