"""Compare orthogonalizers with the singular value decomposition."""

import pytest
import torch

from angular_muown.stages.orthogonalize import ORTHOGONALIZERS, gram, polar_express, svd
from tests.library.family import noise

SHAPES = [(12, 12), (8, 40), (40, 8), (1, 9), (9, 1), (3, 16, 5), (2, 3, 6, 20)]


@pytest.mark.parametrize("name", ORTHOGONALIZERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_singular_vectors_are_kept_and_singular_values_become_one(name, shape, dtype) -> None:
    X = noise(*shape, seed=1).to(dtype)
    original = X.clone()
    Q = ORTHOGONALIZERS[name](X)
    assert Q.shape == X.shape
    assert Q.dtype == dtype
    assert torch.equal(X, original), "the input was modified"
    U, _, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    core = U.mT @ Q.double() @ Vh.mT  # diagonal if the singular vectors are kept
    values = core.diagonal(dim1=-2, dim2=-1)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    assert (core - torch.diag_embed(values)).abs().max() < tolerance
    low, high = {"svd": (1 - tolerance, 1 + tolerance), "newton_schulz": (0.2, 1.25)}.get(
        name, (0.8, 1.2)
    )
    assert values.min() > low
    assert values.max() < high


@pytest.mark.parametrize("name", ORTHOGONALIZERS)
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (4, 30)])
def test_scale_of_the_input_does_not_matter(name, shape) -> None:
    X = noise(*shape, seed=2, dtype=torch.float32)
    Q = ORTHOGONALIZERS[name](X)
    for size in (1e-30, 1e-20, 1e-8, 1e8, 1e20, 1e30):
        torch.testing.assert_close(ORTHOGONALIZERS[name](X * size), Q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ORTHOGONALIZERS)
def test_zero_matrices_give_zero_alone_and_in_a_stack(name) -> None:
    X = torch.zeros(3, 4, 6)
    assert not ORTHOGONALIZERS[name](X).any()
    X[1] = noise(4, 6, seed=3).float()
    Q = ORTHOGONALIZERS[name](X)
    assert not Q[0].any()
    torch.testing.assert_close(Q[1], ORTHOGONALIZERS[name](X[1]))


def test_svd_drops_directions_that_are_rounding_noise() -> None:
    u, v = noise(7, 1, seed=1), noise(1, 5, seed=2)
    Q = svd(u @ v)
    torch.testing.assert_close(Q, u @ v / (u.norm() * v.norm()))


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (2, 12, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gram_form_is_the_same_polynomial(shape, dtype) -> None:
    X = noise(*shape, seed=5).to(dtype)
    tolerance = {torch.float32: 2e-4, torch.float64: 1e-10}[dtype]
    torch.testing.assert_close(gram(X), polar_express(X), rtol=tolerance, atol=tolerance)


def test_polar_express_meets_its_bound_on_its_interval() -> None:
    """Singular values in [1e-3, 1] relative to the norm come out in [0.863, 1.131]."""
    values = torch.logspace(-3, 0, 60, dtype=torch.float64)
    U = torch.linalg.qr(noise(60, 60, seed=1))[0]
    for sigma in values[::7]:
        X = sigma * U[:, :1] @ U[:1] + (1 - sigma**2).clamp(min=0).sqrt() * U[:, 1:2] @ U[1:2]
        out = torch.linalg.svdvals(polar_express(X))
        nonzero = out[out > 1e-3]
        assert nonzero.min() > 0.86
        assert nonzero.max() < 1.135


@pytest.mark.parametrize("name", ["polar_express", "newton_schulz", "gram"])
@pytest.mark.parametrize("kind", ["condition 1e12", "rank one", "repeated", "huge row"])
def test_adversarial_spectra_stay_finite_and_bounded(name, kind) -> None:
    U, _, Vh = torch.linalg.svd(noise(24, 72, seed=7), full_matrices=False)
    S = {
        "condition 1e12": torch.logspace(0, -12, 24, dtype=torch.float64),
        "rank one": torch.eye(24, dtype=torch.float64)[0],
        "repeated": torch.ones(24, dtype=torch.float64),
        "huge row": torch.ones(24, dtype=torch.float64),
    }[kind]
    X = (U * S) @ Vh
    if kind == "huge row":
        X[3] *= 1e8
    Q = ORTHOGONALIZERS[name](X.float())
    assert Q.isfinite().all()
    assert torch.linalg.svdvals(Q.double()).max() < 1.3
