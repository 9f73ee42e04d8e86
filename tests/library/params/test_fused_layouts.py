"""Fused layouts: of plain PyTorch models, of the user's own classes, and of layers left whole."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from angular_muown import AngularMuown, plan
from angular_muown.params.fused_layouts import FUSED_LAYOUTS, declare_cuts
from angular_muown.params.roles import warn_if_one_row
from tests.library.row_uses import attention_uses, block_of_rows


def group_of(groups, parameter: str) -> dict:
    return next(g for g in groups for name, _ in g["params"] if name == parameter)


class CausalSelfAttention(nn.Module):
    """Attention with the names and the layout of nanoGPT's."""

    def __init__(self, width: int, heads: int, rows: int | None = None) -> None:
        super().__init__()
        self.n_embd, self.n_head = width, heads
        self.c_attn = nn.Linear(width, rows or 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.unflatten(2, (self.n_head, -1)).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """An embedding, one attention layer and a tied head, as in nanoGPT."""

    def __init__(self, attention: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.wte, self.attn = nn.Embedding(20, width), attention
        self.lm_head = nn.Linear(width, 20, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.attn(self.wte(tokens)))


def test_nanogpts_projection_is_cut_as_its_forward_pass_splits_it() -> None:
    model = Model(CausalSelfAttention(8, 2)).double()
    group = group_of(plan(model), "attn.c_attn.weight")
    assert (group["blocks"], "interleaved" in group) == (3, False)
    uses = attention_uses(model.attn, model.attn.c_attn, model)
    expected = ["query", "key", "value"]
    assert uses == [expected[block] for block in block_of_rows(group, 24)]


class PerHead(nn.Module):
    """Attention of the user, whose rows are q, k and v of one head after another."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.wqkv = heads, nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(2, (self.heads, 3, -1)).transpose(1, 2).unbind(3)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2)


class Subclass(PerHead):
    pass


@pytest.mark.parametrize("kind", [PerHead, Subclass])
@pytest.mark.parametrize(
    "entry",
    [
        {"blocks": 3, "interleaved": 2},
        lambda attention: {"blocks": 3, "interleaved": attention.heads},
    ],
    ids=["values", "function"],
)
def test_the_user_describes_classes_and_subclasses_inherit(kind, entry) -> None:
    model = Model(kind()).double()
    groups = plan(model, layouts={"PerHead.wqkv": entry})
    group = group_of(groups, "attn.wqkv.weight")
    uses = attention_uses(model.attn, model.attn.wqkv, model)
    expected = ["query", "key", "value"]
    assert uses == [expected[block] for block in block_of_rows(group, 24)]
    assert groups.reasons["attn.wqkv.weight"] == "PerHead"
    AngularMuown(groups)


class Stack(nn.Module):
    """Experts as one parameter, stored as in x out."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 8, 12))


def test_a_layout_can_describe_a_parameter_and_its_view() -> None:
    model = Model(Stack())
    values = {"view": "stack", "transposed": True, "blocks": 2}
    group = group_of(plan(model, layouts={"Stack.experts": values}), "attn.experts")
    assert {key: group[key] for key in values} == values


def test_the_users_layout_replaces_a_known_one() -> None:
    model = Model(CausalSelfAttention(8, 2))
    layouts = {"CausalSelfAttention.c_attn": {"blocks": 6}}
    assert group_of(plan(model, layouts=layouts), "attn.c_attn.weight")["blocks"] == 6
    assert group_of(plan(model), "attn.c_attn.weight")["blocks"] == 3


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"PerHed.wqkv": {"blocks": 3}}, r"'PerHed.wqkv' matches no layer.*such as PerHead.wqkv"),
        ({"PerHead.wqkv": {"rows": 3}}, r"layouts\['PerHead.wqkv'\] sets rows: only blocks"),
    ],
)
def test_bad_layouts_are_rejected(layouts, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan(Model(PerHead()), layouts=layouts)


def test_a_function_of_the_user_fails_visibly() -> None:
    with pytest.raises(AttributeError, match="kv_heads"):
        plan(Model(PerHead()), layouts={"PerHead.wqkv": lambda a: {"blocks": a.kv_heads}})


def test_a_class_that_only_shares_a_known_name_is_not_cut() -> None:
    """Grouped queries have fewer key rows than nanoGPT's attention."""
    model = Model(CausalSelfAttention(8, 2, rows=16))
    with pytest.warns(UserWarning, match=r"attn.c_attn.weight: a layer of this name"):
        groups = plan(model)
    assert "blocks" not in group_of(groups, "attn.c_attn.weight")

    class MptAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.Wqkv = nn.Linear(8, 16)  # does not divide by 3

    class Phi3Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = nn.Linear(8, 24)  # without the attributes that the entry reads

    for attention, name in ((MptAttention(), "Wqkv"), (Phi3Attention(), "qkv_proj")):
        with pytest.warns(UserWarning, match=f"attn.{name}.weight"):
            assert "blocks" not in group_of(plan(Model(attention)), f"attn.{name}.weight")


def test_declared_blocks_replace_a_known_cut() -> None:
    known = {"blocks": 3, "interleaved": 4}
    assert declare_cuts(known, {"blocks": 3}) == known
    assert declare_cuts(known, {"blocks": 6}) == {"blocks": 6}
    assert "blocks" not in declare_cuts(known, {"blocks": 1})
    assert declare_cuts(known, {"blocks": 6, "interleaved": 2}) == {"blocks": 6, "interleaved": 2}
    assert declare_cuts(known, {"interleaved": 1}) == {"blocks": 3}


def test_every_key_names_a_class_and_an_attribute() -> None:
    for key in FUSED_LAYOUTS:
        kind, attribute = key.split(".")
        assert kind.isidentifier()
        assert attribute.isidentifier()


def layers(**modules: nn.Module) -> nn.Module:
    blocks = nn.ModuleList([nn.ModuleDict(modules), nn.ModuleDict(modules)])
    return nn.ModuleDict({"layers": blocks, "head": nn.Linear(8, 2)})


def warnings_of(model: nn.Module, **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan(model, **arguments)
    return [str(warning.message) for warning in caught]


FUSED = ("qkv", "Wqkv", "wqkv", "to_qkv", "qkv_proj", "c_attn", "query_key_value", "gate_up_proj",
         "w12", "w13", "in_proj", "in_proj_qkvz", "kv_a_proj_with_mqa", "kv_b_proj")  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_a_layer_that_is_usually_fused_warns_once_if_it_stays_whole(name) -> None:
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(nn.ModuleDict({name: nn.Linear(8, 24)}) for _ in range(3)),
            "head": nn.Linear(8, 2),
        }
    )
    pattern = f"layers.*.{name}.weight"
    (message,) = warnings_of(model)
    assert message.startswith(f"{pattern}: ")
    assert f"blocks={{'{pattern}': " in message
    for blocks in (1, 3):
        assert warnings_of(model, blocks={pattern: blocks}) == []
    assert warnings_of(model, adamw=[pattern]) == []
    assert warnings_of(model, layouts={f"ModuleDict.{name}": {"blocks": 1}}) == []


