"""plan: every trainable parameter is in exactly one group, the right one, or an error names it."""

import numpy as np
import pytest
import torch
from torch import nn

from angular_muown import AngularMuown, Muon, plan
from tests.library.models import BLOCKS, TinyLM, tiny_lm


def rules(groups) -> dict[str, str]:
    return {name: group["algorithm"] for group in groups for name, _ in group["params"]}


def group_of(groups, parameter: str) -> dict:
    return next(g for g in groups for name, _ in g["params"] if name == parameter)


def test_every_parameter_is_in_exactly_one_group_the_right_one() -> None:
    model = tiny_lm()
    groups = plan(model, blocks=BLOCKS)
    names = [name for group in groups for name, _ in group["params"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    hidden = {"qkv.weight", "out.weight", "up.weight", "down.weight"}
    for name, rule in rules(groups).items():
        assert rule == ("matrix" if any(name.endswith(h) for h in hidden) else "adamw"), name
    assert group_of(groups, "layers.0.attn.qkv.weight")["blocks"] == 3
    assert "blocks" not in group_of(groups, "layers.0.attn.out.weight")


def test_a_plan_prints_as_a_table() -> None:
    model = tiny_lm()
    text = plan(model, blocks=BLOCKS, aux_lr=0.003, radius_lr=0.004).table()
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
    counts = [int(line.split()[1]) for line in lines[-2:]]
    assert sum(counts) == len(list(model.parameters()))


def test_learning_rates_and_decay_reach_the_groups() -> None:
    groups = plan(tiny_lm(), aux_lr=0.003, radius_lr=0.004, aux_weight_decay=0.1)
    opt = AngularMuown(groups, lr=0.02)
    for group in opt.param_groups:
        if group["algorithm"] == "adamw":
            assert (group["lr"], group["weight_decay"]) == (0.003, 0.1)
        else:
            assert (group["lr"], group["radius_lr"], group["weight_decay"]) == (0.02, 0.004, 0.0)


def test_betas_of_the_adamw_groups_are_their_own() -> None:
    model = tiny_lm()
    overrides = {"lm_head.weight": {"betas": (0.7, 0.8)}}
    groups = plan(model, aux_betas=(0.9, 0.99), overrides=overrides)
    assert "betas=(0.9, 0.99)" in groups.table()
    for group in AngularMuown(groups, lr=0.02, betas=(0.8, 0.9)).param_groups:
        own = (0.7, 0.8) if "lm_head.weight" in group["param_names"] else (0.9, 0.99)
        assert group["betas"] == ((0.8, 0.9) if group["algorithm"] == "matrix" else own)
    usual = AngularMuown(plan(model), lr=0.02, betas=(0.8, 0.9))
    assert {group["betas"] for group in usual.param_groups} == {(0.8, 0.9)}
    assert all("betas" not in group for group in plan(model))


@pytest.mark.parametrize("betas", [[0.9, 0.99], (np.float32(0.9), np.float64(0.99))])
def test_betas_in_a_list_or_of_numpy_become_plain_numbers(betas) -> None:
    group = group_of(plan(tiny_lm(), aux_betas=betas), "lm_head.weight")
    assert group["betas"] == pytest.approx((0.9, 0.99))
    assert [type(group["betas"]), *map(type, group["betas"])] == [tuple, float, float]


@pytest.mark.parametrize("betas", [(0.9, 1.0), (0.9,), 0.99, (-0.1, 0.9), "0.9, 0.99"])
def test_betas_that_are_none_are_rejected_by_name(betas) -> None:
    with pytest.raises(ValueError, match=r"^aux_betas=.* is not valid: .* two numbers in \[0, 1\)"):
        plan(tiny_lm(), aux_betas=betas)


def test_overrides_apply_by_pattern() -> None:
    groups = plan(tiny_lm(), overrides={"*.down.weight": {"lr": 0.5, "scale": "rms"}})
    group = group_of(groups, "layers.1.down.weight")
    assert (group["lr"], group["scale"]) == (0.5, "rms")
    assert "lr" not in group_of(groups, "layers.1.up.weight")


class Tied(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.embedding.weight


def test_a_tied_head_is_one_parameter_and_goes_to_adamw() -> None:
    groups = plan(Tied())
    assert rules(groups)["embedding.weight"] == "adamw"
    assert "lm_head.weight" not in rules(groups)


def test_declarations_override_the_inferred_role() -> None:
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


def test_a_matrix_inside_a_router_goes_to_adamw() -> None:
    model = nn.ModuleDict({"router": nn.ModuleDict({"gate": nn.Linear(8, 4)})})
    assert rules(plan(model, head=None))["router.gate.weight"] == "adamw"


def test_routers_go_to_adamw_and_expert_stacks_must_be_declared() -> None:
    groups = plan(MoE(), stacks=["*.experts.up"])
    by_name = rules(groups)
    assert by_name["moe.gate.weight"] == "adamw"
    assert by_name["mlp.router.weight"] == "adamw"
    assert by_name["mlp.gate.weight"] == "matrix", "a gate without experts belongs to a gated MLP"
    assert group_of(groups, "moe.experts.up")["view"] == "stack"
    with pytest.raises(ValueError, match=r"role of 'moe.experts.up' \(4, 16, 8\) in Module"):
        plan(MoE())


def test_all_of_a_router_and_the_gate_of_a_shared_expert_go_to_adamw() -> None:
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


def test_convolutions_are_matrices_unless_depthwise() -> None:
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
    assert rules(groups)["depthwise.weight"] == "adamw"
    assert group_of(groups, "first.weight")["view"] == "conv"
    assert group_of(groups, "grouped.weight")["blocks"] == 2
    assert group_of(groups, "series.weight")["view"] == "conv"
    opt = AngularMuown(groups)
    model["first"](torch.randn(2, 3, 8, 8)).sum().backward()
    opt.step()


def test_fused_weights_of_torch_modules_are_cut_into_blocks() -> None:
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(8, 2),
            "lstm": nn.LSTM(8, 4, proj_size=2),
            "gru": nn.GRU(8, 4),
            "head": nn.Linear(8, 2),
        }
    )
    groups = plan(model)
    assert group_of(groups, "attention.in_proj_weight")["blocks"] == 3
    assert group_of(groups, "lstm.weight_ih_l0")["blocks"] == 4
    assert "blocks" not in group_of(groups, "lstm.weight_hr_l0")
    assert group_of(groups, "gru.weight_hh_l0")["blocks"] == 3
    AngularMuown(groups)


def test_declaring_a_matrix_keeps_the_layout_of_a_torch_module() -> None:
    model = nn.ModuleDict(
        {"depthwise": nn.Conv2d(8, 8, 3, groups=8), "attention": nn.MultiheadAttention(8, 2)}
    )
    groups = plan(model, matrix=["depthwise.weight", "attention.in_proj_weight"], head=None)
    assert group_of(groups, "depthwise.weight")["view"] == "conv"
    assert group_of(groups, "depthwise.weight")["blocks"] == 8
    assert group_of(groups, "attention.in_proj_weight")["blocks"] == 3
    AngularMuown(groups)


def test_one_plan_serves_several_optimizers() -> None:
    groups = plan(tiny_lm())
    AngularMuown(groups, lr=0.03)
    muon = Muon(groups, lr=0.01)
    assert all(group["family"] == "Muon" and group["lr"] == 0.01 for group in muon.param_groups)


def test_multidimensional_norms_and_attention_biases_go_to_adamw() -> None:
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


def test_a_cut_overridden_with_none_prints_as_whole() -> None:
    assert "whole" in str(plan(tiny_lm(), overrides={"*.up.weight": {"blocks": None}}))


def test_transposed_weights_are_declared_by_pattern() -> None:
    groups = plan(tiny_lm(), transposed=["*.up.weight"])
    assert group_of(groups, "layers.0.up.weight")["transposed"] is True


def test_frozen_parameters_are_not_planned() -> None:
    model = tiny_lm()
    model.embedding.requires_grad_(False)
    assert "embedding.weight" not in rules(plan(model))


def test_a_frozen_head_counts_as_the_head() -> None:
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
    ("arguments", "message"),
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
            "already set",
        ),
        ({"head": "lm_head.*", "matrix": ["lm_head.weight"]}, "remove one of them"),
        ({"adamw": ["*.up.weight"], "transposed": ["*.up.weight"]}, "ignores the orientation"),
    ],
)
def test_bad_patterns_are_rejected(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan(tiny_lm(), **arguments)


def test_a_parameter_with_an_unknown_role_is_named_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"role of 'table' \(5, 3\) in Bare.*adamw=\["):
        plan(Bare())
    assert rules(plan(Bare(), matrix=["table"]))["table"] == "matrix"


