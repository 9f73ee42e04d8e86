"""The convergence theorem: its formulas, the lemmas of its proof, its bound on test problems."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from angular_muown.theory import (
    Alignment,
    Constants,
    IdealizedAngularMuown,
    Neurons,
    Problem,
    Regression,
    bound,
    check_assumptions,
    parameters,
    project,
    tangent_polar,
    terms,
)
from tests.library.family import noise

PROBLEMS = [Alignment, Regression, Neurons]


def make(kind: type[Problem], m: int, n: int, seed: int = 0) -> Problem:
    return kind(m, n, seed=seed) if kind is Neurons else kind(m, n, noise=0.4, seed=seed)


def dual_norm(A: Tensor, U: Tensor) -> Tensor:
    """Return a lower bound on |A|_{U,*}, the maximum of <A, V> over tangent V with |V|_op <= 1."""
    return -(A * tangent_polar(A, U, tolerance=1e-7).D).sum(dim=(-2, -1))


def frobenius(A: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(A)


def test_parameters_and_bound_match_hand_computed_values() -> None:
    """Delta_0 = 2, L = 3, sigma = 0.5, r = 4, T = 600."""
    constants = Constants(smoothness=3.0, initial_gap=2.0, noise=0.5, rank=4)
    lr, momentum = parameters(constants, 600)
    assert momentum == pytest.approx(1 - 0.1)  # sqrt(6 / (1 * 600)) = 0.1 > 600^(-2/3) = 0.014
    assert lr == pytest.approx((2 * 0.1 / (3 * 600)) ** 0.5)
    assert terms(constants, 600) == pytest.approx((0.4, 7 * 0.01**0.25, 4 / 600 ** (1 / 3)))
    assert bound(constants, 600) == pytest.approx(sum(terms(constants, 600)))
    exact = constants._replace(noise=0.0)
    assert parameters(exact, 600) == pytest.approx(((2 / (3 * 600)) ** 0.5, 0.0))
    assert bound(exact, 600) == pytest.approx(0.4)
    assert parameters(constants._replace(noise=1e3), 8).momentum == pytest.approx(0.75)


@settings(max_examples=200, deadline=None)
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-4, 3), st.integers(1, 64), st.integers(1, 9))
def test_the_last_step_of_the_proof(L, gap, sigma, r, digits) -> None:
    """With the theorem's lr and beta, the sum of the lemmas is at most the theorem's bound."""
    constants, T = Constants(10**L, 10**gap, 10**sigma, r), 10**digits
    lr, beta = parameters(constants, T)
    weight, spread = 1 - beta, r**0.5 * constants.noise
    lemmas = (
        constants.initial_gap / (lr * T)
        + 3 * lr * constants.smoothness / weight
        + 2 * spread * (1 / (weight * T) + weight**0.5)
    )
    assert lemmas <= bound(constants, T) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(m=st.integers(1, 7), n=st.integers(2, 7), seed=st.integers(0, 10**6), low=st.booleans())
def test_norm_sandwich(m, n, seed, low) -> None:
    """|A|_F <= |A|_{U,*} <= |A|_* <= sqrt(r) |A|_F for tangent A (the paper's technical lemma)."""
    U = noise(m, n, seed=seed)
    U = U / U.norm(dim=-1, keepdim=True)
    A = noise(m, n, seed=seed + 1)
    A = project(A[:, :1] @ A[:1] if low else A, U)
    nuclear = torch.linalg.matrix_norm(A, ord="nuc")
    middle = dual_norm(A, U)
    assert frobenius(A) <= middle * (1 + 1e-5)
    assert middle <= nuclear * (1 + 1e-9)
    assert nuclear <= min(m, n) ** 0.5 * frobenius(A) * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(PROBLEMS),
    shape=st.sampled_from([(2, 5), (5, 2), (3, 3)]),
    seed=st.integers(0, 10**6),
    lr=st.floats(-2.5, 0.3),
    beta=st.floats(0, 0.98),
)
def test_descent_lemma(kind, shape, seed, lr, beta) -> None:
    """sum |grad|_{U,*} <= Delta_0 / lr + lr L T / 2 + 2 sum |M - grad|_{U,*} for any noise.

    Each step changes the loss by at most lr <grad, D> + lr^2 L / 2.
    """
    problem, T, lr = make(kind, *shape, seed=seed % 100), 12, 10**lr
    random = torch.Generator().manual_seed(seed)
    p = nn.Parameter(problem.U_1.clone())
    optimizer = IdealizedAngularMuown([p], lr, beta, tolerance=1e-7)
    L, gap, _, _ = problem.constants
    history = []
    for _ in range(T):
        U = p.detach().clone()
        G = problem.gradient(U)
        p.grad = problem.sample(U, G, random)
        optimizer.step()
        M = optimizer.state[p]["momentum_buffer"]
        D = tangent_polar(M, U, tolerance=1e-7).D
        change = lr * (G * D).sum() + lr**2 * L / 2
        assert problem.loss(p.detach()) <= problem.loss(U) + change + 1e-6
        history.append((U, M - G, G))
    U, E, G = (torch.stack(x) for x in zip(*history, strict=True))
    gradients, errors = dual_norm(G, U).sum(), dual_norm(E, U).sum()
    assert gradients <= (gap / lr + lr * L * T / 2 + 2 * errors) * (1 + 1e-4)