def test_other_names_do_not_warn() -> None:
    separate = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "out_proj", "c_fc", "c_proj",
                "w1", "w2", "w3", "fc1", "action_in_proj", "kv_norm")  # fmt: skip
    assert warnings_of(layers(**{name: nn.Linear(8, 8) for name in separate})) == []
    assert warnings_of(layers(attention=nn.MultiheadAttention(8, 2))) == []


def test_the_remedy_names_all_patterns() -> None:
    (message,) = warnings_of(layers(qkv=nn.Linear(8, 24), gate_up=nn.Linear(8, 16)))
    assert "blocks={'layers.*.qkv.weight': 3, 'layers.*.gate_up.weight': 2}" in message


def test_a_matrix_with_one_row_warns() -> None:
    """As nanochat's smear_gate, which learns one number per position."""
    model = layers(smear_gate=nn.Linear(8, 1), up=nn.Linear(1, 8))
    (message,) = warnings_of(model)
    assert message.startswith("layers.*.smear_gate.weight: has one row")
    assert "adamw=['layers.*.smear_gate.weight']" in message
    assert warnings_of(model, adamw=["layers.*.smear_gate.weight"]) == []
    assert warnings_of(model, matrix=["layers.*.smear_gate.weight"]) == []


def test_rows_are_counted_in_the_orientation_of_the_group() -> None:
    column = [("up", torch.ones(8, 1))]
    with pytest.warns(UserWarning, match="up: has one row"):
        warn_if_one_row([{"algorithm": "matrix", "params": column, "transposed": True}])
    warn_if_one_row([{"algorithm": "matrix", "params": column}])
    warn_if_one_row([{"algorithm": "adamw", "params": column, "transposed": True}])


class Nanochat(nn.Module):
    """A model with the parameters of nanochat's: separate projections, value embeddings, gates."""

    def __init__(self, width: int = 8, vocabulary: int = 20) -> None:
        super().__init__()
        names = ("c_q", "c_k", "c_v", "c_proj")
        attention = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in names})
        attention["ve_gate"] = nn.Linear(4, 2, bias=False)
        mlp = {"c_fc": nn.Linear(width, 32, bias=False), "c_proj": nn.Linear(32, width, bias=False)}
        block = nn.ModuleDict({"attn": attention, "mlp": nn.ModuleDict(mlp)})
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(vocabulary, width), "h": nn.ModuleList([block])}
        )
        self.value_embeds = nn.ModuleDict({"0": nn.Embedding(vocabulary, width)})
        self.resid_lambdas, self.x0_lambdas = (nn.Parameter(torch.ones(1)) for _ in range(2))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)


def test_nanochat_needs_no_cut_and_its_embeddings_and_scales_go_to_adamw() -> None:
    groups = plan(Nanochat())
    matrices = [g for g in groups if g["algorithm"] == "matrix"]
    names = {name.removeprefix("transformer.h.0.") for g in matrices for name, _ in g["params"]}
    assert names == {
        *(f"attn.{name}.weight" for name in ("c_q", "c_k", "c_v", "c_proj", "ve_gate")),
        *(f"mlp.{name}.weight" for name in ("c_fc", "c_proj")),
    }
    assert all("blocks" not in group for group in matrices)
