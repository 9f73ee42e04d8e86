"""From a model to an optimizer in one call, and what it shows of itself."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import angular_muown
from angular_muown import AngularMuown, Engine, Muon, create, plan, wsd_schedule
from angular_muown.optimizers import FAMILY as NAMES
from tests.library.family import MEMBERS, WITH_RADII
from tests.library.models import loss_of, tiny_lm

BLOCKS = {"*.qkv.weight": 3}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for seed in range(steps):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.__name__)
def test_for_model_equals_plan_and_constructor_bit_for_bit(member) -> None:
    a, b = tiny_lm(), tiny_lm()
    one = member.for_model(a, 0.01, blocks=BLOCKS, aux_lr=0.003, momentum=0.9, average=0.1)
    other = member(plan(b, blocks=BLOCKS, aux_lr=0.003), lr=0.01, momentum=0.9, average=0.1)
    assert type(one) is member
    for model, optimizer in ((a, one), (b, other)):
        train(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert [g["param_names"] for g in one.param_groups] == [
        g["param_names"] for g in other.param_groups
    ]


@pytest.mark.parametrize("name", NAMES)
def test_aux_betas_equal_betas_set_by_hand_bit_for_bit(name) -> None:
    a, b = tiny_lm(), tiny_lm()
    one = create(name, a, 0.01, blocks=BLOCKS, aux_betas=(0.8, 0.99))
    other = create(name, b, 0.01, blocks=BLOCKS)
    for group in other.param_groups:
        if group["algorithm"] == "adamw":
            group["betas"] = (0.8, 0.99)
    for model, optimizer in ((a, one), (b, other)):
        train(model, optimizer, 5)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]
    usual = tiny_lm()
    train(usual, create(name, usual, 0.01, blocks=BLOCKS), 5)
    assert not torch.equal(usual.lm_head.weight, a.lm_head.weight)


@pytest.mark.parametrize("member", WITH_RADII[:3], ids=lambda m: m.__name__)
def test_radius_lr_reaches_the_matrices(member) -> None:
    optimizer = member.for_model(tiny_lm(), blocks=BLOCKS, radius_lr=0.005)
    groups = [g for g in optimizer.param_groups if g["algorithm"] == "matrix"]
    assert {g["radius_lr"] for g in groups} == {0.005}


def test_for_model_rejects_what_is_neither_an_option_nor_an_argument_of_plan() -> None:
    with pytest.raises(TypeError, match=r"'momentun'; did you mean 'momentum'\?"):
        AngularMuown.for_model(tiny_lm(), momentun=0.9)
    with pytest.raises(TypeError, match=r"'block'; did you mean 'blocks'\?"):
        AngularMuown.for_model(tiny_lm(), block=BLOCKS)


@pytest.mark.parametrize("lr", [5e-5, 3e-4])
def test_a_learning_rate_of_adamw_warns(lr) -> None:
    with pytest.warns(UserWarning, match=r"AdamW's learning rates do not apply to the matrices"):
        AngularMuown.for_model(tiny_lm(), lr)
    assert warnings_of(lambda: Muon.for_model(tiny_lm(), lr, blocks=BLOCKS)) == []


def test_parameters_instead_of_a_model_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"pass the model, not its parameters"):
        AngularMuown.for_model(tiny_lm().parameters())
    with pytest.raises(ValueError, match=r"is not a matrix: use AngularMuown.for_model\(model\)"):
        AngularMuown(tiny_lm().parameters())
    with pytest.raises(TypeError, match=r"did you mean 'lr'\?"):
        AngularMuown.for_model(tiny_lm(), learning_rate=0.02)


def test_create_knows_every_member_by_name() -> None:
    public = {getattr(angular_muown, name) for name in angular_muown.__all__}
    members = {x for x in public if isinstance(x, type) and issubclass(x, Engine)} - {Engine}
    assert set(NAMES.values()) == members
    for name, member in NAMES.items():
        optimizer = create(name, tiny_lm(), blocks=BLOCKS)
        assert type(optimizer) is member
        assert optimizer.defaults["lr"] == member.for_model(tiny_lm()).defaults["lr"]
    with pytest.raises(ValueError, match="name='adam' is not an optimizer: choose one of angular"):
        create("adam", tiny_lm())


# --- what it shows ---


def test_the_plan_of_an_optimizer_says_what_happens_to_each_parameter() -> None:
    model = tiny_lm()
    optimizer = AngularMuown.for_model(model, 0.02, blocks=BLOCKS, aux_lr=0.003)
    table = optimizer.plan.table()
    for name, _ in model.named_parameters():
        assert name in table
    text = str(optimizer.plan)
    qkv = next(line for line in text.splitlines() if "qkv.weight" in line)
    assert qkv.split()[:2] == ["layers.*.attn.qkv.weight", "x2"]
    assert "3 x rows" in qkv
    assert "0.02" in qkv
    assert "lr 0.003" in text.splitlines()[-1]
    assert "step=" not in text


def test_a_plan_prints_readably_also_in_a_notebook() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
    optimizer = AngularMuown.for_model(model, head="1.*")
    text = repr(optimizer.plan)
    assert text == str(optimizer.plan)
    assert "0.weight" in text
    assert "*" not in text  # it stands for a layer's number where several lines are one
    assert "matrix: 1 parameter, 16 elements" in text
    assert "KiB of state" in text


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_keep_the_reasons_and_the_betas(copied) -> None:
    optimizer = AngularMuown.for_model(tiny_lm(), blocks=BLOCKS, betas=(0.8, 0.9))
    other = copied(optimizer)
    assert str(other.plan) == str(optimizer.plan)
    other.add_param_group({"params": [("more", nn.Parameter(torch.randn(4, 4)))]})
    assert other.param_groups[-1]["betas"] == (0.8, 0.9)


def test_an_optimizer_pickled_by_version_0_1_still_loads() -> None:
    optimizer = AngularMuown.for_model(tiny_lm(), blocks=BLOCKS, betas=(0.8, 0.9))
    state = optimizer.__getstate__()
    old = {key: state[key] for key in ("defaults", "state", "param_groups", "process_group")}
    old["defaults"] = {**old["defaults"], "betas": (0.8, 0.9)}
    loaded = AngularMuown.__new__(AngularMuown)
    loaded.__setstate__(old)
    loaded.add_param_group({"params": [("more", nn.Parameter(torch.randn(4, 4)))]})
    assert loaded.param_groups[-1]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("options", [{}, {"state_dtype": "bfloat16"}, {"average": 0.1}], ids=str)
def test_the_bytes_of_state_are_those_after_a_step(member, options) -> None:
    model = tiny_lm()
    optimizer = member.for_model(model, blocks=BLOCKS, **options)
    predicted = sum(optimizer.plan.state_bytes.values())
    train(model, optimizer, 1)
    assert predicted == sum(x.nbytes for s in optimizer.state.values() for x in s.values())


def test_repr_is_short_and_shows_what_differs_from_the_defaults() -> None:
    text = repr(AngularMuown.for_model(tiny_lm(), 0.01, blocks=BLOCKS, decay_degree=0.0))
    assert text.splitlines()[0] == "AngularMuown(lr=0.01, decay_degree=0.0)"
    assert len(text.splitlines()) == 3


# --- a torch.optim.Optimizer ---


@pytest.mark.parametrize("option", ["fused", "foreach"])
def test_fused_and_foreach_reach_the_adamw_groups(option) -> None:
    model = tiny_lm()
    optimizer = AngularMuown.for_model(model, blocks=BLOCKS, **{option: True})
    assert all(group[option] is True for group in optimizer.param_groups)
    train(model, optimizer)
    plain = tiny_lm()
    usual = AngularMuown.for_model(plain, blocks=BLOCKS)
    assert option not in usual.param_groups[0]  # so that earlier checkpoints have the same keys
    train(plain, usual)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_fused_and_foreach_together_are_rejected() -> None:
    with pytest.raises(ValueError, match="fused=True with foreach=True"):
        AngularMuown.for_model(tiny_lm(), blocks=BLOCKS, fused=True, foreach=True)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.__name__)
def test_one_cycle_cycles_the_momentum(member) -> None:
    model = tiny_lm()
    optimizer = member.for_model(model, blocks=BLOCKS)
    loss_of(model).backward()
    scheduler = lr_scheduler.OneCycleLR(
        optimizer, 0.02, total_steps=10, base_momentum=0.8, max_momentum=0.9
    )
    momenta, betas = [], []
    for _ in range(9):
        momenta.append(optimizer.param_groups[0]["momentum"])
        betas.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        scheduler.step()
    assert min(momenta) == pytest.approx(0.8)
    assert max(momenta) == pytest.approx(0.9)
    assert set(betas) == {(0.9, 0.95)}


# --- parameters without roles ---


class BiasFreeLM(nn.Module):
    def __init__(self, vocabulary: int = 1000, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
            )
            for _ in range(layers)
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)


def warnings_of(call) -> list[str]:
    """Return the messages of a call's warnings, which point to this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def shapes(*pairs: tuple[int, int]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(*pair)) for pair in pairs]


