"""What the exchange by kernels caches in a step, and which changes it must notice in the next."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from angular_muown import AngularMuown
from tests.library.family import noise
from tests.library.sharded import PLACEMENTS, mesh_of, place, whole
from tests.ranks import RankError, on_ranks, results

pytest.importorskip("triton")

from tests.library.kernels.interpreter import interpret
from tests.library.kernels.test_sharded import fused_members

ROWS, COPIES = PLACEMENTS["rows"], PLACEMENTS["copies"]
SHAPE = (128, 144)


def gradient(seed: int, *shape: int) -> Tensor:
    return noise(*(shape or SHAPE), seed=seed, dtype=torch.float32)


def make(*placements: Any, **options: Any) -> tuple[AngularMuown, list[nn.Parameter]]:
    interpret()
    params = [
        nn.Parameter(place(0.1 * gradient(50 + i), kind)) for i, kind in enumerate(placements)
    ]
    return AngularMuown(params, lr=0.02, **options), params


def after_two_steps(how: str | None) -> Tensor:
    """Return the weight after two steps, with a change in between that alters no value."""
    placement = None if how in ("swapped", "alone") else ROWS
    optimizer, (p,) = make(placement, process_group=False if how == "alone" else None)
    p.grad_dtype = None  # allows any
    for step in range(2):
        G = gradient(step).bfloat16()  # bf16 and float32 represent it
        narrow = how == "gradient dtype" and step == 1
        p.grad = place(G if narrow else G.float(), placement)
        optimizer.step()
        state = optimizer.state[p]
        if how == "swapped":
            p.data = p.data.t().contiguous().t()
        if how == "momentum":
            state["momentum_buffer"]._local_tensor = state["momentum_buffer"].to_local().clone()
        if how == "strided vectors":
            part = state["exp_avg"].to_local()
            strided = torch.stack([part, part], dim=-1)[..., 0]
            kinds = state["exp_avg"].placements
            state["exp_avg"] = DTensor.from_local(strided, mesh_of((-1,)), kinds, run_check=False)
    return whole(p)


@pytest.fixture(scope="module")
def undisturbed() -> Tensor:
    return results(1, after_two_steps, "alone")[0]


@pytest.mark.parametrize("how", [None, "swapped", "momentum", "strided vectors", "gradient dtype"])
def test_tensors_that_were_replaced_are_noticed(how: str | None, undisturbed: Tensor) -> None:
    for weight in results(2, after_two_steps, how):
        torch.testing.assert_close(weight, undisturbed, rtol=0, atol=0)


def gradients_alive() -> list[bool]:
    optimizer, (p,) = make(ROWS)
    references = []
    for step in range(3):
        p.grad = place(gradient(step), ROWS)
        references.append(weakref.ref(p.grad._local_tensor))
        optimizer.step()
        p.grad = None
    return [reference() is not None for reference in references]


def test_gradients_are_freed_after_the_step() -> None:
    assert results(2, gradients_alive) == [[False] * 3] * 2


def buffers_alive() -> list[bool]:
    """Return True for an exchange and for a fused step if their buffers outlive `release`."""
    gc.disable()
    alive = []
    for placement in (ROWS, None):
        optimizer, (p,) = make(placement, process_group=False)
        p.grad = place(gradient(1), placement)
        optimizer.step()
        if placement is None:
            reference = weakref.ref(optimizer._fused.steps[0][1])
        else:
            [group] = optimizer._session.groups.values()
            reference = weakref.ref(group.fused.rounds[0].buffers.outgoing)
            del group
        optimizer.release()
        alive.append(reference() is not None)
    return alive


def test_release_frees_buffers_at_once() -> None:
    """Not when the garbage collector happens to run."""
    assert results(2, buffers_alive) == [[False, False]] * 2


def flat_gradients(flat: bool) -> list[Tensor]:
    """Step with gradients that start inside a buffer, as FSDP2's do, or with plain ones."""
    optimizer, params = make(ROWS, ROWS)
    for step in range(3):
        for i, p in enumerate(params):
            grad = place(gradient(10 * step + i), ROWS)
            if flat:
                part = grad.to_local()
                buffer = torch.empty(part.numel() + 2)
                grad._local_tensor = buffer[2:].view(part.shape).copy_(part)
            p.grad = grad
        optimizer.step()
        [group] = optimizer._session.groups.values()
        assert not group.fused.operands.stand_in, "the next step finds everything in place"
    return [whole(p) for p in params]


@pytest.mark.slow
def test_gradients_may_start_anywhere() -> None:
    expected = results(2, flat_gradients, False)
    for weights, others in zip(results(2, flat_gradients, True), expected, strict=True):
        assert all(map(torch.equal, weights, others))


def mixed() -> int:
    optimizer, params = make(COPIES, None)
    for step in range(2):
        for p, kind in zip(params, (COPIES, None), strict=True):
            p.grad = place(gradient(step), kind)
        optimizer.step()
    return fused_members(optimizer)


def test_replicated_and_plain_parameters_may_share_an_exchange() -> None:
    assert results(2, mixed) == [2, 2]


def one_expert_on_four_ranks() -> list[Tensor]:
    """Shard one expert by experts and by rows: half of the ranks have no part of it."""
    interpret()
    kinds = [Shard(0), Shard(1)]
    W = 0.1 * gradient(3, 1, *SHAPE)
    mesh = mesh_of((2, 2))
    from torch.distributed.tensor import distribute_tensor

    p = nn.Parameter(distribute_tensor(W, mesh, kinds, src_data_rank=None))
    optimizer = AngularMuown([{"params": [p], "view": "stack"}], lr=0.02)
    p.grad = distribute_tensor(gradient(4, 1, *SHAPE), mesh, kinds, src_data_rank=None)
    optimizer.step()
    return [whole(p)]


def test_a_rank_may_have_no_expert() -> None:
    first, *others = results(4, one_expert_on_four_ranks)
    assert first[0].isfinite().all()
    assert all(torch.equal(one[0], first[0]) for one in others)


def change_blocks() -> None:
    optimizer, (p,) = make(ROWS)
    p.grad = place(gradient(1), ROWS)
    optimizer.step()
    del optimizer.state[p]["exp_avg"]
    wrong = torch.zeros(64, 2)
    kinds = [Shard(0)]
    optimizer.state[p]["exp_avg"] = DTensor.from_local(wrong, mesh_of((-1,)), kinds)
    optimizer.step()


def test_state_of_another_shape_is_rejected() -> None:
    for outcome in on_ranks(2, change_blocks):
        assert isinstance(outcome, RankError)
        assert "the exp_avg of parameter" in str(outcome)
        assert "has shape (64, 2) on this rank, but its layout needs (64, 1)" in str(outcome)
        assert "del optimizer.state[p]" in str(outcome)
