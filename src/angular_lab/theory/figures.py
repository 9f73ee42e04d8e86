"""The measured numbers as figures with captions."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from angular_lab.report.figures.plots import Figure, Panel, Trace
from angular_lab.theory.tables import Data, by_kind, distinct, layer_of, select, shape_text


def column(rows: Sequence[Data], key: str) -> list[Any]:
    return [row[key] for row in rows]


def solver(data: Data) -> list[Figure]:
    figures = []
    for shape in distinct(data["cells"], "shape"):
        traces = []
        for color, cell in enumerate(select(data["cells"], shape=shape)):
            gap = [max(value, 1e-9) for value in cell["gap"]]
            dual = [max(value, 1e-9) for value in cell["dual_excess"]]
            traces.append(Trace(range(len(gap)), gap, color, cell["spectrum"], "dots"))
            traces.append(Trace(range(len(dual)), dual, color, kind="prediction"))
        panel = Panel(
            traces, "steps of the multiplier", "relative gap", log_y=True, y_bottom=1e-9, y_top=1
        )
        caption = (
            f"{shape_text(shape)}: the proven gap after every step, the worst of "
            f"{data['samples']} matrices. Dashed: the dual value's distance from its minimum."
        )
        figures.append(Figure(f"solver-{shape[0]}x{shape[1]}", panel, caption))
    return figures


def guarantee(data: Data) -> list[Figure]:
    figures = []
    for shape in distinct(data["cells"], "shape"):
        traces, horizons = [], []
        for color, problem in enumerate(distinct(data["cells"], "problem")):
            cells = select(data["cells"], shape=shape, problem=problem)
            horizons = column(cells, "steps")
            traces.append(Trace(horizons, column(cells, "mean"), color, problem, "dots"))
            traces.append(Trace(horizons, column(cells, "bound"), color, kind="prediction"))
        panel = Panel(traces, "steps T (log)", "mean |grad|", True, True, x_ticks=horizons)
        caption = (
            f"{shape_text(shape)}: the mean gradient norm of runs of T steps. Dashed, in the same "
            "color: the theorem's bound."
        )
        figures.append(Figure(f"guarantee-{shape[0]}x{shape[1]}", panel, caption))
    return [*figures, _ranks(data["rank_cells"], data["rank_exponents"])]


def _ranks(cells: Sequence[Data], exponents: Data) -> Figure:
    ranks = column(cells, "rank")
    traces = [
        Trace(ranks, column(cells, "mean"), 0, "Frobenius norm", "dots"),
        Trace(ranks, column(cells, "dual_mean"), 1, "dual norm", "dots"),
        Trace(ranks, column(cells, "bound"), 1, "bound of both", "prediction"),
    ]
    panel = Panel(traces, "r = min(m, n) (log)", "mean |grad|", True, True, x_ticks=ranks)
    caption = (
        f"Alignment, r x {cells[0]['shape'][1]}, {cells[0]['steps']:,} steps, the same L and σ. "
        f"The means scale as r^({exponents['mean']:.2f}) and r^({exponents['dual_mean']:.2f}), the "
        "bound's leading term as r^(1/4)."
    )
    return Figure("guarantee-rank", panel, caption)


def regimes(data: Data) -> list[Figure]:
    m, n = data["shape"]
    captions = {
        "angle": f"The angle by which a step turns a row, {m} x {n}, white-noise gradients. Dashed:"
        " the closed forms. Weight decay ends on a plateau, Muown falls as t^(-1/2), AngularMuown "
        "follows its schedule.",
        "norm": "The norm that divides a step, and its closed forms. Weight decay holds it, Muown's"
        " stored norm grows as √t, AngularMuown's is 1.",
    }
    labels = {"angle": "mean angle of a step (rad)", "norm": "mean norm of a row"}
    figures = []
    for key, caption in captions.items():
        traces = []
        for color, regime in enumerate(data["lines"]):
            points = regime["points"]
            steps = [step + 1 for step in column(points, "step")]
            predicted = column(points, f"{key}_predicted")
            traces.append(Trace(steps, column(points, key), color, regime["name"]))
            traces.append(Trace(steps, predicted, color, kind="prediction"))
        panel = Panel(traces, "step (log)", labels[key], True, True)
        figures.append(Figure(f"regimes-{key}", panel, caption))
    return figures


def geometry(data: Data) -> list[Figure]:
    return [
        _angles(data["angles"], data["angle_error"]),
        _retractions(data["moves"]),
        *_momentum(data["momentum"]),
    ]


def _angles(curves: Sequence[Data], error: float) -> Figure:
    traces = []
    for color, curve in enumerate(curves):
        label = f"radial part {curve['radial']:g}"
        traces.append(Trace(curve["sizes"], curve["measured"], color, label))
        traces.append(Trace(curve["sizes"][::5], curve["formula"][::5], color, kind="points"))
    panel = Panel(traces, "tangent part of the step (log)", "angle (degrees)", log_x=True)
    caption = (
        "Lines: the angle measured after normalizing. Rings: tan θ = |ξ⊥| / (1 + ⟨ξ, U⟩). They "
        f"differ by at most {error:.0e} degrees. A tangent step never turns a row by more than 90 "
        "degrees."
    )
    return Figure("geometry-angle", panel, caption)


def _retractions(data: Data) -> Figure:
    sizes = data["sizes"]
    traces = [
        Trace(sizes, data["exponential"], 0, "exponential map"),
        Trace(sizes, data["retraction"], 1, "normalizing"),
        Trace(sizes, [max(x, 1e-9) for x in data["apart"]], 2, "between the two"),
        Trace(sizes, data["cubic"], 2, kind="prediction"),
    ]
    panel = Panel(
        traces, "length of the tangent step (log)", "angle (degrees)", True, True,
        y_bottom=1e-8, y_top=400,
    )  # fmt: skip
    caption = (
        "A tangent step of length x turns a row by x along the great circle and by arctan x when "
        "the row is normalized. Dashed: the first term of the difference, x³/3."
    )
    return Figure("geometry-moves", panel, caption)


def _momentum(data: Data) -> list[Figure]:
    m, n = data["shape"]
    figures = []
    for problem in distinct(data["runs"], "problem"):
        traces, learning_rates = [], []
        for color, variant in enumerate(distinct(data["runs"], "variant")):
            runs = select(data["runs"], problem=problem, variant=variant)
            learning_rates = column(runs, "lr")
            traces.append(Trace(learning_rates, column(runs, "loss"), color, variant, "dots"))
        panel = Panel(
            traces, "step size (log)", "loss at the end", True, True, x_ticks=learning_rates
        )
        caption = (
            f"{problem.capitalize()}, {m} x {n}, β = {data['beta']:g}, {data['steps']} steps, mean "
            f"of {data['seeds']} seeds: momentum kept as it is, projected, or transported."
        )
        figures.append(Figure(f"geometry-momentum-{problem}", panel, caption))
    return figures


def shortcut(data: Data) -> list[Figure]:
    rows = data["rows"]
    return [
        *_by_layer(rows, "dual_gap", "dual gap (log)", True,
                   "how far the nuclear norm of the matrix that the shortcut orthogonalizes is "
                   "above the constrained optimum"),
        *_by_layer(rows, "angle", "angle (degrees)", False,
                   "the angle between the shortcut's tangent direction and the exact one"),
        Figure(
            "shortcut-lost",
            Panel(_medians(rows, "lost"), "step", "share of the descent lost", y_bottom=0),
            "The share of the best descent that the shortcut's tangent direction loses once it is "
            "scaled to operator norm 1, as the theorem's direction is. Medians over the layers.",
        ),
        _dual_steps(rows, [0, *data["inner_steps"]]),
    ]  # fmt: skip


def _by_layer(
    rows: Sequence[Data], key: str, y_label: str, log_y: bool, caption: str
) -> list[Figure]:
    """Draw a figure per layer, on the same axes, with a curve per kind of matrix."""
    values = column(rows, key)
    bottom, top = (0.8 * min(values), 1.25 * max(values)) if log_y else (0, 1.05 * max(values))
    figures = []
    for layer in sorted({layer_of(row["matrix"]) for row in rows}):
        traces = _medians([row for row in rows if layer_of(row["matrix"]) == layer], key)
        panel = Panel(traces, "step", y_label, log_y=log_y, y_bottom=bottom, y_top=top)
        name = f"shortcut-{key.replace('_', '-')}-{layer}"
        figures.append(Figure(name, panel, f"Layer {layer}: {caption}."))
    return figures


def _medians(rows: Sequence[Data], key: str) -> list[Trace]:
    """Return a curve over the sampled steps for each kind of matrix."""
    traces = []
    for color, (kind, members) in enumerate(by_kind(rows).items()):
        steps = distinct(members, "step")
        middle = [median(column(select(members, step=step), key)) for step in steps]
        traces.append(Trace(steps, middle, color, kind, "dots"))
    return traces


def _dual_steps(rows: Sequence[Data], steps: list[int]) -> Figure:
    traces = []
    for color, (kind, members) in enumerate(by_kind(rows).items()):
        losses = zip(*([row["lost"], *row["lost_after"]] for row in members), strict=True)
        traces.append(Trace(steps, [median(values) for values in losses], color, kind, "dots"))
    panel = Panel(
        traces, "dual steps from a cold start", "share of the descent lost", x_ticks=steps,
        y_bottom=0,
    )  # fmt: skip
    caption = (
        "The same loss after a few cheap steps of the multiplier, which start by taking the radial "
        "part out of the momentum. Medians over all matrices of a kind and all sampled steps."
    )
    return Figure("shortcut-dual-steps", panel, caption)
