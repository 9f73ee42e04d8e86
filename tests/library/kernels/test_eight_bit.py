"""The kernels store an 8-bit momentum as the eager step does, whatever the gradients are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngularMuown, Muon, NorMuown
from angular_muown.engine import Engine
from angular_muown.params.eight_bit import LEVELS, SALT, SCALE
from angular_muown.params.rounding import paired_noise
from tests.library.family import noise

pytest.importorskip("triton")

from tests.library.kernels.test_fused import assert_fused, kernels, relative_error, weights

Gradient = Callable[[Tensor, int], Tensor]  # of random numbers and the step
STEPS = 2
# In the interpreter, of what is not finite; a GPU does not.
NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def scaled(size: float) -> Gradient:
    return lambda G, t: size * G


def with_a_huge_entry(G: Tensor, t: int) -> Tensor:
    G[..., 0] = 1e6
    return G


def with_zeros(G: Tensor, t: int) -> Tensor:
    G[:, ::2] = 0.0
    G[10], G[11] = 0.0, -0.0
    return G


def not_finite(*entries: float) -> Gradient:
    """Put these entries into row 5 of the last gradient."""

    def change(G: Tensor, t: int) -> Tensor:
        if t == STEPS - 1:
            G[5, 9 : 9 + len(entries)] = torch.tensor(entries)
        return G

    return change


def stepped(
    member: type[Engine], gradient: Gradient, on: bool, shape: tuple[int, ...], **values: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what was added to a weight with a zero row, and its state."""
    with kernels(on):
        (p,) = weights([shape], torch.float32)
        start = p.detach().clone()
        opt = member([{"params": [p], **values}], state_dtype="int8")
        for t in range(STEPS):
            G = noise(*shape, seed=t, dtype=torch.float32)
            p.grad = gradient(G, t).to(p.device)
            opt.step()
        if on:
            assert_fused(opt)
        return p.detach() - start, opt.state[p]


def assert_equal_momenta(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(actual[SCALE], expected[SCALE], rtol=1e-4, atol=0)
    apart = (actual["momentum_buffer"].int() - expected["momentum_buffer"].int()).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3


FINITE = {
    "1e-36": scaled(1e-36),
    "1e-30": scaled(1e-30),
    "1e24": scaled(1e24),
    "1e30": scaled(1e30),
    "huge entry": with_a_huge_entry,
    "zeros": with_zeros,
}


@NUMPY_WARNS
@pytest.mark.parametrize("member", [AngularMuown, Muon, NorMuown])
@pytest.mark.parametrize("gradient", FINITE)
def test_any_gradient_is_stored_as_by_the_eager_step(member: type[Engine], gradient: str) -> None:
    ends = [stepped(member, FINITE[gradient], on, (128, 144)) for on in (True, False)]
    (moved, state), (expected, states) = ends
    # A huge entry leaves few digits of the others to products in float16.
    tolerance = 2e-2 if gradient == "huge entry" else 5e-3
    assert relative_error(moved, expected) < tolerance
    assert_equal_momenta(state, states)
    for name in states.keys() - {"momentum_buffer", SCALE}:
        finite = states[name].isfinite()  # the square of 1e30 is not
        assert torch.equal(state[name].isfinite(), finite)
        if states[name][finite].any():
            assert relative_error(state[name][finite], states[name][finite]) < tolerance, name


@NUMPY_WARNS
@pytest.mark.parametrize("member", [AngularMuown, NorMuown])
@pytest.mark.parametrize("entries", [(torch.inf,), (-torch.inf,), (torch.nan, torch.inf)])
def test_what_is_not_finite_stays_in_its_row(
    member: type[Engine], entries: tuple[float, ...]
) -> None:
    (_, state), (_, expected) = (
        stepped(member, not_finite(*entries), on, (128, 144)) for on in (True, False)
    )
    assert_equal_momenta(state, expected)
    assert state[SCALE].isinf().flatten().nonzero().tolist() == [[5]]
    assert not state["momentum_buffer"][5].any()


def test_zeros_stay_zero_and_signs_are_kept() -> None:
    _, state = stepped(Muon, with_zeros, True, (128, 144))
    q = state["momentum_buffer"].float()
    grads = [with_zeros(noise(128, 144, seed=t, dtype=torch.float32), t) for t in range(STEPS)]
    M = sum(0.95 ** (STEPS - 1 - t) * G for t, G in enumerate(grads)).to(q.device)
    assert not q[M == 0].any()
    largest = M.abs() > 0.1 * M.abs().amax(dim=1, keepdim=True)  # beyond rounding before it
    assert (q * M > 0)[largest & (M != 0)].all()


@pytest.mark.parametrize("on", [True, False])
def test_the_largest_entry_of_a_tiny_row_is_stored_exactly(on: bool) -> None:
    """Although the smallest of its levels are below the normal range of float32."""
    with kernels(on):
        (p,) = weights([(128, 144)], torch.float32)
        opt = Muon([p], momentum=0.9, state_dtype="int8")
        scales = []
        for G in (2e-38 * noise(128, 144, seed=0, dtype=torch.float32), torch.zeros(128, 144)):
            p.grad = G.to(p.device)
            opt.step()
            scales.append(opt.state[p][SCALE].clone())
    torch.testing.assert_close(scales[1], 0.9 * scales[0], rtol=1e-5, atol=0)


def test_the_kernel_and_the_eager_step_draw_the_same_24_bits() -> None:
    """An entry just above its draw is rounded up to the first level; one just below is not."""
    drawn = paired_noise(torch.empty(128, 144), SALT)
    above = noise(128, 144, seed=0) > 0
    above[:, 0] = True
    offset = torch.where(above, 2.0, -2.0)  # more than the rounding of float32
    shares = (drawn + offset).clamp(min=0) * 2.0**-24
    G = (shares / LEVELS**2).float()
    G[:, 0] = 1.0  # the scale
    for on in (True, False):
        with kernels(on):
            p = nn.Parameter(noise(128, 144, seed=1, dtype=torch.float32))
            p.grad = G.to(p.device)
            opt = Muon([p], state_dtype="int8")
            opt.step()
            q = opt.state[p]["momentum_buffer"].cpu()
        assert torch.equal(q[:, 1:].bool(), above[:, 1:]), on


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ((272, 128), {"blocks": [128, 144]}),
        ((144, 256), {"column_blocks": 2}),
        ((2, 128, 144), {"view": "stack"}),
    ],
)
def test_every_layout_is_stored_as_by_the_eager_step(
    shape: tuple[int, ...], values: dict[str, Any]
) -> None:
    (moved, state), (expected, states) = (
        stepped(AngularMuown, scaled(1.0), on, shape, **values) for on in (True, False)
    )
    assert relative_error(moved, expected) < 5e-3
    assert_equal_momenta(state, states)
