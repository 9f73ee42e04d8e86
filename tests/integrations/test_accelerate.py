"""accelerate: the example's loop on one rank, with DDP and with FSDP2, and its saved state.

accelerate 1.15 shards on accelerators only. The FSDP2 ranks here are gloo processes on CPUs, with
the distributed type set by hand. Everything after that is accelerate's code.
"""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from tests.integrations.scripts import load
from tests.ranks import results

STEPS = 12


def on_cpu(fsdp2: bool, state_dict_type: str = "SHARDED_STATE_DICT") -> Accelerator:
    """Replace the example's `start`: use the CPU even if the machine has a GPU."""
    loop = load("accelerate_loop")
    plugin = loop.sharding(state_dict_type) if fsdp2 else None
    settings = {"gradient_accumulation_steps": loop.ACCUMULATE, "fsdp_plugin": plugin}
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False, **settings)
    if fsdp2:
        accelerator.state.fsdp_plugin = plugin
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
    return accelerator


def full(p: torch.Tensor) -> torch.Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p.detach()


@pytest.fixture(scope="module")
def single_rank(tmp_path_factory) -> tuple[list[float], torch.nn.Module, Path]:
    loop, saved = load("accelerate_loop"), tmp_path_factory.mktemp("single_rank") / "half"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "start", on_cpu)
        return (*loop.main(STEPS, out=str(saved)), saved)


def test_the_loss_falls_and_kappa_counts_optimizer_steps(single_rank) -> None:
    losses, _, saved = single_rank
    assert len(losses) == STEPS
    assert losses[-1] < 0.7 * losses[0]
    groups = torch.load(saved / "optimizer.bin", weights_only=True)["param_groups"]
    assert {group["step"] for group in groups} == {STEPS // 2}, "not micro-batches"


def test_a_resumed_run_equals_the_uninterrupted_run(single_rank, monkeypatch) -> None:
    losses, model, saved = single_rank
    loop = load("accelerate_loop")
    monkeypatch.setattr(loop, "start", on_cpu)
    second_half, resumed = loop.main(STEPS, resume=str(saved))
    assert second_half == losses[STEPS // 2 :]
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


CASES = {
    "ddp": (False, ""),
    "sharded files": (True, "SHARDED_STATE_DICT"),
    "one file": (True, "FULL_STATE_DICT"),
}


def work(folder: Path) -> None:
    """Run each case to the end on each rank, then repeat the second half from saved state."""
    rank, world = (str(f()) for f in (torch.distributed.get_rank, torch.distributed.get_world_size))
    # accelerate reads the variables that a launcher would set
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    loop = load("accelerate_loop")
    for case, (fsdp2, kind) in CASES.items():
        loop.start = partial(on_cpu, state_dict_type=kind)
        saved = str(folder / case)
        losses, model = loop.main(STEPS, fsdp2, out=saved)
        second_half, resumed = loop.main(STEPS, fsdp2, resume=saved)
        if fsdp2:
            weight = model.model.layers[0].mlp.up_proj.weight
            assert weight.to_local().shape[0] == weight.shape[0] // 2, "each rank holds half"
        weights = [full(p) for p in model.parameters()]
        for p, q in zip(weights, resumed.parameters(), strict=True):
            assert torch.equal(p, full(q))
        if torch.distributed.get_rank() == 0:
            result = {"losses": losses, "second_half": second_half, "weights": weights}
            torch.save(result, saved + ".pt")


def test_two_ranks_match_one_rank_and_resume_bit_for_bit(single_rank, tmp_path) -> None:
    results(2, work, tmp_path)
    for case in CASES:
        result = torch.load(tmp_path / f"{case}.pt")
        assert result["second_half"] == result["losses"][STEPS // 2 :], case
        assert result["losses"] == pytest.approx(single_rank[0], abs=1e-4), case
        for p, q in zip(result["weights"], single_rank[1].parameters(), strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=0.0, atol=2e-3)


def test_the_example_exits_if_accelerate_does_not_shard(monkeypatch) -> None:
    loop = load("accelerate_loop")
    monkeypatch.setattr(loop, "start", lambda fsdp2: on_cpu(False))
    with pytest.raises(SystemExit, match="on accelerators only"):
        loop.main(STEPS, fsdp2=True)
