"""Parts of the kernels: the list of products, the offsets of results, what products compute."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from angular_muown import AngularMuown, Muon, NorMuown
from angular_muown.engine import Engine
from angular_muown.kernels import polar_chain
from angular_muown.kernels.polar_chain import ALIGNMENT, SCALE, Kind, Product
from angular_muown.stages.orthogonalize import (
    POLAR_EXPRESS,
    POLAR_EXPRESS_MARGIN,
    QUINTIC,
    Iteration,
    gram,
    newton_schulz,
    polar_express,
)
from tests.library.family import noise

pytest.importorskip("triton")

from angular_muown.kernels import fused, products
from tests.library.kernels.test_fused import (
    Member,
    advance,
    assert_fused,
    kernels,
    relative_error,
    weights,
)

Triples = tuple[polar_chain.Triple, ...]
ORDINARY, GRAM = (1,) * 5, (1, 2, 2)
SHAPES = [(128, 128), (144, 160), (160, 144), (176, 304), (272, 144), (128, 320), (208, 224)]


@pytest.fixture(autouse=True)
def _default_device() -> Iterator[None]:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def iterate(X: Tensor, triples: Triples, dtype: torch.dtype = torch.float64) -> Tensor:
    """Run the ordinary iteration in float64, with every product rounded to `dtype`."""

    def rounded(Y: Tensor) -> Tensor:
        return Y.to(dtype).double()

    X = rounded(X)
    if X.shape[-2] > X.shape[-1]:
        return iterate(X.mT, triples, dtype).mT
    for a, b, c in triples:
        A = rounded(X @ X.mT)
        X = rounded(a * X + rounded(b * A + c * A @ A) @ X)
    return X


def chained(triples: Triples, segments: tuple[int, ...]) -> tuple[Product, ...]:
    return tuple(polar_chain.products(triples, segments))


def in_float64(X: Tensor, chain: tuple[Product, ...]) -> Tensor:
    """Evaluate a chain of products with plain matrices."""
    values = [SCALE * X]
    for p in chain:
        L, R = values[p.left], values[p.right]
        out = p.alpha * L @ (R.mT if p.kind is Kind.GRAM else R)
        if p.C >= 0:
            out = out + p.beta * values[p.C]
        if p.delta:
            out = out + p.delta * torch.eye(len(L), dtype=L.dtype)
        values.append(out)
    return values[-1] / SCALE


def unit(X: Tensor) -> Tensor:
    return X / (POLAR_EXPRESS_MARGIN * X.norm(dim=(-2, -1), keepdim=True))


def by_kernels(X: Tensor, chain: tuple[Product, ...], cublas: bool = False) -> Tensor:
    """Evaluate a chain with the kernels; memory that was not written is NaN."""
    count, m, n = X.shape
    allocation = polar_chain.allocate(m, n, chain)
    work = torch.full((count, allocation.size), float("nan"), dtype=torch.float16)
    work[:, : m * n] = (SCALE * (X.mT if m < n else X)).flatten(1).half()
    products.run(work, m, n, chain, allocation, cublas)
    start = allocation.offsets[-1]
    return work[:, start : start + m * n].view(count, m, n).double() / SCALE


def error(Q: Tensor, expected: Tensor) -> float:
    return ((Q - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("triples", [POLAR_EXPRESS, QUINTIC])
@pytest.mark.parametrize("segments", [ORDINARY, GRAM, (2, 2, 1), (2, 1, 2)])
def test_all_forms_are_the_same_polynomial(triples: Triples, segments: tuple[int, ...]) -> None:
    X = unit(noise(20, 50, seed=1))
    chain = chained(triples, segments)
    assert error(in_float64(X, chain), iterate(X, triples)) < 1e-10


def spans(m: int, n: int, chain: tuple[Product, ...]) -> list[tuple[int, int]]:
    offsets = polar_chain.allocate(m, n, chain).offsets
    sizes = [m * n] + [m * n if p.kind is Kind.APPLY else min(m, n) ** 2 for p in chain]
    return [(start, start + s) for start, s in zip(offsets, sizes, strict=True)]


@pytest.mark.parametrize("shape", [*SHAPES, (16, 4096), (1000, 24)])
@pytest.mark.parametrize("segments", [ORDINARY, GRAM, (2, 1, 2)])
def test_no_result_overwrites_one_that_is_still_needed(
    shape: tuple[int, int], segments: tuple[int, ...]
) -> None:
    chain = chained(POLAR_EXPRESS, segments)
    placed = spans(*shape, chain)
    for i in range(len(chain)):
        later = set().union(*(p.reads for p in chain[i:]))
        out, end = placed[i + 1]
        for value in later & set(range(i + 1)):
            start, stop = placed[value]
            assert end <= start or stop <= out, f"result {i + 1} overwrites {value}"


@pytest.mark.parametrize("shape", [*SHAPES, (16, 4096), (1000, 24)])
@pytest.mark.parametrize("segments", [ORDINARY, GRAM])
def test_results_are_aligned_and_fill_the_allocation(
    shape: tuple[int, int], segments: tuple[int, ...]
) -> None:
    m, n = shape
    chain = chained(POLAR_EXPRESS, segments)
    allocation = polar_chain.allocate(m, n, chain)
    assert not any(x % ALIGNMENT for x in (*allocation.offsets, allocation.raw, allocation.size))
    ends = [end for _, end in spans(m, n, chain)] + [allocation.raw + m * n]
    assert allocation.size == -(-max(ends) // ALIGNMENT) * ALIGNMENT
    assert allocation.raw == 0 if m >= n else allocation.raw >= m * n, (
        "transposition is out of place"
    )


@pytest.mark.parametrize("iteration", [polar_express, newton_schulz], ids=lambda i: i.name)
@pytest.mark.parametrize("side", [128, 768, 2048])
def test_the_cheaper_form_is_chosen(iteration: Iteration, side: int) -> None:
    ordinary, in_gram_form = (chained(iteration.coefficients, form) for form in (ORDINARY, GRAM))
    assert polar_chain.chain_for(side, side, iteration) == ordinary
    assert polar_chain.chain_for(side, 4 * side, iteration) == in_gram_form
    assert polar_chain.chain_for(4 * side, side, iteration) == in_gram_form


def test_gram_takes_the_gram_form_only_above_its_aspect_ratio() -> None:
    """As in the eager executor, whatever the cost model prefers."""
    ordinary, in_gram_form = (chained(POLAR_EXPRESS, form) for form in (ORDINARY, GRAM))
    assert polar_chain.chain_for(768, 1536, polar_express) == in_gram_form
    assert polar_chain.chain_for(768, 1536, gram) == ordinary
    assert polar_chain.chain_for(768, 1552, gram) == in_gram_form


@pytest.mark.parametrize("segments", [ORDINARY, GRAM])
@pytest.mark.parametrize(
    ("shape", "cublas"),
    [*((shape, False) for shape in SHAPES), ((144, 160), True), ((272, 144), True)],
)
def test_products_match_float64(
    shape: tuple[int, int], segments: tuple[int, ...], cublas: bool
) -> None:
    X = unit(noise(2, *shape, seed=3))
    Q = by_kernels(X, chained(POLAR_EXPRESS, segments), cublas)
    for q, x in zip(Q, X, strict=True):
        assert error(q, iterate(x, POLAR_EXPRESS)) < 6e-3


def spectrum(kind: str, m: int, n: int) -> Tensor:
    U, S, Vh = torch.linalg.svd(noise(m, n, seed=7), full_matrices=False)
    S = {
        "condition 1e12": torch.logspace(0, -12, len(S), dtype=torch.float64),
        "rank one": torch.eye(len(S), dtype=torch.float64)[0],
        "repeated": torch.ones_like(S),
        "huge row": torch.ones_like(S),
    }[kind]
    X = (U * S) @ Vh
    if kind == "huge row":
        X[3] *= 1e8
    return unit(X)


@pytest.mark.parametrize("kind", ["condition 1e12", "rank one", "repeated", "huge row"])
@pytest.mark.parametrize("segments", [ORDINARY, GRAM])
@pytest.mark.parametrize("triples", [POLAR_EXPRESS, QUINTIC])
def test_errors_on_adversarial_spectra_are_at_most_those_of_bfloat16(
    kind: str, segments: tuple[int, ...], triples: Triples
) -> None:
    X = spectrum(kind, 144, 176)
    expected = iterate(X, triples)
    Q = by_kernels(X.unsqueeze(0), chained(triples, segments))[0]
    assert error(Q, expected) <= error(iterate(X, triples, torch.bfloat16), expected)


def after_a_step(
    optimizer: Member, gradients: list[Tensor], **values: Any
) -> tuple[list[Tensor], Engine]:
    params = weights([tuple(G.shape) for G in gradients], torch.float32)
    opt = optimizer(params, **values)
    for p, G in zip(params, gradients, strict=True):
        p.grad = G.float()
    with kernels(True):
        opt.step()
    assert_fused(opt)
    return [p.detach() for p in params], opt


# In the interpreter, numpy warns about values that are not used or that a test is about.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_magnitude_of_a_gradient_is_irrelevant() -> None:
    """Powers of two only change exponents; other factors change the rounding to float16."""
    G = noise(128, 144, seed=1)
    (W,) = weights([(128, 144)], torch.float32)
    change = after_a_step(AngularMuown, [G], radius="fixed")[0][0] - W.detach()
    for size, limit in ((2.0**-100, 1e-5), (2.0**100, 1e-5), (1e-30, 3e-3), (1e30, 3e-3)):
        end = after_a_step(AngularMuown, [size * G], radius="fixed")[0][0]
        assert relative_error(end - W.detach(), change) < limit


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("optimizer", [AngularMuown, NorMuown])
def test_zeros_and_nans_do_not_spread_to_other_matrices(optimizer: Member) -> None:
    G, zero = noise(128, 128, seed=1), torch.zeros(128, 128, dtype=torch.float64)
    bad, infinite = G.clone(), G.clone()
    bad[7, 9], infinite[7, 9] = float("nan"), float("inf")
    start = [p.detach() for p in weights([(128, 128)] * 4, torch.float32)]
    ends, opt = after_a_step(optimizer, [zero, bad, infinite, G])
    alone, _ = after_a_step(optimizer, [zero, G, G, G])
    torch.testing.assert_close(ends[0], start[0])
    assert ends[1].isnan().all()
    assert not ends[2].isfinite().all()
    assert torch.equal(ends[3], alone[3])
    for p, expected in zip(opt.param_groups[0]["params"], (True, False, False, True), strict=True):
        assert expected == all(value.isfinite().all() for value in opt.state[p].values())


@pytest.mark.slow
def test_the_size_of_the_work_buffer_does_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "LEAST_WORK", 0)
    gradients = [noise(*shape, seed=i) for i, shape in enumerate([(128, 128)] * 5 + [(144, 128)])]
    ends: list[list[Tensor]] = []
    for workspace, chunks in ((1e-9, 6), (10.0, 4)):
        end, opt = after_a_step(NorMuown, gradients, workspace=workspace)
        assert opt._fused is not None
        step = opt._fused.steps[0][1]
        assert step is not None
        assert len(step.chunks) == chunks
        ends.append(end)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("optimizer", "values"), [(AngularMuown, {"lr": 2e-3, "radius": "fixed"}), (Muon, {"lr": 1e-5})]
)
def test_stochastic_rounding_uses_the_noise_of_the_eager_path(
    optimizer: Member, values: dict[str, Any], dtype: torch.dtype
) -> None:
    """Weights differ only where a remainder nearly equals the noise; other noise gives 1/3 ulp."""
    ends: list[Tensor] = []
    for on in (True, False):
        (p,) = weights([(128, 144)], dtype)
        p.data[7] *= 1e-4  # subnormal in float16, where Muon's small step is many ulps
        opt = optimizer([p], **values)
        opt.param_groups[0]["step"] = 1  # step 2 has a seed with its highest bit set
        with kernels(on):
            advance(opt, [p], 2)
        if on:
            assert_fused(opt)
        ends.append(p.detach().float())
    limits = torch.finfo(dtype)
    ulp = torch.exp2(ends[1].abs().clamp(min=limits.smallest_normal).log2().floor()) * limits.eps
    off = (ends[0] - ends[1]).abs() / ulp
    assert off.mean() < 0.1
    assert dtype != torch.float16 or off[7].mean() < 0.1
