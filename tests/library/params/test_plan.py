"""plan: every trainable parameter exactly once, where it belongs, or an error that names it."""

import pytest
import torch
from torch import nn

from angular_muown import AngularMuown, Muon, plan
from tests.library.models import BLOCKS, TinyLM, tiny_lm


def rules(groups) -> dict[str, str]:
    return {name: group["algorithm"] for group in groups for name, _ in group["params"]}


def values_of(groups, wanted: str) -> dict:
    return next(g for g in groups for name, _ in g["params"] if name == wanted)


def test_every_parameter_exactly_once_and_where_it_belongs() -> None:
    model = tiny_lm()
    groups = plan(model, blocks=BLOCKS)
    names = [name for group in groups for name, _ in group["params"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    hidden = {"qkv.weight", "out.weight", "up.weight", "down.weight"}
    for name, rule in rules(groups).items():
        assert rule == ("matrix" if any(name.endswith(h) for h in hidden) else "adamw"), name
    assert values_of(groups, "layers.0.attn.qkv.weight")["blocks"] == 3
    assert "blocks" not in values_of(groups, "layers.0.attn.out.weight")


def test_it_prints_as_a_table() -> None:
    model = tiny_lm()
    text = str(plan(model, blocks=BLOCKS, aux_lr=0.003, radius_lr=0.004))
    lines = text.splitlines()
    for word in ("parameter", "shape", "rule", "cut", "lr", "radius lr"):
        assert word in lines[0]
    row = next(line for line in lines if line.startswith("layers.0.attn.qkv.weight"))
    assert "48 x 16" in row
    assert "3 x rows" in row
    assert "0.004" in row
    head = next(line for line in lines if line.startswith("lm_head.weight"))
    assert "head" in head
    assert "0.003" in head
    counted = [int(line.split()[1]) for line in lines[-2:]]
    assert sum(counted) == len(list(model.parameters()))


def test_rates_reach_the_groups() -> None:
    groups = plan(tiny_lm(), aux_lr=0.003, radius_lr=0.004, aux_weight_decay=0.1)
    opt = AngularMuown(groups, lr=0.02)
    for group in opt.param_groups:
        if group["algorithm"] == "adamw":
            assert (group["lr"], group["weight_decay"]) == (0.003, 0.1)
        else:
            assert (group["lr"], group["radius_lr"], group["weight_decay"]) == (0.02, 0.004, 0.0)


def test_overrides_by_pattern() -> None:
    groups = plan(tiny_lm(), overrides={"*.down.weight": {"lr": 0.5, "scale": "rms"}})
    group = values_of(groups, "layers.1.down.weight")
    assert (group["lr"], group["scale"]) == (0.5, "rms")
    assert "lr" not in values_of(groups, "layers.1.up.weight")


class Tied(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.embedding.weight


def test_a_tied_head_is_one_parameter_and_goes_to_adamw() -> None:
    groups = plan(Tied())
    assert rules(groups)["embedding.weight"] == "adamw"
    assert "lm_head.weight" not in rules(groups)


def test_what_the_caller_declares_wins() -> None:
    groups = plan(tiny_lm(), adamw=["*.up.*"], matrix=["lm_head.weight"])
    assert rules(groups)["layers.0.up.weight"] == "adamw"
    assert rules(groups)["lm_head.weight"] == "matrix"


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.randn(4, 16, 8))


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = Router()
        self.mlp = nn.ModuleDict({"gate": nn.Linear(8, 16), "router": nn.Linear(8, 4)})
        self.head = nn.Linear(8, 3)


def test_a_matrix_inside_a_router_is_the_routers() -> None:
    model = nn.ModuleDict({"router": nn.ModuleDict({"gate": nn.Linear(8, 4)})})
    assert rules(plan(model, head=None))["router.gate.weight"] == "adamw"


def test_routers_and_expert_stacks() -> None:
    groups = plan(MoE(), stacks=["*.experts.up"])
    found = rules(groups)
    assert found["moe.gate.weight"] == "adamw"
    assert found["mlp.router.weight"] == "adamw"
    assert found["mlp.gate.weight"] == "matrix", "a gate without experts belongs to a gated MLP"
    assert values_of(groups, "moe.experts.up")["view"] == "stack"
    with pytest.raises(ValueError, match=r"cannot judge 'moe.experts.up' \(4, 16, 8\) in Module"):
        plan(MoE())


def test_all_of_a_router_and_the_gate_of_a_shared_expert() -> None:
    model = nn.ModuleDict(
        {
            "router": nn.ModuleDict({"layer": nn.Linear(8, 4)}),
            "shared_expert": nn.Linear(8, 8),
            "shared_expert_gate": nn.Linear(8, 1),
            "head": nn.Linear(8, 3),
        }
    )
    matrices = [name for name, rule in rules(plan(model)).items() if rule == "matrix"]
    assert matrices == ["shared_expert.weight"]


def test_convolutions() -> None:
    model = nn.ModuleDict(
        {
            "first": nn.Conv2d(3, 8, 3),
            "depthwise": nn.Conv2d(8, 8, 3, groups=8),
            "grouped": nn.Conv2d(8, 8, 3, groups=2),
            "series": nn.Conv1d(8, 4, 3),
            "head": nn.Linear(8, 2),
        }
    )
    groups = plan(model)
    found = rules(groups)
    assert found["depthwise.weight"] == "adamw"
    assert values_of(groups, "first.weight")["view"] == "conv"
    assert values_of(groups, "grouped.weight")["blocks"] == 2
    assert values_of(groups, "series.weight")["view"] == "conv"
    opt = AngularMuown(groups)
    model["first"](torch.randn(2, 3, 8, 8)).sum().backward()
    opt.step()


def test_modules_whose_fused_weights_torch_documents() -> None:
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(8, 2),
            "lstm": nn.LSTM(8, 4, proj_size=2),
            "gru": nn.GRU(8, 4),
            "head": nn.Linear(8, 2),
        }
    )
    groups = plan(model)
    assert values_of(groups, "attention.in_proj_weight")["blocks"] == 3
    assert values_of(groups, "lstm.weight_ih_l0")["blocks"] == 4
    assert "blocks" not in values_of(groups, "lstm.weight_hr_l0")
    assert values_of(groups, "gru.weight_hh_l0")["blocks"] == 3
    AngularMuown(groups)


