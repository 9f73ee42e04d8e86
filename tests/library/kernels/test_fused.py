"""The fused step computes what the eager one does, on a GPU or in Triton's interpreter."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from angular_muown import AngularMuown, Muon, Muown, NorMuon, NorMuown, engine
from angular_muown.engine import Engine
from angular_muown.kernels import coverage
from angular_muown.stages import orthogonalize
from angular_muown.stages.normalize import RowSecondMoment
from angular_muown.update import Recipe
from tests.library.family import noise, parameter

pytest.importorskip("triton")

from angular_muown.kernels import launch

SHAPES = [(128, 144), (144, 128)]
Member = Callable[..., Engine]
Disturb = Callable[[int, list[nn.Parameter], Engine], None]


@contextmanager
def kernels(on: bool) -> Iterator[None]:
    """Switch the kernels on or off; use a GPU if there is one.

    The eager path iterates in float32 on the GPU as well.
    """
    gpu = torch.cuda.is_available()
    with pytest.MonkeyPatch.context() as patch, torch.device("cuda" if gpu else "cpu"):
        for module in (coverage, engine):
            patch.setattr(module, "runs_on", lambda device: on)
        patch.setattr(orthogonalize, "iteration_dtype", lambda X: X.dtype)
        yield


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with kernels(True):
        yield


def weights(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    """Return weights that float32 represents exactly; the first one has a zero row."""
    params = [parameter(*s, seed=i, dtype=torch.float32) for i, s in enumerate(shapes)]
    params[0].data.flatten(0, -2)[3] = 0.0
    return [nn.Parameter(p.detach().to(dtype)) for p in params]


def advance(
    opt: Engine,
    params: list[nn.Parameter],
    steps: int,
    start: int = 0,
    disturb: Disturb = lambda t, params, opt: None,
) -> None:
    for t in range(start, start + steps):
        for i, p in enumerate(params):
            p.grad = noise(*p.shape, seed=100 * t + i, dtype=torch.float32).to(p.dtype)
        disturb(t, params, opt)
        opt.step()


def assert_fused(opt: Engine) -> None:
    assert opt._fused is not None
    for _, step, rest in opt._fused.steps.values():
        assert step is not None
        assert not rest


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def compare(
    optimizer: Member,
    values: dict[str, Any],
    shapes: list[tuple[int, ...]],
    disturb: Disturb = lambda t, params, opt: None,
    steps: int = 3,
) -> tuple[list[Tensor], list[Tensor]]:
    """Compare the kernels in float32 with the eager path in float64; return W before and after."""
    ends: list[tuple[list[nn.Parameter], Engine]] = []
    for dtype in (torch.float32, torch.float64):
        params = weights(shapes, dtype)
        opt = optimizer([{"params": params, **values}])
        advance(opt, params, steps, disturb=disturb)
        ends.append((params, opt))
    (params, opt), (expected, reference) = ends
    assert_fused(opt)
    start = [p.detach() for p in weights(shapes, torch.float64)]
    for p, q, W in zip(params, expected, start, strict=True):
        assert relative_error(p.detach() - W, q.detach() - W) < 5e-3
        assert opt.state[p].keys() == reference.state[q].keys()
        for key, value in reference.state[q].items():
            assert relative_error(opt.state[p][key], value) < 2e-3, key
    return start, [p.detach() for p in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_momentum_equals_the_eager_one(dtype: torch.dtype) -> None:
    """Also with bf16 weights, and with a row that is not finite. Muon: no other row hears of it
    before the polar factor."""
    ends = []
    for on in (True, False):
        with kernels(on):
            params = weights([(128, 144)], dtype)
            opt = Muon(params, state_dtype="int8")
            advance(opt, params, 2)
            params[0].grad = noise(128, 144, seed=7, dtype=torch.float32).to(dtype)
            params[0].grad[5, 9] = torch.nan
            opt.step()
            ends.append(opt.state[params[0]])
    (codes, scale), (expected, scales) = (
        (state["momentum_buffer"], state["momentum_scale"]) for state in ends
    )
    torch.testing.assert_close(scale, scales, rtol=1e-4, atol=0)
    assert scale[5].isinf()
    apart = (codes.int() - expected.int()).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3


class CustomScalars(AngularMuown):
    """A user's member whose recipe overrides the group's values."""

    def recipe(self, group: dict[str, Any]) -> Recipe:
        recipe = super().recipe({**group, "betas": (0.5, 0.7), "eps": 1e-3})
        return replace(recipe, normalize=RowSecondMoment(0.6))


CASES: list[tuple[Member, dict[str, Any]]] = [
    (AngularMuown, {"lr": 0.05}),
    (AngularMuown, {"radius": "log_adam", "weight_decay": 1.0, "momentum": 0.7}),
    (AngularMuown, {"radius": "fixed", "nesterov": False, "maximize": True}),
    (AngularMuown, {"radius_lr": 0.5, "betas": (0.8, 0.9), "orthogonalize": "newton_schulz"}),
    (Muown, {"radius_lr": 0.5, "maximize": True, "weight_decay": 2.0}),
    (Muown, {"radius": "log_adam", "nesterov": False}),
    (Muown, {"radius": "fixed", "weight_decay": 5.0}),
    (NorMuown, {"radius_lr": 0.5, "momentum": 0.5, "row_beta": 0.6}),
    (NorMuown, {"radius": "log_adam", "weight_decay": 1.0, "orthogonalize": "gram"}),
    (AngularMuown, {"capturable": True, "decay_scale": 1.0, "weight_decay": 1.0}),
    (NorMuown, {"capturable": True, "radius_lr": 0.5}),
    (Muon, {"weight_decay": 2.0}),
    (Muon, {"maximize": True, "nesterov": False, "momentum": 0.6}),
    (NorMuon, {"weight_decay": 2.0, "row_beta": 0.6}),
    (CustomScalars, {}),
    (AngularMuown, {"state_dtype": "int8", "radius_lr": 0.5}),
    (Muon, {"state_dtype": "int8", "nesterov": False}),
    (NorMuown, {"state_dtype": "int8", "capturable": True}),
]


@pytest.mark.parametrize(("optimizer", "values"), CASES)
def test_fused_steps_match_float64(optimizer: Member, values: dict[str, Any]) -> None:
    def zero_a_row(t: int, params: list[nn.Parameter], opt: Engine) -> None:
        if t == 1:  # its nonzero first moment must be discarded
            params[1].data[5] = 0.0

    before, after = compare(optimizer, values, [*SHAPES], zero_a_row)
    if "radius_lr" in values:
        pairs = zip(before, after, strict=True)
        assert all(((W * V).sum(-1) < 0).any() for W, V in pairs), "no length crossed zero"


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ((144, 160), {}),
        ((176, 304), {}),
        ((384, 144), {"blocks": 3}),
        ((272, 128), {"blocks": [128, 144]}),
        ((144, 256), {"column_blocks": 2}),
        ((2, 128, 144), {"view": "stack"}),
    ],
)
def test_every_layout_and_shape_matches_float64(
    shape: tuple[int, ...], values: dict[str, Any]
) -> None:
    """NorMuown keeps all four row vectors."""
    compare(NorMuown, values, [shape], steps=2)


@pytest.mark.slow
def test_long_rows_match_float64() -> None:
    """A program holds whole rows, here a single one of 32,768 columns."""
    compare(AngularMuown, {}, [(128, 16400)], steps=1)


def test_the_number_of_programs_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of 8 rows, as on a GPU, of 64 rows, and one for the whole matrix."""
    ends: list[Tensor] = []
    for elements in (2048, 16384, 2**17):
        monkeypatch.setattr(launch, "ROW_ELEMENTS", elements)
        (p,) = weights([(144, 208)], torch.float32)
        advance(NorMuown([p]), [p], 1)
        ends.append(p.detach())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 4e18, 1e30])