def test_a_head_that_is_not_found_must_be_declared() -> None:
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"finds no output head in Sequential.*head=None"):
        plan(mlp)
    assert rules(plan(mlp, head="2.*"))["2.weight"] == "adamw"
    assert rules(plan(mlp, head=None))["2.weight"] == "matrix"
    with pytest.raises(ValueError, match="finds no output head"):
        plan(mlp, adamw=["0.weight"])  # does not declare the head


def test_a_string_is_a_single_pattern() -> None:
    assert rules(plan(tiny_lm(), adamw="layers.0.up.weight"))["layers.0.up.weight"] == "adamw"


def test_the_table_shows_overrides() -> None:
    overrides = {"*.up.weight": {"momentum": 0.5}}
    text = plan(tiny_lm(), overrides=overrides, aux_weight_decay=0.1).table()
    row = next(line for line in text.splitlines() if line.startswith("layers.0.up.weight"))
    assert row.endswith("hidden, momentum=0.5")
    head = next(line for line in text.splitlines() if line.startswith("lm_head.weight"))
    assert head.endswith("head, weight_decay=0.1")


def test_fc_is_a_head_at_the_top_level_only_and_transposed_convolutions_go_to_adamw() -> None:
    model = nn.ModuleDict(
        {
            "up": nn.ConvTranspose2d(8, 4, 2),
            "block": nn.ModuleDict({"fc": nn.Linear(8, 8)}),
            "fc": nn.Linear(8, 2),
        }
    )
    by_name = rules(plan(model))
    assert by_name["up.weight"] == "adamw"
    assert by_name["block.fc.weight"] == "matrix"
    assert by_name["fc.weight"] == "adamw"


def test_a_model_instead_of_parameters_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"use AngularMuown.for_model\(model\)"):
        AngularMuown(tiny_lm())


def test_the_optimizer_rejects_blocks_that_do_not_divide() -> None:
    with pytest.raises(
        ValueError, match=r"'layers.0.attn.qkv.weight' .*48, which does not divide into 5"
    ):
        AngularMuown(plan(tiny_lm(), blocks={"*.qkv.weight": 5}))
