"""The measured numbers as figures, each with a caption that says what is seen."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from angular_lab.report.figures import Figure
from angular_lab.report.plots import Panel, Trace
from angular_lab.theory.tables import kind_of, layer_of, shape_text

Data = dict[str, Any]


def distinct(rows: Sequence[Data], key: str) -> list[Any]:
    """Values of a key, in the order of their first row; lists become tuples."""
    values = (row[key] for row in rows)
    return list(dict.fromkeys(tuple(v) if isinstance(v, list) else v for v in values))


def solver(data: Data) -> list[Figure]:
    made = []
    for shape in distinct(data["cells"], "shape"):
        traces = []
        for color, cell in enumerate(c for c in data["cells"] if tuple(c["shape"]) == shape):
            gap = [max(value, 1e-9) for value in cell["gap"]]
            dual = [max(value, 1e-9) for value in cell["dual_excess"]]
            traces.append(Trace(range(len(gap)), gap, color, cell["spectrum"], "dots"))
            traces.append(Trace(range(len(dual)), dual, color, kind="prediction"))
        panel = Panel(
            traces, "steps of the multiplier", "relative gap", log_y=True, y_bottom=1e-9, y_top=1
        )
        caption = (
            f"{shape_text(shape)}: the proven gap after every step, the worst of "
            f"{data['samples']} matrices. Dashed: how far the dual value alone is from its minimum."
        )
        made.append(Figure(f"solver-{shape[0]}x{shape[1]}", panel, caption))
    return made


def guarantee(data: Data) -> list[Figure]:
    made = []
    for shape in distinct(data["cells"], "shape"):
        traces = []
        cells = [c for c in data["cells"] if tuple(c["shape"]) == shape]
        for color, problem in enumerate(distinct(cells, "problem")):
            own = [c for c in cells if c["problem"] == problem]
            T = [c["steps"] for c in own]
            traces.append(Trace(T, [c["mean"] for c in own], color, problem, "dots"))
            traces.append(Trace(T, [c["bound"] for c in own], color, kind="prediction"))
        panel = Panel(traces, "steps T (log)", "mean |grad|", True, True, x_ticks=T)
        caption = (
            f"{shape_text(shape)}: the mean gradient norm of runs of T steps. Dashed, in the same "
            "colour: the theorem's bound."
        )
        made.append(Figure(f"guarantee-{shape[0]}x{shape[1]}", panel, caption))
    if "rank_cells" in data:
        made.append(_ranks(data))
    return made


def _ranks(data: Data) -> Figure:
    cells = data["rank_cells"]
    own, dual = (data["rank_exponents"][key] for key in ("mean", "dual_mean"))
    ranks = [c["rank"] for c in cells]
    traces = [
        Trace(ranks, [c["mean"] for c in cells], 0, "Frobenius norm", "dots"),
        Trace(ranks, [c["dual_mean"] for c in cells], 1, "dual norm", "dots"),
        Trace(ranks, [c["bound"] for c in cells], 1, "bound of both", "prediction"),
    ]
    panel = Panel(traces, "r = min(m, n) (log)", "mean |grad|", True, True, x_ticks=ranks)
    caption = (
        f"Alignment, r x {cells[0]['shape'][1]}, {cells[0]['steps']:,} steps, the same L and σ. "
        f"The means go as r^({own:.2f}) and r^({dual:.2f}), the bound's leading term as r^(1/4)."
    )
    return Figure("guarantee-rank", panel, caption)


def regimes(data: Data) -> list[Figure]:
    m, n = data["shape"]
    return [
        _regime(data, "angle", "mean angle of a step (rad)",
                f"The angle by which a step turns a row, {m} x {n}, white-noise gradients. Dashed: "
                "the closed forms. Weight decay ends on a plateau, Muown falls as t^(-1/2), "
                "AngularMuown follows its schedule."),
        _regime(data, "norm", "mean norm of a row",
                "The norm that divides a step, and its closed forms. Weight decay holds it, "
                "Muown's stored norm grows as √t, AngularMuown's is 1."),
    ]  # fmt: skip


def _regime(data: Data, key: str, y_label: str, caption: str) -> Figure:
    traces = []
    for color, line in enumerate(data["lines"]):
        steps = [point["step"] + 1 for point in line["points"]]
        measured, predicted = (
            [p[name] for p in line["points"]] for name in (key, f"{key}_predicted")
        )
        traces.append(Trace(steps, measured, color, line["name"]))
        traces.append(Trace(steps, predicted, color, kind="prediction"))
    return Figure(f"regimes-{key}", Panel(traces, "step (log)", y_label, True, True), caption)


def geometry(data: Data) -> list[Figure]:
    return [
        _angles(data["angles"], data["angle_error"]),
        _moves(data["moves"]),
        *_momentum(data["momentum"]),
    ]


def _angles(lines: Sequence[Data], worst: float) -> Figure:
    traces = []
    for color, line in enumerate(lines):
        label = f"radial part {line['radial']:g}"
        traces.append(Trace(line["sizes"], line["measured"], color, label))
        every = slice(None, None, 5)
        points = line["sizes"][every], line["formula"][every]
        traces.append(Trace(*points, color, kind="points"))
    panel = Panel(traces, "tangent part of the step (log)", "angle (degrees)", log_x=True)
    caption = (
        "Lines: the angle measured after normalizing. Rings: tan θ = |ξ⊥| / (1 + ⟨ξ, U⟩). They "
        f"differ by {worst:.0e} degrees at most. A tangent step never turns a row by more than 90 "
        "degrees."
    )
    return Figure("geometry-angle", panel, caption)


def _moves(data: Data) -> Figure:
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
    made = []
    for problem in distinct(data["runs"], "problem"):
        traces = []
        runs = [run for run in data["runs"] if run["problem"] == problem]
        for color, variant in enumerate(distinct(runs, "variant")):
            own = [run for run in runs if run["variant"] == variant]
            xs, ys = [run["lr"] for run in own], [run["loss"] for run in own]
            traces.append(Trace(xs, ys, color, variant, "dots"))
        panel = Panel(traces, "step size (log)", "loss at the end", True, True, x_ticks=xs)
        m, n = data["shape"]
        caption = (
            f"{problem.capitalize()}, {m} x {n}, β = {data['beta']:g}, {data['steps']} steps, mean "
            f"of {data['seeds']} seeds: momentum left where it is, projected, or transported."
        )
        made.append(Figure(f"geometry-momentum-{problem}", panel, caption))
    return made


def shortcut(data: Data) -> list[Figure]:
    return [
        *_by_layer(data["rows"], "dual_gap", "dual gap (log)", True,
                   "how far the nuclear norm of what the shortcut orthogonalizes is above the "
                   "constrained optimum"),
        *_by_layer(data["rows"], "angle", "angle (degrees)", False,
                   "the angle between the shortcut's tangent direction and the exact one"),
        _lost(data["rows"]),
        _after(data),
    ]  # fmt: skip


def _by_layer(
    rows: Sequence[Data], key: str, y_label: str, log_y: bool, caption: str
) -> list[Figure]:
    """A figure for each layer, on the same axes, with a line for each of its matrices."""
    values = [row[key] for row in rows]
    bottom, top = (0.8 * min(values), 1.25 * max(values)) if log_y else (0, 1.05 * max(values))
    made = []
    for layer in sorted({layer_of(row["matrix"]) for row in rows}):
        own = [row for row in rows if layer_of(row["matrix"]) == layer]
        panel = Panel(_by_kind(own, key), "step", y_label, log_y=log_y, y_bottom=bottom, y_top=top)
        name = f"shortcut-{key.replace('_', '-')}-{layer}"
        made.append(Figure(name, panel, f"Layer {layer}: {caption}."))
    return made


def _lost(rows: Sequence[Data]) -> Figure:
    panel = Panel(_by_kind(rows, "lost"), "step", "share of the descent lost", y_bottom=0)
    caption = (
        "What the shortcut's tangent direction misses of the best descent once it is scaled to "
        "operator norm 1, as the theorem's direction is. Medians over the layers."
    )
    return Figure("shortcut-lost", panel, caption)


def _by_kind(rows: Sequence[Data], key: str) -> list[Trace]:
    traces = []
    for color, kind in enumerate(sorted({kind_of(row["matrix"]) for row in rows})):
        own = [row for row in rows if kind_of(row["matrix"]) == kind]
        steps = distinct(own, "step")
        middle = [median(row[key] for row in own if row["step"] == step) for step in steps]
        traces.append(Trace(steps, middle, color, kind, "dots"))
    return traces


def _after(data: Data) -> Figure:
    """What a few dual steps bring, over the whole run."""
    rows, steps = data["rows"], [0, *data["inner_steps"]]
    traces = []
    for color, kind in enumerate(sorted({kind_of(row["matrix"]) for row in rows})):
        own = [row for row in rows if kind_of(row["matrix"]) == kind]
        values = [[row["lost"], *row["lost_after"]] for row in own]
        middle = [median(column) for column in zip(*values, strict=True)]
        traces.append(Trace(steps, middle, color, kind, "dots"))
    panel = Panel(
        traces, "dual steps from a cold start", "share of the descent lost", x_ticks=steps,
        y_bottom=0,
    )  # fmt: skip
    caption = (
        "The same loss after a few cheap steps of the multiplier, which begin with the radial part "
        "taken out of the momentum. Medians over all matrices of a kind and all looks."
    )
    return Figure("shortcut-dual-steps", panel, caption)
