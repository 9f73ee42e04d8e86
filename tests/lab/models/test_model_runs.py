"""Models under autocast, compiled, on several ranks, with an optimizer."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from angular_lab.models import build_model
from angular_muown import AngularMuown, plan
from tests.lab.tiny import KINDS, SPECS, VOCABULARY, scrambled, text
from tests.ranks import results


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_close_to_float32_and_stores_no_float32_logits(kind: str) -> None:
    model, (tokens, targets) = scrambled(SPECS[kind]), text()
    model.zero_grad()
    stored: set[int] = set()

    def pack(t: Tensor) -> Tensor:
        if t.dtype == torch.float32 and t.numel() == tokens.numel() * VOCABULARY:
            stored.add(t.data_ptr())
        return t

    with torch.autocast("cpu", torch.bfloat16):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(tokens, targets)
        logits = model(tokens)
    assert loss.dtype == torch.float32
    assert logits.dtype == (torch.float32 if SPECS[kind].soft_cap else torch.bfloat16)
    assert len(stored) == bool(SPECS[kind].soft_cap)  # capped logits are float32 themselves
    assert abs(loss - model(tokens, targets)) < 0.05
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# torch's compiler instantiates autograd functions, which torch deprecates
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["qwen2", "gpt_speedrun"])  # dense has no layer of its own
def test_compiled_in_one_graph_equals_eager(kind: str) -> None:
    torch._dynamo.reset()
    model, (tokens, targets) = scrambled(replace(SPECS[kind], layers=1)), text()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        gradients(model, compiled(tokens, targets)), gradients(model, model(tokens, targets))
    )
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(tokens, targets), model(tokens, targets))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, params = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, params), strict=True))


def test_two_ranks_have_the_gradients_of_the_whole_batch() -> None:
    results(2, _check_halves)


def _check_halves() -> None:
    """Each rank takes its half of the batch; gradients are means over the ranks."""
    warnings.simplefilter("error")
    tokens, targets = text(batch=4)
    half = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    mesh = init_device_mesh("cpu", (2,))
    for spec in SPECS.values():
        whole = scrambled(spec)
        expected = gradients(whole, whole(tokens, targets))
        replicated, sharded = scrambled(spec), scrambled(spec)
        for layer in sharded.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for model, wrapped in ((replicated, DistributedDataParallel(replicated)), (sharded,) * 2):
            for part in (slice(0, 1), slice(1, 2)):  # accumulated over two passes
                (wrapped(tokens[half][part], targets[half][part]) / 2).backward()
            assert [name for name, _ in model.named_parameters()] == list(expected)
            for name, p in model.named_parameters():
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                torch.testing.assert_close(grad, expected[name], msg=lambda m, n=name: f"{n}: {m}")
            for load, total in zip(model.loads(), whole.loads(), strict=True):
                dist.all_reduce(load)
                assert torch.equal(load, total)


HIDDEN = ("qkv.weight", "out.weight", "gate_up.weight", "up.weight", "down.weight",
          "experts.gate_up", "experts.down")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_plan_needs_only_blocks_and_stacks(kind: str) -> None:
    model = scrambled(SPECS[kind])
    groups = plan(model, blocks=model.blocks(), stacks=model.stacks())
    group_of = {name: group for group in groups for name, _ in group["params"]}
    assert sorted(group_of) == sorted(name for name, _ in model.named_parameters())
    size = model.spec.width // model.spec.heads
    kv = (model.spec.kv_heads or model.spec.heads) * size
    for name, group in group_of.items():
        assert group["algorithm"] == ("matrix" if name.endswith(HIDDEN) else "adamw"), name
        assert group.get("view") == ("stack" if ".experts." in name else None), name
        if name.endswith("qkv.weight"):
            assert group["blocks"] == (3 if kv == model.spec.width else [model.spec.width, kv, kv])
        assert ("gate_up" in name) <= (group.get("blocks", 3) == 2)


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss(kind: str) -> None:
    model, (tokens, targets) = build_model(SPECS[kind]), text()
    model.init_weights(0)
    opt = AngularMuown(plan(model, blocks=model.blocks(), stacks=model.stacks(), aux_lr=0.01), 0.1)
    losses = []
    for _ in range(15):
        opt.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        opt.step()
        model.balance()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