@pytest.mark.parametrize(
    "params",
    [
        lambda m: m.parameters(),
        lambda m: [{"params": list(m.parameters()), "weight_decay": 0.1}],  # as some trainers do
        lambda m: [*m.layers.parameters(), m.lm_head.weight],
        lambda m: BiasFreeLM(30, 64, 1).named_parameters(),  # small, but known by name
    ],
)
def test_embeddings_among_the_matrices_warn_with_the_remedy(params) -> None:
    (message,) = warnings_of(lambda: Muon(params(BiasFreeLM())))
    assert "looks like an embedding or an output head" in message
    assert "Muon.for_model(model)" in message


@pytest.mark.parametrize(
    "params",
    [
        lambda m: [p for p in m.layers.parameters() if p.ndim == 2],
        lambda m: [m.layers[0][0].weight, m.lm_head.weight],  # too few to tell
        lambda m: shapes(*[(1024, 128), (128, 512)] * 4),  # gate and up, fused
        lambda m: shapes(*[(1024, 128), (128, 2048)] * 4),  # LoRA of grouped values
        lambda m: shapes(*[(512, 2048), (6144, 512), (2048, 2048)] * 4),  # latent attention
        lambda m: shapes(*[(1160, 256), (256, 512)] * 4),  # Mamba-2
        lambda m: shapes(*[(7 * 128, 128), (128, 5 * 128)] * 4),  # attention and MLP in parallel
        lambda m: [{"params": [*m.parameters()], "algorithm": "matrix"}],  # declared
    ],
)
def test_hidden_matrices_do_not_warn(params) -> None:
    assert warnings_of(lambda: Muon(params(BiasFreeLM()))) == []