def test_deviation_bound() -> None:
    """The mean of sum |M - grad|_* over 64 runs is below the lemma's bound.

    sqrt(r) sigma / (1 - beta) + sqrt(r) sigma T sqrt(1 - beta) + lr L T / (1 - beta), for slow,
    fast and no averaging.
    """
    problem, T, runs = Alignment(3, 8, noise=0.4), 60, 64
    L, _, sigma, r = problem.constants
    for lr, beta in ((0.02, 0.9), (0.1, 0.5), (0.3, 0.0)):
        random = torch.Generator().manual_seed(0)
        p = nn.Parameter(problem.U_1.expand(runs, -1, -1).clone())
        optimizer = IdealizedAngularMuown([p], lr, beta, inner_steps=2)
        total = 0.0
        for _ in range(T):
            G = problem.gradient(p.detach())
            p.grad = problem.sample(p.detach(), G, random)
            optimizer.step()
            E = optimizer.state[p]["momentum_buffer"] - G
            total += torch.linalg.matrix_norm(E, ord="nuc").mean().item()
        spread, weight = r**0.5 * sigma, 1 - beta
        allowed = spread / weight + spread * T * weight**0.5 + lr * L * T / weight
        assert 0.1 * allowed < total <= allowed


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (4, 4)])
def test_problems_satisfy_their_stated_constants(kind, shape) -> None:
    problem = make(kind, *shape)
    measured = check_assumptions(problem, points=12)
    assert max(measured.descent, measured.gradient, measured.initial_gap) <= 1 + 1e-9
    assert measured.noise <= 1.05  # equality for Gaussian noise, up to sampling error
    assert measured.bias <= 1
    if kind is Alignment and shape[0] < shape[1]:
        assert measured.gradient > 0.5, "the constant is not too loose"


@pytest.mark.parametrize("kind", PROBLEMS)
def test_row_bounds_and_lipschitz_constant_hold(kind) -> None:
    """At random points and at points whose rows are all equal."""
    problem = make(kind, 5, 4)
    random = torch.stack([noise(5, 4, seed=i) for i in range(300)])
    aligned = noise(300, 1, 4, seed=7).expand(300, 5, 4)  # equal rows: errors are largest
    U = torch.cat([random, aligned])
    U = U / U.norm(dim=-1, keepdim=True)
    G = problem.euclidean(U)
    assert (G.norm(dim=-1) <= problem.row_bounds + 1e-12).all()
    assert (G.norm(dim=-1) / problem.row_bounds).max() > 0.1, "the bound is not too loose"
    near = U + 1e-3 * noise(600, 5, 4, seed=8)
    change = frobenius(problem.euclidean(near) - G) / frobenius(near - U)
    assert change.max() <= problem.lipschitz * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("kind", PROBLEMS)
def test_gradients_match_autograd_and_batches_match_single_points(kind) -> None:
    problem = make(kind, 4, 6)
    U = problem.U_1.clone().requires_grad_()
    (G,) = torch.autograd.grad(problem.loss(U), U)
    torch.testing.assert_close(problem.euclidean(U.detach()), G)
    batch = torch.stack([problem.U_1, problem.U_1.flip(0)])
    torch.testing.assert_close(problem.loss(batch)[0], problem.loss(problem.U_1))
    torch.testing.assert_close(problem.gradient(batch)[0], problem.gradient(problem.U_1))


def test_check_assumptions_detects_a_wrong_constant() -> None:
    problem = Alignment(3, 8, noise=0.4)
    true = problem.constants
    for name, factor in (("smoothness", 0.5), ("initial_gap", 0.9), ("noise", 0.9)):
        problem.constants = true._replace(**{name: factor * getattr(true, name)})
        problem.sample = Alignment(3, 8, noise=0.4).sample  # with the original sigma
        assert max(check_assumptions(problem, points=12)) > 1.05, name


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (4, 4)])
def test_mean_gradient_norm_is_below_the_bound(kind, shape) -> None:
    problem, runs = make(kind, *shape), 8
    means = {}
    for T in (30, 300):
        random = torch.Generator().manual_seed(T)
        p = nn.Parameter(problem.U_1.expand(runs, -1, -1).clone())
        optimizer = IdealizedAngularMuown([p], *parameters(problem.constants, T), inner_steps=1)
        total = 0.0
        for _ in range(T):
            G = problem.gradient(p.detach())
            total += frobenius(G).mean().item()
            p.grad = problem.sample(p.detach(), G, random)
            optimizer.step()
        means[T] = total / T
        assert means[T] <= bound(problem.constants, T)
    if kind is not Neurons:  # its constants are loose, so the theorem's learning rate is tiny
        assert means[300] < 0.85 * means[30], "longer runs have smaller gradients"
