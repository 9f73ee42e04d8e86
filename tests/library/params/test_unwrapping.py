"""Wrappers: the plan of a compiled, parallel or checkpointed model is that of the bare model."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from angular_muown import AngularMuown, plan
from angular_muown.params.roles import hidden_matrices
from angular_muown.params.wrappers import bare_parameters, unwrap
from tests.library.models import BLOCKS, tiny_lm


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(8, 8)


class SmallResNet(nn.Module):
    """Stem `conv1` and head `fc`, which are hidden layers inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.fc = nn.Linear(8, 2)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, 8))


class MoELayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), Experts()


class SmallMoE(nn.Module):
    """A router that only the name of its sibling tells from the gate of a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([MoELayer(), MoELayer()])
        self.mlp = nn.ModuleDict({"gate": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        self.lm_head = nn.Linear(8, 20)
        self.lm_head.weight = self.embedding.weight


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "resnet": (SmallResNet, {"adamw": ["layer1.0.conv2.weight"]}),
    "gpt": (tiny_lm, {"blocks": BLOCKS, "overrides": {"layers.0.up.weight": {"lr": 0.1}}}),
    "moe": (SmallMoE, {"stacks": ["layers.*.experts.up"], "head": "auto"}),
}


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def replace_layers(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Wrap, in place, every module that has parameters of its own, and what holds layers."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if not isinstance(child, nn.ModuleList) and any(True for _ in child.parameters()):
                parent._modules[name] = wrap(child)
    return model


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": torch.compile,
    "ddp": DistributedDataParallel,
    "data_parallel": DataParallel,
    "compile(ddp)": lambda model: torch.compile(DistributedDataParallel(model)),
    "ddp(compile)": lambda model: DistributedDataParallel(torch.compile(model)),
    "checkpoint": checkpoint_wrapper,
    "compiled layers": lambda model: replace_layers(model, torch.compile),
    "checkpointed layers": lambda model: replace_layers(model, checkpoint_wrapper),
    "offloaded layers": lambda model: replace_layers(model, offload_wrapper),
    "ddp layers": lambda model: replace_layers(model, DistributedDataParallel),
    "all": lambda model: DistributedDataParallel(
        torch.compile(replace_layers(model, lambda m: torch.compile(checkpoint_wrapper(m))))
    ),
}


def summary(model: nn.Module, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, str]]:
    """Return the groups with names in place of parameters, and the reasons."""
    groups = plan(model, **arguments)
    named = [{**g, "params": [(name, tuple(p.shape)) for name, p in g["params"]]} for g in groups]
    return named, dict(groups.reasons)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_of_a_wrapped_model_is_that_of_the_bare_model(name, wrapping) -> None:
    build, arguments = MODELS[name]
    bare = build()
    wrapped = WRAPPINGS[wrapping](copy.deepcopy(bare))
    assert list(dict(wrapped.named_parameters())) != list(dict(bare.named_parameters())) or (
        wrapping == "checkpoint"  # which hides its prefix, but not its children's
    )
    assert summary(wrapped, arguments) == summary(bare, arguments)
    assert hidden_matrices(wrapped) == hidden_matrices(bare)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("name", MODELS)
def test_bare_names_are_those_of_the_bare_model(name, wrapping) -> None:
    bare = MODELS[name][0]()
    expected = [key for key, _ in bare.named_parameters()]
    model = WRAPPINGS[wrapping](bare)
    assert [key for key, _ in bare_parameters(model)] == expected


def test_names_of_modules_called_module_are_kept() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    expected = ["module.weight", "module.bias", "head.weight", "head.bias"]
    assert [name for name, _ in bare_parameters(DistributedDataParallel(model))] == expected


def test_unwrap_returns_the_bare_model() -> None:
    model = nn.Linear(2, 2)
    assert unwrap(model) is model
    assert unwrap(torch.compile(DistributedDataParallel(checkpoint_wrapper(model)))) is model


class CausalSelfAttention(nn.Module):
    """With the names of nanoGPT's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.n_embd, self.c_attn = 8, nn.Linear(8, 24)


@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper, DistributedDataParallel])
def test_a_fused_layer_is_known_by_its_parent_inside_wrappers(wrap) -> None:
    model = nn.ModuleDict({"attn": wrap(CausalSelfAttention()), "head": nn.Linear(8, 2)})
    attention = unwrap(model["attn"])
    attention.c_attn = wrap(attention.c_attn)
    groups = plan(model)
    assert [g["blocks"] for g in groups if "blocks" in g] == [3]


def test_a_wrapped_model_trains_as_the_bare_one() -> None:
    """The optimizer's state belongs to the same names."""
    torch.manual_seed(0)
    bare = tiny_lm()
    wrapped = DistributedDataParallel(copy.deepcopy(bare))
    tokens = torch.randint(0, 20, (2, 6))
    optimizers = [AngularMuown(plan(m, blocks=BLOCKS), lr=0.1) for m in (bare, wrapped)]
    for model, optimizer in zip((bare, wrapped), optimizers, strict=True):
        _loss(model, tokens).backward()
        optimizer.step()
    for p, q in zip(bare.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(p, q)
    names = [[g["param_names"] for g in optimizer.param_groups] for optimizer in optimizers]
    assert names[0] == names[1]


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean()


def test_fsdp1_is_refused_inside_a_wrapper() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates FSDP1
        body = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    model = nn.ModuleDict({"body": body, "head": nn.Linear(8, 2)})
    for wrapped in (torch.compile(model), checkpoint_wrapper(model)):
        with pytest.raises(ValueError, match="body' is wrapped by FSDP1"):
            plan(wrapped)


def test_a_missing_head_is_reported_for_the_bare_model() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with pytest.raises(ValueError, match="no output head in Sequential"):
        plan(torch.compile(model))
    assert plan(torch.compile(model), head="1.*")
