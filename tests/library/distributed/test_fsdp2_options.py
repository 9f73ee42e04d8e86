"""FSDP2's options: whatever they are, the sharded step equals the step of the whole matrices."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from angular_muown import AngularMuown, plan
from tests.ranks import results

WIDTH, STEPS = 24, 3
KERNEL_WIDTH = 128  # the smallest side that kernels cover
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "reduced in bf16": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    },
    "offloaded to the CPU": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "not resharded after forward": {"reshard_after_forward": False},
    "initialized on the meta device": {},
}


def mlp(width: int) -> nn.Sequential:
    """Return an embedding, two hidden matrices, one with too few rows for all ranks, and a head."""
    layers = [nn.Embedding(16, width), nn.Linear(width, 2 * width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(2 * width, 3), nn.GELU(), nn.Linear(3, 16))


def fill(model: nn.Module) -> None:
    """Give a model the same weights on every rank, whole or sharded."""
    for i, p in enumerate(model.parameters()):
        values = 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        with torch.no_grad():
            p.copy_(_placed(values, p))


def _placed(values: Tensor, p: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(p, DTensor):
        return values
    return distribute_tensor(values, p.device_mesh, p.placements)


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def trained(name: str, width: int = WIDTH) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of weights: of a sharded model, and of a whole copy with the same gradients."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    with torch.device("meta" if "meta" in name else "cpu"):
        model = mlp(width)
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=mesh, **OPTIONS[name])
    fully_shard(model, mesh=mesh, **OPTIONS[name])
    if "meta" in name:
        model.to_empty(device="cpu")
    fill(model)
    whole = mlp(width)
    fill(whole)
    sharded = AngularMuown(plan(model, head="5.*"), lr=0.05)
    alone = AngularMuown(plan(whole, head="5.*"), lr=0.05, process_group=False)
    for step in range(STEPS):
        tokens = torch.arange(8) + step + 8 * torch.distributed.get_rank()
        model(tokens % 16).float().logsumexp(-1).mean().backward()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert p.grad is not None
            q.grad = _whole(p.grad).to(q.dtype)
        sharded.step()
        alone.step()
        sharded.zero_grad()
    if width != WIDTH:
        from tests.library.kernels.test_sharded import fused_members

        assert fused_members(sharded) == 1, "the kernels step one matrix"
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return [(_whole(p).detach(), q.detach()) for p, q in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_sharded_step_equals_a_whole_one(name: str) -> None:
    """On five ranks, no dimension divides evenly."""
    for pairs in results(5, trained, name):
        for sharded, whole in pairs:
            torch.testing.assert_close(sharded, whole, rtol=1e-5, atol=1e-6)


def trained_by_kernels(name: str) -> list[tuple[Tensor, Tensor]]:
    """Train with the kernels, which step the larger hidden matrix."""
    from tests.library.kernels.interpreter import interpret

    interpret()
    return trained(name, KERNEL_WIDTH)


# The other options give kernels the same tensors as the first.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "reduced in bf16", "offloaded to the CPU"])
def test_a_sharded_step_by_kernels_equals_a_whole_one(name: str) -> None:
    pytest.importorskip("triton")
    for pairs in results(2, trained_by_kernels, name):
        for sharded, whole in pairs:
            torch.testing.assert_close(sharded, whole, rtol=1e-5, atol=1e-6)