def test_declaring_a_matrix_keeps_what_torch_documents_of_its_module() -> None:
    model = nn.ModuleDict(
        {"depthwise": nn.Conv2d(8, 8, 3, groups=8), "attention": nn.MultiheadAttention(8, 2)}
    )
    groups = plan(model, matrix=["depthwise.weight", "attention.in_proj_weight"], head=None)
    assert values_of(groups, "depthwise.weight")["view"] == "conv"
    assert values_of(groups, "depthwise.weight")["blocks"] == 8
    assert values_of(groups, "attention.in_proj_weight")["blocks"] == 3
    AngularMuown(groups)


def test_one_plan_serves_several_optimizers() -> None:
    groups = plan(tiny_lm())
    AngularMuown(groups, lr=0.03)
    muon = Muon(groups, lr=0.01)
    assert all(group["family"] == "Muon" and group["lr"] == 0.01 for group in muon.param_groups)


def test_norms_and_attention_biases_with_more_dimensions() -> None:
    model = nn.ModuleDict(
        {
            "norm": nn.LayerNorm((4, 8)),
            "attention": nn.MultiheadAttention(8, 2, add_bias_kv=True),
            "head": nn.Linear(8, 2),
        }
    )
    groups = plan(model)
    assert rules(groups)["norm.weight"] == "adamw"
    assert rules(groups)["attention.bias_k"] == "adamw"
    AngularMuown(groups)


def test_a_cut_taken_back_prints_too() -> None:
    assert "whole" in str(plan(tiny_lm(), overrides={"*.up.weight": {"blocks": None}}))


def test_transposed_weights() -> None:
    groups = plan(tiny_lm(), transposed=["*.up.weight"])
    assert values_of(groups, "layers.0.up.weight")["transposed"] is True


def test_frozen_parameters_are_not_planned() -> None:
    model = tiny_lm()
    model.embedding.requires_grad_(False)
    assert "embedding.weight" not in rules(plan(model))


