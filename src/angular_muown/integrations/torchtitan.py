"""torchtitan: AngularMuown and its family as an optimizers container.

    def my_config() -> Trainer.Config:
        config = llama3_8b()
        config.optimizer = angular_muown(lr=0.02, warmup_steps=200)
        return config

`plan` assigns the parameters instead of name patterns, so one optimizer holds all of them: hidden
matrices by the matrix rule; embeddings, head, norms and biases by AdamW. It knows torchtitan's
fused projections and its experts (params/fused_layouts.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from angular_muown.optimizers import FAMILY
from angular_muown.params.plan import plan
from angular_muown.params.wrappers import bare_parameters

MEMBERS: dict[str, Callable[..., Optimizer]] = {kind.__name__: kind for kind in FAMILY.values()}
HEAD = "lm_head"  # the output head of torchtitan's decoders


class AngularMuownContainer(OptimizersContainer):
    """One optimizer of the family per model part, with groups from `plan`."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        member: str = "AngularMuown"
        """Class name of the optimizer."""

        plan: dict[str, Any] = field(default_factory=dict)
        """Arguments of `angular_muown.plan`, such as aux_lr or overrides."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.param_groups:
            raise ValueError(
                f"param_groups={config.param_groups!r}: must be empty, because plan makes the "
                "groups: use plan arguments such as overrides={'*.w2.weight': {'lr': 0.01}}"
            )
        self.member, self.plan = config.member, config.plan
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name not in MEMBERS:
            raise ValueError(f"member={name!r} must be one of {', '.join(MEMBERS)}")
        return MEMBERS[name]

    def _build_param_groups(  # pyrefly: ignore[bad-override]
        self, model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: Any
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        """Build groups from the plan. Overrides a static method that matches name patterns."""
        has_head = any(name.startswith(f"{HEAD}.") for name, _ in bare_parameters(model))
        values: dict[str, Any] = {"head": f"{HEAD}.*" if has_head else None, **self.plan}
        groups: list[dict[str, Any]] = [
            {
                **impl_kwargs,
                **group,
                "params": [p for _, p in group["params"]],
                "param_names": [name for name, _ in group["params"]],
            }
            for group in plan(model, **values)
        ]
        descriptions = [group["algorithm"] for group in groups]  # for the log
        return {self.member: groups}, {self.member: descriptions}


def angular_muown(
    lr: float = 0.02,
    *,
    member: str = "AngularMuown",
    aux_lr: float | None = None,
    aux_weight_decay: float = 0.0,
    aux_betas: tuple[float, float] | None = None,
    plan: dict[str, Any] | None = None,
    **settings: Any,
) -> AngularMuownContainer.Config:
    """Return a config to use in place of `default_adamw(...)`.

    Args:
        lr: learning rate of the hidden matrices.
        member: class name of the optimizer.
        aux_lr: learning rate of AdamW, for all parameters but the hidden matrices; None is lr.
        aux_weight_decay: weight decay of AdamW.
        aux_betas: AdamW's two decay rates; None is the optimizer's betas.
        plan: further arguments of `angular_muown.plan`, such as overrides.
        **settings: arguments of the optimizer, such as warmup_steps.
    """
    aux = {"aux_lr": aux_lr, "aux_weight_decay": aux_weight_decay, "aux_betas": aux_betas}
    return AngularMuownContainer.Config(
        member=member,
        plan={**aux, **(plan or {})},
        optimizer_factory_kwargs_by_name={member: {"lr": lr, **settings}},
    )
