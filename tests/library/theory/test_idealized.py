"""Algorithm 2 as a torch optimizer."""

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from angular_muown.theory import IdealizedAngularMuown, project
from tests.library.family import noise, parameter
from tests.reference import idealized


def frobenius(A: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(A)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
def test_parity_with_the_reference(shape) -> None:
    """The reference uses a generic cone solver, accurate to about 1e-7."""
    p = parameter(*shape)
    reference = idealized.IdealizedAngularMuown(p.detach().numpy(), lr=0.1, momentum=0.8)
    optimizer = IdealizedAngularMuown([p], lr=0.1, momentum=0.8, iterations=80, tolerance=1e-9)
    for t in range(6):
        G = noise(*shape, seed=t)
        p.grad = G
        optimizer.step()
        W = torch.from_numpy(reference.step(G.numpy()))
        torch.testing.assert_close(p.detach(), W, rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(p.detach().norm(dim=-1), torch.from_numpy(reference.g))


def test_a_batch_with_its_own_lr_and_momentum_per_problem_equals_a_loop() -> None:
    shape, lr, beta = (4, 3, 6), torch.tensor([0.01, 0.1, 0.3, 1.0]), torch.tensor([0, 0.5, 0.9, 1])
    lr, beta = (x.double()[:, None, None] for x in (lr, beta))
    batch = parameter(*shape)
    singles = [nn.Parameter(batch.detach()[i].clone()) for i in range(4)]
    settings = {"iterations": 80, "tolerance": 1e-9}
    batched = IdealizedAngularMuown([batch], lr, beta, **settings)
    looped = [
        IdealizedAngularMuown([p], float(lr[i]), float(beta[i]), **settings)
        for i, p in enumerate(singles)
    ]
    for t in range(4):
        batch.grad = noise(*shape, seed=t)
        batched.step()
        for i, p in enumerate(singles):
            p.grad = batch.grad[i]
            looped[i].step()
    for i, p in enumerate(singles):
        torch.testing.assert_close(batch.detach()[i], p.detach(), rtol=1e-3, atol=1e-4)


def test_inner_steps_follow_the_exact_direction() -> None:
    """One warm-started dual step per step stays near the solution as the problem drifts."""
    target = noise(6, 20, seed=7)
    results = []
    for inner in (0, 1):
        p = parameter(6, 20)
        optimizer = IdealizedAngularMuown([p], 0.02, 0.9, inner_steps=inner)
        for t in range(60):
            p.grad = p.detach() - target + 0.2 * noise(6, 20, seed=t)
            optimizer.step()
        results.append(p.detach().clone())
        assert optimizer.state[p]["gap"] < (2e-2 if inner else 1e-6)
    assert frobenius(results[0] - results[1]) < 0.05 * frobenius(
        results[0] - parameter(6, 20).detach()
    )


@pytest.mark.parametrize("transport", ["none", "project", "parallel"])
def test_only_transported_momentum_is_tangent_at_the_new_point(transport) -> None:
    p = parameter(5, 7)
    optimizer = IdealizedAngularMuown([p], 0.5, 0.9, transport=transport)
    for t in range(3):
        p.grad = noise(5, 7, seed=t)
        optimizer.step()
    U = p.detach() / p.detach().norm(dim=-1, keepdim=True)
    M = optimizer.state[p]["momentum_buffer"]
    normal_part = frobenius(M - project(M, U)) / frobenius(M)
    assert (normal_part > 0.05) if transport == "none" else (normal_part < 1e-12)


def test_a_loaded_state_dict_continues_bit_for_bit() -> None:
    p = parameter(4, 6)
    optimizer = IdealizedAngularMuown([p], 0.1, 0.9)
    p.grad = noise(4, 6, seed=0)
    optimizer.step()
    q = nn.Parameter(p.detach().clone())
    other = IdealizedAngularMuown([q], 9.0, 0.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for x in (p, q):
        x.grad = noise(4, 6, seed=1)
    optimizer.step()
    other.step()
    assert torch.equal(p, q)


BAD = {
    "lr": (-1, float("nan"), float("inf"), True, "0.1", None, torch.tensor([0.1, -0.1])),
    "momentum": (2, -0.1, None, torch.tensor([[[0.5]], [[1.5]]])),
    "inner_steps": (-1, 1.5, True),
    "iterations": (0, 2.0),
    "tolerance": (-1e-6, float("nan"), None),
    "retraction": ("foo", None, ["normalize"]),
    "transport": ("foo",),
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, values in BAD.items() for v in values])
def test_bad_values_are_rejected_when_a_group_is_added(name, value) -> None:
    """As an argument, as a group's value, and in a group that is added later."""
    message = re.escape(f"{name}={value!r} is not valid: it must be ")
    with pytest.raises(ValueError, match=message):
        IdealizedAngularMuown([parameter(2, 3)], **{"lr": 0.1, "momentum": 0.9, name: value})
    group = {"params": [parameter(2, 3)], name: value}
    with pytest.raises(ValueError, match=message):
        IdealizedAngularMuown([dict(group)], 0.1, 0.9)
    optimizer = IdealizedAngularMuown([parameter(2, 3)], 0.1, 0.9)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1  # the rejected group was not added


def test_errors_state_the_valid_values() -> None:
    for value, message in (
        ({"lr": -1}, "a finite number >= 0, or a tensor of them"),
        ({"momentum": 2}, r"a number in \[0, 1\], or a tensor of them"),
        ({"iterations": 0}, "an integer >= 1"),
        ({"retraction": "foo"}, "one of 'normalize', 'exponential'"),
    ):
        with pytest.raises(ValueError, match=message):
            IdealizedAngularMuown([{"params": [parameter(2, 3)], **value}], 0.1, 0.9)


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (parameter(3), r"parameter 1 of group 0 has the shape \(3,\): it must be \(\.\.\., m, n\)"),
        (nn.Parameter(torch.ones(2, 3, dtype=torch.cfloat)), r"1 of group 0 is torch\.complex64"),
        (nn.Parameter(torch.empty(0, 3)), "1 of group 0 .* has no entries: leave it out"),
    ],
)
def test_a_parameter_that_is_not_a_matrix_is_rejected_when_it_is_added(p, message) -> None:
    with pytest.raises(ValueError, match=message):
        IdealizedAngularMuown([parameter(2, 3), p], 0.1, 0.9)


def test_a_row_of_zeros_is_rejected_in_the_first_step() -> None:
    """Not earlier: weights may be filled until then."""
    zero = parameter(2, 3)
    zero.data[1] = 0
    zero.grad = torch.ones_like(zero)
    with pytest.raises(ValueError, match="parameter 0 of group 0 has a row of zeros"):
        IdealizedAngularMuown([zero], 0.1, 0.9).step()