@pytest.mark.parametrize(
    "construct",
    [
        lambda m: plan(m),
        lambda m: AngularMuown.for_model(m),
        lambda m: create("angular_muown", m),
    ],
)
def test_warnings_of_a_plan_point_to_the_call(construct) -> None:
    assert len(warnings_of(lambda: construct(tiny_lm()))) == 1


def test_a_plan_shows_the_momentum_before_the_schedule() -> None:
    overrides = {"*.up.weight": {"momentum": 0.93}}
    optimizer = AngularMuown.for_model(tiny_lm(), blocks=BLOCKS, overrides=overrides)
    before = str(optimizer.plan)
    assert "momentum=0.93" in before
    wsd_schedule(optimizer, 100, warmup=0, momentum_start=0.8, momentum_ramp=10)
    matrices = [g for g in optimizer.param_groups if g["algorithm"] == "matrix"]
    assert {group["momentum"] for group in matrices} == {0.8}
    assert str(optimizer.plan) == before


def test_a_plan_shows_learning_rates_before_the_schedule_and_no_scheduler_keys() -> None:
    optimizer = AngularMuown.for_model(tiny_lm(), 0.02, blocks=BLOCKS, aux_lr=0.003)
    before = str(optimizer.plan)
    wsd_schedule(optimizer, 100, warmup=0.5)
    lines = str(optimizer.plan).splitlines()
    matrices = [line for line in lines if " matrix " in line]
    assert matrices
    assert all("0.02" in line and "warmup_steps=50" in line for line in matrices)
    assert [x for x in lines if " adamw " in x] == [
        x for x in before.splitlines() if " adamw " in x
    ]
    other = AngularMuown.for_model(tiny_lm(), 0.02, blocks=BLOCKS, aux_lr=0.003)
    lr_scheduler.OneCycleLR(other, 0.02, total_steps=10)
    assert "max_lr" not in str(other.plan)
