"""Row vectors in Megatron's torch_dist checkpoints.

Megatron assumes that all optimizer state has the shape of the weight and its offset in the global
tensor. A vector with one entry per row needs its own: the weight's rows and a single column. If a
weight's columns are sharded across ranks, all of these ranks hold the same vector.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor


def save_row_vectors() -> None:
    """Patch Megatron's `make_sharded_optimizer_tensor` to accept row vectors. Idempotent."""
    from megatron.core.dist_checkpointing import optimizer as module
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    original = module.make_sharded_optimizer_tensor
    if getattr(original, "accepts_row_vectors", False):
        return

    def make(model_param: Any, optim_param: Tensor, prefix: str) -> Any:
        if isinstance(model_param, ShardedTensor) and is_row_vector(model_param, optim_param):
            model_param = row_vector_tensor(model_param)
        return original(model_param, optim_param, prefix)

    make.accepts_row_vectors = True  # pyrefly: ignore[missing-attribute]
    module.make_sharded_optimizer_tensor = make


def is_row_vector(model_param: Any, optim_param: Tensor) -> bool:
    shape = tuple(model_param.local_shape)
    return len(shape) == 2 and tuple(optim_param.shape) == (shape[0], 1) != shape


def row_vector_tensor(weight: Any) -> Any:
    """Return the weight's ShardedTensor with a single column."""
    column = weight.global_offset[-1] // weight.local_shape[-1]
    replica = weight.replica_id if isinstance(weight.replica_id, tuple) else (weight.replica_id,)
    return replace(
        weight,
        data=None,
        local_shape=(weight.local_shape[0], 1),
        global_shape=(*weight.global_shape[:-1], 1),
        global_offset=(*weight.global_offset[:-1], 0),
        axis_fragmentations=(*weight.axis_fragmentations[:-1], 1),
        # Ranks with other columns hold copies; a checkpoint saves the one whose ids are all zero.
        replica_id=(*replica, column),
    )
