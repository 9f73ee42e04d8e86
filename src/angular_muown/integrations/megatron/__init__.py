"""AngularMuown for Megatron-LM: the optimizer, its registration, its checkpoints."""

from angular_muown.integrations.megatron.optimizer import (
    MegatronAngularMuown,
    get_angular_muown_optimizer,
    register,
)

__all__ = ["MegatronAngularMuown", "get_angular_muown_optimizer", "register"]
