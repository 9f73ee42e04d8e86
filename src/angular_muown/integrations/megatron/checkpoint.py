"""Row vectors in Megatron's torch_dist checkpoints.

Megatron takes all optimizer state for tensors of the weight's shape, with the weight's place in
the global tensor. A vector with one entry per row has a place of its own: the weight's rows, and
one column. Where a weight's columns are spread over ranks, all of them hold the same vector.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor


def save_row_vectors() -> None:
    """Teach Megatron's `make_sharded_optimizer_tensor` row vectors; a second call does nothing."""
    from megatron.core.dist_checkpointing import optimizer as module
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    made = module.make_sharded_optimizer_tensor
    if getattr(made, "knows_row_vectors", False):
        return

    def make(model_param: Any, optim_param: Tensor, prefix: str) -> Any:
        if isinstance(model_param, ShardedTensor) and is_row_vector(model_param, optim_param):
            model_param = place_of_rows(model_param)
        return made(model_param, optim_param, prefix)

    make.knows_row_vectors = True  # pyrefly: ignore[missing-attribute]
    module.make_sharded_optimizer_tensor = make


def is_row_vector(model_param: Any, optim_param: Tensor) -> bool:
    shape = tuple(model_param.local_shape)
    return len(shape) == 2 and tuple(optim_param.shape) == (shape[0], 1) != shape


def place_of_rows(weight: Any) -> Any:
    """The weight's ShardedTensor with one column instead of its own."""
    column = weight.global_offset[-1] // weight.local_shape[-1]
    who = weight.replica_id if isinstance(weight.replica_id, tuple) else (weight.replica_id,)
    return replace(
        weight,
        data=None,
        local_shape=(weight.local_shape[0], 1),
        global_shape=(*weight.global_shape[:-1], 1),
        global_offset=(*weight.global_offset[:-1], 0),
        axis_fragmentations=(*weight.axis_fragmentations[:-1], 1),
        # the ranks with the other columns have copies; a checkpoint takes the one marked by zeros
        replica_id=(*who, column),
    )
