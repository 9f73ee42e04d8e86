"""AdamW for parameters that are not hidden matrices: torch's own function and state.

It equals `torch.optim.AdamW` bit for bit, including its choice between foreach and fused, which a
group may set with the keys `foreach` and `fused`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from angular_muown.params.options import Group
from angular_muown.stages.context import State

MOMENTS = ("exp_avg", "exp_avg_sq")


def init_state(p: Tensor, group: Group, state: State) -> None:
    if "step" in state:
        return
    # As in torch: a counter on the host costs no kernel; the fused kernel and a recorded step need
    # it on the device.
    device = p.device if group.get("fused") or group["capturable"] else "cpu"
    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    for name in MOMENTS:
        state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)


def update(params: Sequence[Tensor], states: Sequence[State], group: Group) -> None:
    beta1, beta2 = group["betas"]
    grads = [p.grad for p in params if p.grad is not None]
    assert len(grads) == len(params), "the engine passes parameters with gradients"
    exp_avgs, exp_avg_sqs = ([state[name] for state in states] for name in MOMENTS)
    adamw(
        list(params),
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [state["step"] for state in states],
        foreach=group.get("foreach"),
        fused=group.get("fused"),
        capturable=group["capturable"] and params[0].is_cuda,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