@pytest.mark.parametrize("member", [AngularMuown, Muown])
def test_weights_of_any_magnitude_match_the_eager_path(member: Member, size: float) -> None:
    """The squares of these weights are outside the range of float32."""
    ends: list[Tensor] = []
    for on in (True, False):
        p = nn.Parameter(size * parameter(128, 144, dtype=torch.float32).detach())
        p.grad = noise(128, 144, seed=1, dtype=torch.float32) / size
        opt = member([p], lr=0.1, radius="fixed")
        with kernels(on):
            opt.step()
        ends.append(p.detach())
    assert ends[0].isfinite().all()
    assert relative_error(ends[0], ends[1]) < 5e-3  # as above: products in float16


@pytest.mark.parametrize("size", [1e-30, 1e18])
@pytest.mark.parametrize("member", [Muown, NorMuown])
def test_a_zero_row_grows_as_on_the_eager_path(member: Member, size: float) -> None:
    """Its length is 1e-24 after a first step with tiny gradients: a product of both would be 0."""
    ends: list[tuple[Tensor, Tensor]] = []
    for on in (True, False):
        (p,) = weights([(128, 144)], torch.float32)
        opt = member([p])
        with kernels(on):
            for t in range(3):
                p.grad = size * noise(128, 144, seed=t, dtype=torch.float32)
                opt.step()
        ends.append((p.detach(), opt.state[p]["stored_norm"]))
    (W, norm), (expected, norms) = ends
    torch.testing.assert_close(norm, norms, rtol=1e-2, atol=0)
    assert relative_error(W[3], expected[3]) < 5e-3