def test_a_frozen_head_is_not_missed() -> None:
    model = tiny_lm()
    model.requires_grad_(False)
    model.layers[0].up.requires_grad_(True)
    assert rules(plan(model)) == {"layers.0.up.weight": "matrix", "layers.0.up.bias": "adamw"}
    with pytest.raises(ValueError, match=r"head: pattern 'lm_head.weight' matches no trainable"):
        plan(model, head="lm_head.weight")


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 3))
        self.lm_head = nn.Linear(3, 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"blocks": {"*.attention.qkv": 3}}, r"blocks: pattern '\*.attention.qkv' matches no"),
        ({"adamw": ["nothing"]}, "pattern 'nothing' matches no trainable parameter"),
        ({"head": "tail.*"}, "head: pattern 'tail"),
        ({"overrides": {"*.x": {}}}, "overrides: pattern"),
        (
            {"matrix": ["*.up.weight"], "adamw": ["layers.0.*"]},
            r"'layers.0.up.weight' is matched by '\*.up.weight' and by 'layers.0.\*'",
        ),
        ({"blocks": {"*.qkv.weight": 3, "layers.0.*qkv*": 3}}, "is matched by"),
        ({"blocks": {"embedding.weight": 2}}, "goes to AdamW"),
        ({"matrix": ["*.up.weight"], "adamw": ["*.up.weight"]}, "is matched by"),
        ({"overrides": {"*.up.weight": {"algorithm": "adamw"}}}, "use matrix="),
        (
            {"blocks": {"*.qkv.weight": 3}, "overrides": {"*.qkv.weight": {"blocks": 2}}},
            "settled already",
        ),
        ({"head": "lm_head.*", "matrix": ["lm_head.weight"]}, "say it once"),
        ({"adamw": ["*.up.weight"], "transposed": ["*.up.weight"]}, "needs no orientation"),
    ],
)
def test_patterns_that_do_not_fit(arguments, words) -> None:
    with pytest.raises(ValueError, match=words):
        plan(tiny_lm(), **arguments)


def test_what_cannot_be_judged_is_named_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"cannot judge 'table' \(5, 3\) in Bare.*adamw=\["):
        plan(Bare())
    assert rules(plan(Bare(), matrix=["table"]))["table"] == "matrix"


def test_a_model_without_a_visible_head_has_to_say_so() -> None:
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"finds no output head in Sequential.*head=None"):
        plan(mlp)
    assert rules(plan(mlp, head="2.*"))["2.weight"] == "adamw"
    assert rules(plan(mlp, head=None))["2.weight"] == "matrix"
    with pytest.raises(ValueError, match="finds no output head"):
        plan(mlp, adamw=["0.weight"])  # says nothing about the head


def test_a_string_is_one_pattern() -> None:
    assert rules(plan(tiny_lm(), adamw="layers.0.up.weight"))["layers.0.up.weight"] == "adamw"


def test_overrides_show_in_the_table() -> None:
    text = str(plan(tiny_lm(), overrides={"*.up.weight": {"momentum": 0.5}}, aux_weight_decay=0.1))
    row = next(line for line in text.splitlines() if line.startswith("layers.0.up.weight"))
    assert row.endswith("hidden, momentum=0.5")
    head = next(line for line in text.splitlines() if line.startswith("lm_head.weight"))
    assert head.endswith("head, weight_decay=0.1")


def test_fc_is_a_head_on_top_only_and_transposed_convolutions_go_to_adamw() -> None:
    model = nn.ModuleDict(
        {
            "up": nn.ConvTranspose2d(8, 4, 2),
            "block": nn.ModuleDict({"fc": nn.Linear(8, 8)}),
            "fc": nn.Linear(8, 2),
        }
    )
    found = rules(plan(model))
    assert found["up.weight"] == "adamw"
    assert found["block.fc.weight"] == "matrix"
    assert found["fc.weight"] == "adamw"


def test_a_model_is_no_parameter_list() -> None:
    with pytest.raises(TypeError, match=r"pass plan\(model\)"):
        AngularMuown(tiny_lm())


def test_blocks_that_do_not_divide_are_caught_by_the_optimizer() -> None:
    with pytest.raises(ValueError, match=r"'layers.0.attn.qkv.weight' .*48 does not divide into 5"):
        AngularMuown(plan(tiny_lm(), blocks={"*.qkv.weight": 5}))
