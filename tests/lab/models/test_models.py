"""Every kind of model: parameter counts, causality, loss, initialization."""

import cmath
from dataclasses import replace
from math import sqrt

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from angular_lab.config.spec import ModelSpec
from angular_lab.models import build_model
from angular_lab.models.gpt_speedrun import GPTSpeedrun
from angular_lab.models.layers import rotate, rotation_of
from tests.lab.tiny import KINDS, LENGTH, SPECS, VOCABULARY, scrambled, text

PLAIN = [ModelSpec(width=width, heads=width // 64) for width in (512, 768, 1280)]
MODEL_S = ModelSpec(vocabulary=16384, sequence=512, layers=8, width=384, heads=6, mlp=1024)
QWEN2 = ModelSpec("qwen2", 151_936, 2048, 24, 896, 14, 2, 4864)
SPEEDRUN = ModelSpec("gpt_speedrun", 50_304, heads=6, tied=False, soft_cap=15.0, rope_base=1024.0)
# Two embeddings, and per layer 4 d^2 of attention, 8 d^2 of MLP, biases (4 + 5) d, two norms.
GPT = 2 * 50_304 * 768 + 50_304 + 12 * (12 * 768**2 + 11 * 768) + 2 * 768


@pytest.mark.parametrize(
    ("spec", "millions"),
    [(PLAIN[0], 67), (PLAIN[1], 124), (PLAIN[2], 308), (QWEN2, 494), (SPEEDRUN, GPT / 1e6)],
)
def test_parameter_counts_match_the_published_ones(spec: ModelSpec, millions: float) -> None:
    with torch.device("meta"):
        model = build_model(spec)
    count = sum(p.numel() for p in model.parameters())
    assert round(count / 1e6) == round(millions)
    assert spec is not SPEEDRUN or count == GPT


def test_model_s_has_the_planned_size() -> None:
    with torch.device("meta"):
        model = build_model(MODEL_S)
    assert round(sum(p.numel() for p in model.parameters()) / 1e5) == 205
    assert round(model.flops_per_token() / 1e6) == 132


def test_unknown_kind_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"'mamba' is not one of 'dense', 'qwen2', 'moe', 'gpt_sp"):
        build_model(ModelSpec(kind="mamba"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "width=32 with heads=5"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"kv_heads": 0}, "model.kv_heads=0: it must be at least 1, or none"),
        ({"mlp": 0}, "model.mlp=0: it must be at least 1, or none"),
        ({"layers": -1}, "model.layers=-1: it must be at least 1$"),
        ({"soft_cap": 0.0}, "model.soft_cap=0: it must be above 0, or none"),
        ({"kind": "gpt_speedrun"}, "set tied=False"),
        ({"kind": "gpt_speedrun", "tied": False, "heads": 16}, "multiple of 4"),
        ({"kind": "moe"}, "experts_per_token=0 with experts=0"),
        ({"kind": "moe", "experts": 2, "experts_per_token": 3}, "experts_per_token=3"),
        ({"kind": "moe", "experts": 2, "experts_per_token": 1}, "expert_mlp=0"),
        (
            {"kind": "moe", "experts": 2, "experts_per_token": 1, "expert_mlp": 8,
             "dense_layers": 2}, "dense_layers=2",
        ),
    ],
)  # fmt: skip
def test_invalid_sizes_are_rejected(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(replace(SPECS["dense"], **changes))


@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_do_not_change_earlier_logits(kind: str) -> None:
    model, (tokens, _) = scrambled(SPECS[kind]), text()
    before = model(tokens)
    for t in (1, LENGTH // 2, LENGTH - 1):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % VOCABULARY
        after = model(changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-5)
        assert ((after - before)[:, t:].abs().amax(-1) > 1e-4).all(), "all later ones change"


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_positions_are_relative(kind: str) -> None:
    """Rotated by positions m and n, the score of q and k depends on m - n; norms do not change."""
    frequencies = build_model(SPECS[kind]).frequencies(torch.device("cpu")).double()
    rotation = rotation_of(20, frequencies)
    q, k = (torch.randn(len(frequencies) * 2, dtype=torch.float64) for _ in "qk")
    Q, K = (rotate(x.expand(20, 1, -1), rotation).squeeze(1) for x in (q, k))
    scores = Q @ K.T
    torch.testing.assert_close(scores[5:, 5:], scores[:-5, :-5])
    torch.testing.assert_close(Q.norm(dim=-1), q.norm().expand(20))
    assert scores[0].unique().numel() == 20, "scores depend on the distance"


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_cross_entropy_of_the_logits(kind: str) -> None:
    model, (tokens, targets) = scrambled(SPECS[kind]), text()
    logits = model(tokens)
    assert logits.shape == (*tokens.shape, VOCABULARY)
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected.float())


def test_softmax_of_a_bfloat16_model_is_float32() -> None:
    model, (tokens, targets) = scrambled(SPECS["dense"]).to(torch.bfloat16), text()
    expected = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
    assert torch.equal(model(tokens, targets), expected)


def test_soft_cap_bounds_the_logits() -> None:
    model, (tokens, _) = scrambled(replace(SPECS["dense"], soft_cap=None)), text()
    uncapped = model(tokens)
    model.spec = replace(model.spec, soft_cap=2.0)
    capped = model(tokens)
    assert uncapped.abs().max() > 2 > capped.abs().max()
    torch.testing.assert_close(capped, 2 * torch.sin(torch.atan(uncapped / 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_depend_on_the_seed_alone(kind: str) -> None:
    """They do not depend on torch's generator, nor change it, nor on the meta device."""
    first = build_model(SPECS[kind])
    first.init_weights(5)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    with torch.device("meta"):
        second = build_model(SPECS[kind])
    second.to_empty(device="cpu")
    second.init_weights(5)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(list(first.parameters())) == len(list(second.parameters())), "still tied"
    for (name, p), q in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(p, q), name
    second.init_weights(6)
    assert not torch.equal(first.layers[0].attn.qkv.weight, second.layers[0].attn.qkv.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_have_the_stated_standard_deviations(kind: str) -> None:
    spec = replace(SPECS[kind], width=128, mlp=128, init_std=0.03)
    model = build_model(spec)
    model.init_weights(0)
    small = 0.0 if kind == "gpt_speedrun" else 0.03 / sqrt(2 * spec.layers)
    special = {"embedding.weight": 1.0, "lm_head.weight": 0.0} if kind == "gpt_speedrun" else {}
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p == (1 if "norm" in name else 0)).all(), name
        else:
            residual = name.removesuffix(".weight").endswith(("attn.out", ".down"))
            std = special.get(name, small if residual else 0.03)
            assert abs(p.std() - std) <= 5 * std / sqrt(2 * p.numel()), name
            assert abs(p.mean()) <= 5 * std / sqrt(p.numel()), name


@pytest.mark.parametrize("kind", KINDS)
def test_flops_per_token_match_those_that_torch_counts(kind: str) -> None:
    """torch counts the forward products; a backward pass has twice as many."""
    model, (tokens, _) = scrambled(SPECS[kind]), text()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if "attention" not in str(op))
    spec = model.spec
    attention = spec.layers * (2 * 2 * LENGTH * spec.width) / 2  # q k^T and p v, half masked
    assert model.flops_per_token() == 3 * (products / tokens.numel() + attention)


def speedrun_reference(model: GPTSpeedrun, tokens: Tensor) -> Tensor:
    """Compute the track's network for one sequence in float64, by head and position."""
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    d, heads, cap = model.spec.width, model.spec.heads, model.spec.soft_cap
    size = d // heads

    def rms(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + model.spec.norm_eps).sqrt()

    def rotated(x: Tensor) -> Tensor:
        """Position t: the pair j is a complex number times 1024^(-i t j / (size/4 - 1))."""
        for t in range(len(x)):
            for j in range(size // 4):
                speed = 1024.0 ** (-j / (size // 4 - 1))
                z = complex(x[t, j], x[t, j + size // 2]) * cmath.exp(1j * t * speed)
                x[t, j], x[t, j + size // 2] = z.real, z.imag
        return x

    x = rms(w["embedding.weight"][tokens]) * w["embedding_norm.weight"]
    for i in range(model.spec.layers):
        at = f"layers.{i}."
        h = rms(x) * w[at + "attn_norm.weight"]
        qkv = h @ w[at + "attn.qkv.weight"].T + w[at + "attn.qkv.bias"]
        y = torch.zeros_like(x)
        for a in range(heads):
            q, k, v = (qkv[:, c * d + a * size : c * d + (a + 1) * size].clone() for c in range(3))
            q, k = rotated(rms(q)), rotated(rms(k))
            for t in range(len(x)):
                p = torch.softmax(0.12 * k[: t + 1] @ q[t], 0)
                y[t, a * size : (a + 1) * size] = p @ v[: t + 1]
        x = x + y @ w[at + "attn.out.weight"].T + w[at + "attn.out.bias"]
        h = rms(x) * w[at + "mlp_norm.weight"]
        h = (h @ w[at + "mlp.up.weight"].T + w[at + "mlp.up.bias"]).clamp(min=0) ** 2
        x = x + h @ w[at + "mlp.down.weight"].T + w[at + "mlp.down.bias"]
    logits = (rms(x) * w["norm.weight"]) @ w["lm_head.weight"].T + w["lm_head.bias"]
    return cap * logits / (logits**2 + cap**2).sqrt()


def test_speedrun_model_equals_the_tracks_network() -> None:
    model, (tokens, _) = scrambled(SPECS["gpt_speedrun"]), text()
    assert isinstance(model, GPTSpeedrun)
    expected = torch.stack([speedrun_reference(model, sequence) for sequence in tokens])
    torch.testing.assert_close(model(tokens).double(), expected, rtol=0, atol=1e-4)


def test_too_long_sequences_are_rejected() -> None:
    model = build_model(SPECS["dense"])
    tokens = torch.zeros(1, SPECS["dense"].sequence + 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"13 tokens is too long: model\.sequence=12"):
        model(tokens)


def test_rotation_tables_are_computed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU rounds cosines differently, so a model initialized there again would change."""
    with torch.device("meta"):
        model = build_model(SPECS["dense"])
    devices: list[torch.device] = []

    def record(sequence: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        devices.append(frequencies.device)
        return rotation_of(sequence, frequencies)

    monkeypatch.setattr("angular_lab.models.base.rotation_of", record)
    model.init_weights(0)
    assert devices == [torch.device("cpu")]
