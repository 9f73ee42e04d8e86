"""Modules of other libraries, known by their classes' names and by what they declare of their own
weights. Nothing of them is imported: what is not loaded cannot be in a model."""

from typing import Any

from torch import Tensor, nn

CONV1D = "transformers.pytorch_utils.Conv1D"  # GPT-2's linear layer: in x out
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
# What transformers' expert modules say of themselves, since their layouts differ.
EXPERT_LAYOUT = ("has_gate", "is_transposed", "is_concatenated")


def is_a(module: nn.Module, wanted: str) -> bool:
    """isinstance, by the class's full name."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == wanted for kind in type(module).__mro__)


def structure_of(
    module: nn.Module, own: str, p: Tensor, parent: nn.Module | None
) -> dict[str, Any]:
    """Group values of a weight that a library's module documents; {} where there is nothing."""
    if is_a(module, CONV1D):
        size = getattr(parent, "split_size", None)  # by which the attention splits its outputs
        fused = isinstance(size, int) and module is getattr(parent, "c_attn", None)
        return {"transposed": True} | ({"blocks": p.shape[1] // size} if fused else {})
    if p.ndim == 3 and is_experts(module):
        values: dict[str, Any] = {"view": "stack"}
        if module.is_transposed:
            values["transposed"] = True
        # interleaved gate and up rows are no blocks: they stay one matrix
        if own == "gate_up_proj" and module.has_gate and module.is_concatenated:
            values["blocks"] = 2
        return values
    return {}


def is_experts(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, key, None), bool) for key in EXPERT_LAYOUT)


def what_flattened(p: Tensor) -> str | None:
    """Who made a flat piece of a parameter, where that shows: there are no matrices in it."""
    if getattr(p, "_is_flat_param", False):
        return "FSDP1"
    return "DeepSpeed" if hasattr(p, "ds_id") else None
