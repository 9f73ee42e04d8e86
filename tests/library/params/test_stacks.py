"""Layouts and stacks: cuts cover every element, and stacking does not change a single bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from angular_muown import AngularMuown, engine
from angular_muown.params import stacks
from angular_muown.params.layout import Layout, Slice2D, block_sizes
from tests.library.family import FAMILY, noise, parameter, pull, run

LAYOUTS = [
    (Layout(), (7, 5)),
    (Layout(transposed=True), (7, 5)),
    (Layout(blocks=3), (9, 4)),
    (Layout(blocks=(4, 2, 2)), (8, 4)),
    (Layout(column_blocks=2), (5, 6)),
    (Layout(blocks=2, column_blocks=(1, 3)), (4, 4)),
    (Layout("stack"), (3, 5, 4)),
    (Layout("stack", blocks=2), (2, 3, 6, 4)),
    (Layout("stack", transposed=True, blocks=2), (3, 5, 4)),
    (Layout("conv"), (6, 2, 3, 3)),
    (Layout("conv", blocks=2), (6, 2, 3)),
]


@pytest.mark.parametrize(("layout", "shape"), LAYOUTS, ids=str)
def test_cuts_cover_every_element_once(layout: Layout, shape) -> None:
    """Cuts are views, and state vectors are cut the same way."""
    X = torch.zeros(shape)
    pieces = layout.cut(X)
    for piece in pieces:
        piece += 1
    assert (X == 1).all()
    assert sum(piece.numel() for piece in pieces) == X.numel()
    for name in ("exp_avg", "column_gain", "matrix_norm"):
        vector = torch.zeros(layout.vector_shape(X, name))
        parts = layout.cut_vector(vector, name)
        for part, (count, m, n) in zip(parts, (piece.shape for piece in pieces), strict=True):
            entries = {"exp_avg": (m, 1), "column_gain": (1, n), "matrix_norm": (1, 1)}
            assert part.shape == (count, *entries[name])
            part += 1
        assert (vector == 1).all()


INTERLEAVED = [
    (Layout(blocks=3, interleaved=4), (24, 6)),
    (Layout(blocks=(16, 8, 8), interleaved=4), (32, 6)),
    (Layout(blocks=2, interleaved=12), (24, 6)),  # gate and up rows take turns
    (Layout(blocks=2, column_blocks=2, interleaved=3), (12, 6)),
    (Layout(transposed=True, blocks=3, interleaved=2), (6, 24)),
    (Layout("stack", blocks=2, interleaved=3), (2, 12, 6)),
    (Layout("stack", transposed=True, blocks=2, interleaved=3), (2, 6, 12)),
]


def rows_by_block(layout: Layout, m: int) -> list[int]:
    """Return the rows of an interleaved matrix block by block, spelled out."""
    sizes = block_sizes(m, layout.blocks)
    units = [[size // layout.interleaved for size in sizes]] * layout.interleaved
    owner = [block for unit in units for block, size in enumerate(unit) for _ in range(size)]
    return [row for block in range(len(sizes)) for row in range(m) if owner[row] == block]


@pytest.mark.parametrize(("layout", "shape"), INTERLEAVED, ids=str)
@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interleaved_blocks_step_like_contiguous_ones_bit_for_bit(
    optimizer, dtype, layout: Layout, shape
) -> None:
    dim = -1 if layout.transposed else -2
    order = torch.tensor(rows_by_block(layout, shape[dim]))
    values = {
        "view": layout.view,
        "transposed": layout.transposed,
        "blocks": layout.blocks,
        "column_blocks": layout.column_blocks,
    }
    p = parameter(*shape, dtype=dtype)
    q = nn.Parameter(p.detach().index_select(dim, order))
    one = optimizer([{"params": [p], **values, "interleaved": layout.interleaved}], lr=0.02)
    other = optimizer([{"params": [q], **values}], lr=0.02)
    for t in range(6):
        p.grad = noise(*shape, seed=t, dtype=dtype)
        q.grad = p.grad.index_select(dim, order)
        one.step()
        other.step()
    assert torch.equal(p.detach().index_select(dim, order), q.detach())


def test_an_interleaving_that_does_not_fit_is_refused_also_after_construction() -> None:
    with pytest.raises(ValueError, match="do not all divide into interleaved=5 units"):
        AngularMuown([{"params": [parameter(12, 4)], "blocks": 3, "interleaved": 5}])
    optimizer = AngularMuown([{"params": [parameter(12, 4)], "blocks": 3, "interleaved": 2}])
    optimizer.param_groups[0]["interleaved"] = 5
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = noise(12, 4, seed=0)
    with pytest.raises(ValueError, match="do not all divide into interleaved=5 units"):
        optimizer.step()


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    units=st.integers(2, 5),
    bounds=st.tuples(st.integers(0, 80), st.integers(0, 80)),
)
def test_a_range_of_rows_holds_consecutive_rows_of_every_interleaved_block(
    sizes, units, bounds
) -> None:
    m = units * sum(sizes)
    layout = Layout(blocks=tuple(units * size for size in sizes), interleaved=units)
    first, last = sorted(bound % (m + 1) for bound in bounds)
    window = Slice2D((first, last), (0, 3), m, 3)
    everything = Slice2D((0, m), (0, 3), m, 3)
    whole = layout.cut(torch.arange(m).view(m, 1).expand(m, 3).contiguous(), everything)
    part = layout.cut(torch.arange(first, last).view(-1, 1).expand(-1, 3).contiguous(), window)
    for block, all_rows, rows in zip(layout.grid(m, 3), whole, part, strict=True):
        start, stop = window.of_block(block).rows
        assert torch.equal(all_rows[:, start:stop], rows)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_block_sizes_are_those_given_or_equal(sizes) -> None:
    assert block_sizes(sum(sizes), sizes) == sizes
    assert block_sizes(3 * len(sizes), len(sizes)) == [3] * len(sizes)


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("orthogonalize", ["polar_express", "newton_schulz", "gram", "svd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stacked_equals_one_by_one_bit_for_bit(optimizer, orthogonalize, dtype) -> None:
    shapes = [(16, 24), (24, 16), (16, 24), (16, 24), (8, 40), (24, 16)]
    together = [parameter(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    alone = [nn.Parameter(p.detach().clone()) for p in together]
    values = {"lr": 0.02, "orthogonalize": orthogonalize}
    run(optimizer(together, **values), together, 12)
    singles = [optimizer([p], **values) for p in alone]
    for i, (opt, p) in enumerate(zip(singles, alone, strict=True)):
        run(opt, [p], 12, gradient=lambda p, _, t, i=i: pull(p, i, t))
    for p, q in zip(together, alone, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_the_order_of_parameters_does_not_matter(optimizer) -> None:
    shapes = [(16, 24), (24, 16), (16, 24), (9, 9)]
    results = []
    for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
        params = [parameter(*shape, seed=i) for i, shape in enumerate(shapes)]
        opt = optimizer([params[i] for i in order], lr=0.02)
        run(opt, params, 8)
        results.append(params)
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


@pytest.mark.parametrize("optimizer", FAMILY)
def test_a_stack_equals_its_matrices_one_by_one(optimizer) -> None:
    stack = parameter(4, 6, 10)
    alone = [nn.Parameter(X.clone()) for X in stack.detach()]
    whole = optimizer([{"params": [stack], "view": "stack"}], lr=0.02)
    split = optimizer(alone, lr=0.02)
    for t in range(8):
        stack.grad = noise(4, 6, 10, seed=t)
        for p, G in zip(alone, stack.grad, strict=True):
            p.grad = G.clone()
        whole.step()
        split.step()
    assert torch.equal(stack, torch.stack(alone))


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("limit", [1, 3 * 6 * 10])
def test_the_workspace_limits_stacks_without_changing_a_bit(optimizer, limit, monkeypatch) -> None:
    results, sizes = [], []
    step = engine.update_alone

    def spy(stack, *args) -> None:
        sizes.append(sum(view.W.numel() for view in stack.views))
        step(stack, *args)

    for least in (limit, 2**24):
        monkeypatch.setattr(stacks, "LEAST_ELEMENTS", least)
        monkeypatch.setattr(engine, "update_alone", spy if least == limit else step)
        params = [parameter(6, 10, seed=i) for i in range(4)] + [parameter(5, 6, 10)]
        groups = [{"params": params[:4]}, {"params": params[4:], "view": "stack"}]
        opt = optimizer(groups, lr=0.02, workspace=1e-9)
        for t in range(4):
            for i, p in enumerate(params):
                p.grad = noise(*p.shape, seed=10 * t + i)
            opt.step()
        results.append(params)
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))
    expected = {1: [60] * 9, 180: [180, 60, 180, 120]}[limit]
    assert sizes == 4 * expected


def test_the_workspace_grows_with_the_model(monkeypatch) -> None:
    monkeypatch.setattr(stacks, "LEAST_ELEMENTS", 1)
    opened = [
        stacks.OpenParameter(p, {"momentum_buffer": p}, Layout()) for p in (parameter(6, 8),) * 24
    ]
    for one in opened:
        one.parameter.grad = one.parameter.detach()
        one.state["step"] = torch.tensor(1.0)
    settings = {"maximize": False, "write_back": "master", "step": 0, "state_dtype": None}
    group = {"workspace": 1.0, **settings}
    assert [len(stack.views) for stack in stacks.stacks(opened, (), group)] == [2] * 12


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize(
    ("dtype", "write_back"), [(torch.float64, "stochastic"), (torch.bfloat16, "master")]
)
def test_memory_format_does_not_matter(optimizer, dtype, write_back) -> None:
    """A channels_last convolution and a weight that is a transposed view are written in place."""
    conv = parameter(6, 4, 3, 3, dtype=dtype)
    channels_last = nn.Parameter(conv.detach().clone(memory_format=torch.channels_last))
    matrix = parameter(5, 7, dtype=dtype)
    transposed = nn.Parameter(matrix.detach().t().contiguous().t())
    assert not channels_last.is_contiguous()
    assert not transposed.is_contiguous()
    for p, values in (
        (conv, {"view": "conv"}),
        (channels_last, {"view": "conv"}),
        (matrix, {}),
        (transposed, {}),
    ):
        before = p.detach().clone()
        run(optimizer([{"params": [p], **values}], lr=0.02, write_back=write_back), [p], 5)
        assert not torch.equal(p, before)
    tolerance = {torch.float64: 1e-9, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(channels_last, conv, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(transposed, matrix, rtol=tolerance, atol=tolerance)
    assert channels_last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("optimizer", FAMILY)
def test_parameters_of_different_age_keep_their_own_bias_correction(optimizer) -> None:
    a, b = parameter(6, 8), parameter(6, 8, seed=1)
    late = nn.Parameter(b.detach().clone())
    together = optimizer([a, b], lr=0.02)
    run(together, [a], 4)
    alone = optimizer([late], lr=0.02)
    alone.param_groups[0]["step"] = 4  # kappa counts the group's steps
    for t in range(4, 8):
        a.grad = noise(6, 8, seed=t)
        b.grad = noise(6, 8, seed=100 + t)
        late.grad = b.grad.clone()
        together.step()
        alone.step()
    assert torch.equal(b, late)
