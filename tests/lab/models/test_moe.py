"""The mixture of experts: its outputs and gradients, and the balancing of its load."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from angular_lab.config.spec import ModelSpec
from angular_lab.models import build_model
from angular_lab.models.moe import Mixture, MoE, grouped_product, looped_product
from angular_muown import AngularMuown, plan
from tests.lab.tiny import SPECS, scrambled, text

SPEC = replace(SPECS["moe"], experts=6, experts_per_token=3)
LARGE = ModelSpec(
    kind="moe", sequence=4096, layers=14, width=1024, heads=16, kv_heads=4, mlp=5632, tied=False,
    experts=32, experts_per_token=6, expert_mlp=704, shared_mlp=1408, dense_layers=1,
)  # fmt: skip


def mixture(spec: ModelSpec = SPEC, seed: int = 0) -> Mixture:
    layer = Mixture(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return layer


def reference(layer: Mixture, x: Tensor) -> Tensor:
    """Compute the mixture token by token and expert by expert."""

    def swiglu(v: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        f = down.shape[-1]
        return down @ (F.silu(gate_up[:f] @ v) * (gate_up[f:] @ v))

    rows = []
    for v in x.flatten(0, -2):
        scores = [1 / (1 + torch.exp(-(row @ v))) for row in layer.router.weight]
        ranking = [(s + b).item() for s, b in zip(scores, layer.expert_bias, strict=True)]
        best = sorted(range(len(scores)), key=lambda e: -ranking[e])[: layer.chosen]
        total = sum(scores[e] for e in best)
        experts = layer.experts
        out = swiglu(v, layer.shared.gate_up.weight, layer.shared.down.weight)
        for e in best:
            out = out + scores[e] / total * swiglu(v, experts.gate_up[e], experts.down[e])
        rows.append(out)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("preferred", [None, 2], ids=["balanced", "all to one"])
def test_mixture_is_the_weighted_sum_of_its_experts(preferred: int | None) -> None:
    """Values and gradients, also if all tokens choose one expert and none choose two others."""
    layer, x = mixture(), torch.randn(2, 9, SPEC.width, requires_grad=True)
    if preferred is not None:
        layer.expert_bias[preferred] = 10.0
        layer.expert_bias[:2] = -10.0
    inputs = (x, *layer.parameters())
    y, expected = layer(x), reference(layer, x)
    torch.testing.assert_close(y, expected)
    weight = torch.randn_like(y)
    for a, b in zip(
        torch.autograd.grad((y * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("counts", [[5, 0, 11, 8], [0, 0, 24, 0], [1, 7, 13, 3]], ids=str)
def test_grouped_product_equals_looped_product(device: str, counts: list[int]) -> None:
    """Up to bfloat16's rounding, with gradients; experts without tokens have zero gradients."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = torch.randn(24, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    W = torch.randn(4, 8, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    G = torch.randn(24, 8, device=device, dtype=torch.bfloat16)
    sizes = torch.tensor(counts, device=device)
    results = []
    for product in (grouped_product, looped_product):
        y = product(x, W, sizes)
        results.append((y, *torch.autograd.grad(y, (x, W), G)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.1)
    empty = torch.tensor([n == 0 for n in counts])
    assert (results[0][2][empty] == 0).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1000.0])
def test_weights_sum_to_one_over_distinct_experts(scale: float) -> None:
    """At the largest scale, all scores of some tokens underflow to 0 in float32."""
    layer = mixture()
    weights, experts = layer.route(scale * torch.randn(200, SPEC.width))
    torch.testing.assert_close(weights.sum(-1), torch.ones(200))
    assert (weights >= 0).all()
    assert all(len(set(row)) == SPEC.experts_per_token for row in experts.tolist())


def test_router_ignores_autocast() -> None:
    """Rounded to bfloat16, close scores would be reordered."""
    layer, x = mixture(), torch.randn(200, SPEC.width)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = layer.route(x)
    assert all(torch.equal(a, b) for a, b in zip(under_autocast, layer.route(x), strict=True))


def test_bias_affects_the_choice_but_not_the_weights() -> None:
    layer, x = mixture(), torch.randn(50, SPEC.width)
    plain = layer(x)
    layer.expert_bias += 3.0
    torch.testing.assert_close(layer(x), plain)  # a common bias does not change the choice
    layer.expert_bias[1] += 5.0
    weights, experts = layer.route(x)
    assert (experts == 1).any(-1).all()
    scores = torch.sigmoid(x @ layer.router.weight.T).gather(-1, experts)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