def test_parameters_may_have_taken_different_numbers_of_steps() -> None:
    def skip(t: int, params: list[nn.Parameter], opt: Engine) -> None:
        if t == 1:
            params[1].grad = None

    compare(AngularMuown, {"lr": 0.05}, [(128, 128)] * 2, skip)


def test_uncovered_parameters_take_the_eager_path() -> None:
    def make() -> list[nn.Parameter]:
        transposed = nn.Parameter(parameter(160, 128, dtype=torch.float32).detach().mT)
        params = weights([*SHAPES, (128, 130), (128, 128)], torch.float32)
        return [*params, transposed, parameter(128, 128, seed=9)]

    ends: list[list[nn.Parameter]] = []
    for on in (True, False):
        params = make()
        opt = AngularMuown(params)
        with kernels(on):
            advance(opt, params, 2)
        if on:
            assert opt._fused is not None
            rest = opt._fused.steps[0][2]
            assert [any(p is q for q in rest) for p in params] == [0, 0, 1, 0, 1, 1]
        ends.append(params)
    for p, q, W in zip(*ends, make(), strict=True):
        assert relative_error(p.detach() - W.detach(), q.detach() - W.detach()) < 5e-3


def moved(old: Tensor) -> Tensor:
    """Return a copy at another address, and overwrite the original with NaN."""
    new = old.detach().clone()
    old.detach().fill_(float("nan"))
    return new


def interrupt(kind: str, p: nn.Parameter, opt: Engine) -> tuple[nn.Parameter, Engine]:
    state = opt.state[p]
    if kind == "weight":
        p.data = moved(p.data)
    elif kind in state:
        state[kind] = moved(state[kind])
    else:
        old = [p.data, *state.values()]
        if kind == "deepcopy":
            p, opt = copy.deepcopy((p, opt))
        else:
            p, saved = nn.Parameter(p.detach().clone()), copy.deepcopy(opt.state_dict())
            opt = NorMuown([p])
            opt.load_state_dict(saved)
        for t in old:
            moved(t)
    return p, opt


STATE = ["step", "momentum_buffer", "exp_avg", "exp_avg_sq", "stored_norm", "row_second_moment"]


@pytest.mark.slow
def test_tensors_may_move_between_steps() -> None:
    """The weights equal those of a run in which no tensor moves, bit for bit."""
    ends: list[Tensor] = []
    for kind in ("", "gradient", "weight", *STATE, "load", "deepcopy"):
        (p,) = weights([(128, 128)], torch.float32)
        opt: Engine = NorMuown([p])
        gradient = torch.empty_like(p)
        for t in range(3):
            if t and kind == "gradient":
                gradient = moved(gradient)
            elif t and kind:
                p, opt = interrupt(kind, p, opt)
            p.grad = gradient.copy_(noise(128, 128, seed=t))
            opt.step()
            assert_fused(opt)
        ends.append(p.detach())
    assert ends[0].isfinite().all()
    assert all(torch.equal(end, ends[0]) for end in ends)


CHANGES = [("lr", 0.2), ("momentum", 0.1), ("decay_scale", 5.0), ("radius_lr", 0.3)]
CHOICES = [("weight_decay", 5.0), ("nesterov", False), ("maximize", True), ("radius", "log_adam")]


@pytest.mark.parametrize(("key", "value"), CHANGES + CHOICES)
def test_values_changed_between_steps_take_effect(key: str, value: Any) -> None:
    def change(t: int, params: list[nn.Parameter], opt: Engine) -> None:
        if t == 1:
            opt.param_groups[0][key] = value

    _, (changed,) = compare(AngularMuown, {}, [(128, 128)], change, steps=2)
    (p,) = weights([(128, 128)], torch.float64)
    advance(AngularMuown([p]), [p], 2)
    assert relative_error(changed, p.detach()) > 5e-3


def test_the_default_device_is_ignored() -> None:
    """Tables and scalars are created on the host, whatever torch.set_default_device chose."""
    ends = []
    for device in ("cpu", "meta"):
        params = weights([*SHAPES], torch.float32)
        gradients = [noise(*p.shape, seed=i).to(p) for i, p in enumerate(params)]
        opt = NorMuown(params)
        with torch.device(device):
            for _ in range(2):
                for p, G in zip(params, gradients, strict=True):
                    p.grad = G
                opt.step()
        assert_fused(opt)
        ends.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
