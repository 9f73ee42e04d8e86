"""accelerate: the example's loop alone, data parallel and sharded by FSDP2; state saved and loaded.

accelerate 1.15 shards on accelerators only. The FSDP2 ranks here are gloo processes on CPUs whose
accelerate was told that it shards: what follows is its own code.
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
    """The example's `start` on a machine that may have a GPU, or none."""
    loop = load("accelerate_loop")
    plugin = loop.sharding(state_dict_type) if fsdp2 else None
    settings = {"gradient_accumulation_steps": loop.ACCUMULATE, "fsdp_plugin": plugin}
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False, **settings)
    if fsdp2:
        accelerator.state.fsdp_plugin = plugin
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
    return accelerator


def whole(p: torch.Tensor) -> torch.Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p.detach()


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[list[float], torch.nn.Module, Path]:
    loop, saved = load("accelerate_loop"), tmp_path_factory.mktemp("alone") / "half"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "start", on_cpu)
        return (*loop.main(STEPS, out=str(saved)), saved)


def test_the_loss_falls_and_kappa_counts_whole_steps(alone) -> None:
    losses, _, saved = alone
    assert len(losses) == STEPS
    assert losses[-1] < 0.7 * losses[0]
    groups = torch.load(saved / "optimizer.bin", weights_only=True)["param_groups"]
    assert {group["step"] for group in groups} == {STEPS // 2}, "not micro-batches"


def test_load_state_equals_the_uninterrupted_run(alone, monkeypatch) -> None:
    losses, model, saved = alone
    loop = load("accelerate_loop")
    monkeypatch.setattr(loop, "start", on_cpu)
    rest, again = loop.main(STEPS, resume=str(saved))
    assert rest == losses[STEPS // 2 :]
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


CASES = {
    "ddp": (False, ""),
    "sharded files": (True, "SHARDED_STATE_DICT"),
    "one file": (True, "FULL_STATE_DICT"),
}


def work(folder: Path) -> None:
    """On each rank and for each case: the whole run, then its second half from the saved state."""
    rank, world = (str(f()) for f in (torch.distributed.get_rank, torch.distributed.get_world_size))
    # accelerate asks the environment for what a launcher would have set
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    loop = load("accelerate_loop")
    for case, (fsdp2, kind) in CASES.items():
        loop.start = partial(on_cpu, state_dict_type=kind)
        saved = str(folder / case)
        losses, model = loop.main(STEPS, fsdp2, out=saved)
        rest, again = loop.main(STEPS, fsdp2, resume=saved)
        if fsdp2:
            own = model.model.layers[0].mlp.up_proj.weight
            assert own.to_local().shape[0] == own.shape[0] // 2, "every rank holds its rows only"
        weights = [whole(p) for p in model.parameters()]
        for p, q in zip(weights, again.parameters(), strict=True):
            assert torch.equal(p, whole(q))
        if torch.distributed.get_rank() == 0:
            torch.save({"losses": losses, "rest": rest, "weights": weights}, saved + ".pt")


def test_two_ranks_see_what_one_sees_and_go_on_bit_for_bit(alone, tmp_path) -> None:
    results(2, work, tmp_path)
    for case in CASES:
        seen = torch.load(tmp_path / f"{case}.pt")
        assert seen["rest"] == seen["losses"][STEPS // 2 :], case
        assert seen["losses"] == pytest.approx(alone[0], abs=1e-4), case
        for p, q in zip(seen["weights"], alone[1].parameters(), strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=0.0, atol=2e-3)


def test_the_example_does_not_shard_in_name_only(monkeypatch) -> None:
    loop = load("accelerate_loop")
    monkeypatch.setattr(loop, "start", lambda fsdp2: on_cpu(False))
    with pytest.raises(SystemExit, match="on accelerators only"):
        loop.main(STEPS, fsdp2=True)