def test_every_expert_gets_gradients() -> None:
    model = build_model(SPEC)
    model.init_weights(0)
    for seed in range(3):
        model(*text(seed)).backward()
    for layer in model.mixtures():
        for p in layer.experts.parameters():
            assert (p.grad.flatten(1).norm(dim=1) > 0).all()


def test_loads_count_every_visit_in_training_mode_only() -> None:
    model = scrambled(SPEC)
    assert len(model.loads()) == SPEC.layers - SPEC.dense_layers
    passes = [text(seed)[0] for seed in range(2)]
    for tokens in passes:
        model(tokens)
    visits = sum(tokens.numel() for tokens in passes) * SPEC.experts_per_token
    assert all(load.sum() == visits for load in model.loads())
    model.eval()
    model(passes[0])
    assert all(load.sum() == visits for load in model.loads())


def test_balancing_step_follows_the_sign_rule() -> None:
    layer = mixture()
    layer.load.copy_(torch.tensor([9, 1, 5, 5, 8, 2]))
    layer.balance()
    signs = torch.tensor([-1.0, 1, 0, 0, -1, 1])
    torch.testing.assert_close(layer.expert_bias, SPEC.balance_rate * signs)
    assert (layer.load == 0).all()
    layer.balance()
    torch.testing.assert_close(layer.expert_bias, SPEC.balance_rate * signs)  # no load, no update


def test_balancing_evens_out_a_biased_router() -> None:
    layer = mixture(replace(SPEC, balance_rate=0.003))
    direction = F.normalize(torch.randn(SPEC.width), dim=0)
    with torch.no_grad():  # two experts prefer the common component of all tokens
        layer.router.weight[:2] += 2 * direction

    def imbalance(x: Tensor) -> float:
        layer.load.zero_()
        layer(x)
        return float(layer.load.max() / layer.load.float().mean())

    test_tokens = torch.randn(500, SPEC.width) + 2 * direction
    before = imbalance(test_tokens)
    for _ in range(400):
        layer.load.zero_()
        layer(torch.randn(200, SPEC.width) + 2 * direction)
        layer.balance()
    assert before > 1.7, "at most 2 = experts / experts per token"
    assert imbalance(test_tokens) < 1.2


def test_bias_is_saved_but_not_a_parameter() -> None:
    model = build_model(SPEC)
    biases = [name for name in model.state_dict() if name.endswith("expert_bias")]
    assert len(biases) == SPEC.layers - SPEC.dense_layers
    assert not any("bias" in name for name, _ in model.named_parameters())


def test_large_model_has_the_papers_parameter_counts() -> None:
    with torch.device("meta"):
        model = build_model(LARGE)
    assert isinstance(model, MoE)
    total = sum(p.numel() for p in model.parameters())
    assert round(total / 1e7) == 111
    assert abs(model.active_parameters() / 383e6 - 1) < 0.005
    mlps = 3 * 1024 * (5632 + 13 * (6 * 704 + 1408))
    by_hand = 14 * (2 * 1024 + 2 * 256) * 1024 + mlps + 13 * 32 * 1024 + 50_280 * 1024
    assert model.matrix_parameters() == by_hand
    assert model.active_parameters() == by_hand + 50_280 * 1024 + 29 * 1024


def test_stack_of_experts_trains_like_separate_matrices() -> None:
    model = build_model(SPEC)
    model.init_weights(0)
    stacks = {n: p for n, p in model.named_parameters() if ".experts." in n}
    alone = {n: [nn.Parameter(W.clone()) for W in p.detach()] for n, p in stacks.items()}
    groups = [
        {"params": matrices, "blocks": 2 if "gate_up" in name else 1}
        for name, matrices in alone.items()
    ]
    opt = AngularMuown(plan(model, blocks=model.blocks(), stacks=model.stacks()), lr=0.05)
    split = AngularMuown(groups, lr=0.05)
    for t in range(4):
        opt.zero_grad()
        model(*text(t)).backward()
        for name, p in stacks.items():
            for W, G in zip(alone[name], p.grad, strict=True):
                W.grad = G.clone()
        opt.step()
        split.step()
    for name, p in stacks.items():
        assert torch.equal(p, torch.stack(list(alone[name]))), name
