"""The state of a parameter, at zero: made before the first step, spread over ranks as it is."""

from typing import Any

import torch
from torch import Tensor

from angular_muown import adamw
from angular_muown.layout import Layout
from angular_muown.placement import zero_vector, zeros_like
from angular_muown.recipe import Recipe


def init_state(
    p: Tensor, state: dict[str, Any], group: dict[str, Any], recipe: Recipe | None
) -> None:
    """Add what is missing. `recipe` is None for AdamW's parameters."""
    if recipe is None:
        adamw.init_state(p, group, state)
        return
    compute = torch.promote_types(p.dtype, torch.float32)
    if "step" not in state:
        # float32 on the host: a bf16 counter stops at 256, one on the device costs a sync
        device = p.device if group["capturable"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        dtype = getattr(torch, group["state_dtype"]) if group["state_dtype"] else compute
        state["momentum_buffer"] = zeros_like(p, dtype)
    for name in recipe.rows:
        if name not in state:
            state[name] = zero_vector(p, Layout.of(group), name, compute)
    if group["write_back"] == "master" and p.dtype != compute and "master" not in state:
        state["master"] = zeros_like(p, compute).copy_(p)
