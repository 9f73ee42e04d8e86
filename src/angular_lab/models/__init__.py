"""The lab's models: `build_model(spec)` constructs one, `init_weights(seed)` initializes it."""

from angular_lab.config.spec import ModelSpec
from angular_lab.errors import UserError
from angular_lab.models.base import LanguageModel
from angular_lab.models.dense import Dense
from angular_lab.models.gpt_speedrun import GPTSpeedrun
from angular_lab.models.moe import MoE
from angular_lab.models.qwen2 import Qwen2

MODELS: dict[str, type[Dense] | type[Qwen2] | type[MoE] | type[GPTSpeedrun]] = {
    "dense": Dense,
    "qwen2": Qwen2,
    "moe": MoE,
    "gpt_speedrun": GPTSpeedrun,
}


def build_model(spec: ModelSpec) -> LanguageModel:
    """Return the model that `spec` describes, uninitialized, on torch's current device."""
    if spec.kind not in MODELS:
        raise UserError(f"model kind {spec.kind!r} is not one of {', '.join(map(repr, MODELS))}")
    _check_sizes(spec)
    return MODELS[spec.kind](spec)


def _check_sizes(spec: ModelSpec) -> None:
    for key in ("vocabulary", "sequence", "layers", "width", "heads", "kv_heads", "mlp"):
        value = getattr(spec, key)
        if value is not None and value < 1:
            unset = ", or none" if key in ("kv_heads", "mlp") else ""
            raise UserError(f"model.{key}={value}: it must be at least 1{unset}")
    if not spec.init_std >= 0:
        raise UserError(f"model.init_std={spec.init_std:g}: it must be at least 0")
    if spec.soft_cap is not None and not spec.soft_cap > 0:
        raise UserError(f"model.soft_cap={spec.soft_cap:g}: it must be above 0, or none")
