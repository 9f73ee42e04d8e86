"""torch.distributed.checkpoint: load momenta that were saved with another state_dtype."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from angular_muown.params.eight_bit import SCALE

MOMENTUM = "momentum_buffer"


class MomentumLoadPlanner(DefaultLoadPlanner):
    """Load 8-bit momenta for an optimizer with a longer `state_dtype`, and vice versa:

        dcp.load(state, checkpoint_id=folder, planner=MomentumLoadPlanner())

    torch copies what was saved into the tensors that the new optimizer has. Between 8-bit and
    longer momenta that would copy integers as if they were entries. This planner replaces the
    tensors in `state` with tensors of the saved dtype; `set_state_dict` converts them, with a
    warning that says what was rounded. Where the dtypes agree, it is torch's own planner.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Replace the momenta in `state_dict`, then do what torch does."""
        if metadata is not None:
            _replace_momenta(state_dict, (), metadata.state_dict_metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _replace_momenta(tree: dict[Any, Any], path: tuple[str, ...], saved: dict[str, Any]) -> None:
    for key, value in tree.items():
        inner = (*path, str(key))
        if isinstance(value, dict) and MOMENTUM in value:
            # A new dict: this one may be the optimizer's own.
            tree[key] = _as_saved(value, ".".join(inner), saved)
        elif isinstance(value, dict):
            _replace_momenta(value, inner, saved)
        elif isinstance(key, str) and key.endswith(f".{MOMENTUM}"):
            _check_flat(value, ".".join(inner), saved)


def _as_saved(state: dict[str, Any], name: str, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with the tensors that were saved for its momentum."""
    M = state[MOMENTUM]
    stored = _crossed_dtype(M, saved.get(f"{name}.{MOMENTUM}"))
    if stored is None:
        return state
    state = {key: value for key, value in state.items() if key != SCALE}
    state[MOMENTUM] = torch.zeros_like(M, dtype=stored)
    scale = saved.get(f"{name}.{SCALE}")
    if stored == torch.int8 and isinstance(scale, TensorStorageMetadata):
        # Whole on every rank, because it is short: load_state_dict shards it.
        state[SCALE] = torch.zeros(scale.size, dtype=scale.properties.dtype, device=M.device)
    return state


def _crossed_dtype(M: Any, stored: Any) -> torch.dtype | None:
    """Return the saved dtype if exactly one of it and M's is that of 8 bits."""
    if not isinstance(M, Tensor) or not isinstance(stored, TensorStorageMetadata):
        return None
    dtype = stored.properties.dtype
    return dtype if (dtype == torch.int8) != (M.dtype == torch.int8) else None


def _check_flat(M: Any, name: str, saved: dict[str, Any]) -> None:
    dtype = _crossed_dtype(M, saved.get(name))
    if dtype is not None:
        raise ValueError(
            f"{name} was saved in {dtype}, and the optimizer has it in {M.dtype}: torch's flat "
            "state dicts (flatten_optimizer_state_dict=True) allow no other entries than the "
            "optimizer's own. Create it with the state_dtype that was saved, load, then set "
            "group['state_dtype'] of its param_groups"
        )
