"""The measured numbers as tables."""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from angular_lab.report.tables import Mark, Row, Table

Data = dict[str, Any]


def distinct(rows: Sequence[Data], key: str) -> list[Any]:
    """Return the values of a key in the order of their first row; lists become tuples."""
    values = (row[key] for row in rows)
    return list(dict.fromkeys(tuple(v) if isinstance(v, list) else v for v in values))


def select(rows: Sequence[Data], **values: Any) -> list[Data]:
    """Return the rows with these values; a tuple selects an equal list."""
    wanted = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def shape_text(shape: Sequence[int]) -> str:
    return f"{shape[0]} x {shape[1]}"


def by_kind(rows: Sequence[Data]) -> dict[str, list[Data]]:
    """Group the shortcut's rows by the kind of their matrix."""
    kinds = sorted({kind_of(row["matrix"]) for row in rows})
    return {kind: [row for row in rows if kind_of(row["matrix"]) == kind] for kind in kinds}


def kind_of(matrix: str) -> str:
    """Return a matrix's role: layers.0.attn.qkv.weight[2] is a value projection."""
    name, _, index = matrix.removesuffix("]").partition("[")
    name = name.removesuffix(".weight").rpartition(".")[2]
    parts = {"qkv": ("query", "key", "value"), "gate_up": ("gate", "up")}.get(name, ())
    return parts[int(index)] if index and int(index) < len(parts) else name


def layer_of(matrix: str) -> int:
    """Return a matrix's layer: layers.2.attn.out.weight belongs to layer 2."""
    return next(int(part) for part in matrix.split(".") if part.isdigit())


def verdict(holds: bool) -> Mark:
    return Mark("holds" if holds else "does not hold", "holds" if holds else "reversed")


def number(value: float, form: str) -> Mark:
    """Return a number that is displayed by a format string such as "{:.1%}"."""
    return Mark(value, text=form.format(value))


def solver(data: Data) -> Table:
    rows = [
        {
            "spectrum": c["spectrum"],
            "shape": shape_text(c["shape"]),
            "dual within 1e-3 (steps)": c["steps_dual"][0],
            "dual within 1e-6 (steps)": c["steps_dual"][1],
            "gap 1e-3 (steps)": c["steps_gap"][0],
            "gap 1e-6 (steps)": c["steps_gap"][1],
            "without a step: dual": number(c["dual_excess"][0], "{:.2%}"),
            "without a step: gap": number(c["gap"][0], "{:.1%}"),
            "float32 gap": number(c["float32_gap"], "{:.0e}"),
        }
        for c in data["cells"]
    ]
    note = f"The worst of {data['samples']} matrices, float64. A step takes one decomposition."
    return Table("solver-steps", "Steps to a given accuracy", rows, note)


def cells(data: Data) -> Table:
    rows = [
        {
            "problem": c["problem"],
            "shape": shape_text(c["shape"]),
            "T": c["steps"],
            "seeds": c["seeds"],
            "lr": c["lr"],
            "β": number(c["momentum"], "{:.4f}"),
            "mean |grad|_F": c["mean"],
            "mean dual norm": c["dual_mean"],
            "bound": c["bound"],
            "dual / bound": number(c["dual_mean"] / c["bound"], "{:.3f}"),
            "under": verdict(max(c["mean"], c["dual_mean"]) <= c["bound"]),
            "direction's gap": number(c["direction_gap"], "{:.0e}"),
        }
        for c in data["cells"] + data["rank_cells"]
    ]
    note = (
        "Up to T = 100 the directions are solved for. Longer runs take one warm-started dual step "
        "per step; the last column is their mean gap δ, weighted by the gradient. With these "
        "weights it raises the theorem's bound by at most 1/(1 - δ)."
    )
    return Table("cells", "Every cell of the guarantee", rows, note)


def slopes(data: Data) -> Table:
    rows = []
    for s in data["slopes"]:
        row: Row = {"problem": s["problem"], "shape": shape_text(s["shape"])}
        for c in select(data["cells"], problem=s["problem"], shape=s["shape"]):
            text = f"{c['mean']:.3f} of {c['bound']:.2f}"
            row[f"T = {c['steps']:,}"] = Mark(c["mean"], text=text)
        rows.append({**row, "exponent": number(s["slope"], "{:.3f}")})
    note = (
        "The mean of |grad|_F over a run and its bound. The exponent is fitted to the last three "
        "columns; -1/4 means that an ε-stationary point takes ε^-4 steps."
    )
    return Table("guarantee-means", "Mean gradient and bound", rows, note)


def assumptions(data: Data) -> Table:
    rows = [
        {
            "problem": a["problem"],
            "shape": shape_text(a["shape"]),
            "L": a["smoothness"],
            "Δ0": a["initial_gap"],
            "σ": a["noise"],
            **{
                f"{k.replace('_', ' ')} seen": number(v, "{:.3f}") for k, v in a["measured"].items()
            },
        }
        for a in data["assumptions"]
    ]
    note = (
        "The largest value found, relative to what the constants allow: at most 1 means that no "
        "violation was found. Gaussian noise meets σ with equality, up to its sampling."
    )
    return Table("assumptions", "A search for violations of the assumptions", rows, note)


def regimes(data: Data) -> Table:
    rows = [
        {
            "method": regime["name"],
            "late angle (rad)": (late := regime["late"])["angle"],
            "predicted": late["angle_predicted"],
            "ratio": number(late["angle"] / late["angle_predicted"], "{:.3f}"),
            "late norm": late["norm"],
            "predicted norm": late["norm_predicted"],
            "ratio of norms": number(late["norm"] / late["norm_predicted"], "{:.3f}"),
        }
        for regime in data["lines"]
    ]
    note = (
        f"Means over the second half of {data['steps']:,} steps. The weights of momentum 0.95 "
        f"alone make squared norms grow {data['memory']:.1f} times as fast."
    )
    return Table("regimes-late", "Angle and norm late in training", rows, note)


class Transport(NamedTuple):
    """What transporting the momentum changes in the best loss over the step sizes."""

    best: dict[str, Data]  # the best run of each variant
    change: float  # relative
    spread: float  # of the seeds, relative
    gains: bool


def transport(data: Data, problem: str) -> Transport:
    runs = select(data["momentum"]["runs"], problem=problem)
    best = {
        variant: min(select(runs, variant=variant), key=lambda run: run["loss"])
        for variant in distinct(runs, "variant")
    }
    paper, transported = best["as in the paper"], best["momentum transported"]
    return Transport(
        best,
        transported["loss"] / paper["loss"] - 1,
        paper["spread"] / paper["loss"],
        transported["loss"] < paper["loss"] - paper["spread"],
    )


def momentum(data: Data) -> Table:
    rows = []
    for problem in distinct(data["momentum"]["runs"], "problem"):
        t = transport(data, problem)
        row = {
            "problem": problem,
            **{f"best loss, {variant}": run["loss"] for variant, run in t.best.items()},
            "transported: change": number(t.change, "{:+.1%}"),
            "seeds differ by": number(t.spread, "{:.0%}"),
            "gain": t.gains,
            "momentum along U": number(t.best["as in the paper"]["radial_share"], "{:.2f}"),
        }
        rows.append(row)
    note = (
        "Each variant at its best step size. The last column is the mean share of a row's momentum "
        "that points along the row if the momentum is not transported."
    )
    return Table("momentum", "What transporting the momentum changes", rows, note)


def shortcut(data: Data) -> Table:
    forms = {
        "dual_gap": ("dual gap", "{:.1%}"),
        "angle": ("angle", "{:.0f}°"),
        "norm": ("norm of the tangent part", "{:.2f}"),
        "lost": ("descent lost at norm 1", "{:.0%}"),
        "radial_share": ("momentum along U", "{:.2f}"),
    }
    rows = []
    for kind, members in by_kind(data["rows"]).items():
        row: Row = {"matrix": kind, "shape": shape_text(members[0]["shape"])}
        for key, (title, form) in forms.items():
            row[title] = number(median(r[key] for r in members), form)
        after = {
            "... after 1 dual step": [r["lost_after"][0] for r in members],
            "... after 1 warm step": [r["lost_warm"] for r in members],
            f"... after {data['inner_steps'][-1]} steps": [r["lost_after"][-1] for r in members],
        }
        rows.append(
            row | {title: number(median(values), "{:.1%}") for title, values in after.items()}
        )
    worst = max(r["solver_gap"] for r in data["rows"])
    note = (
        "Medians over layers and sampled steps. The shortcut's tangent part has an operator norm "
        "above 1: its steps are longer than the theorem allows, and scaled to norm 1 they descend "
        "less. A warm dual step starts from the multiplier of the previous training step. The "
        f"exact directions are solved to a gap of {worst:.0e}."
    )
    return Table("shortcut-kinds", "The shortcut against the exact direction", rows, note)


def commands(results: dict[str, Data]) -> Table:
    rows = [
        {"part": part, "command": d["command"], "torch": d["torch"], "CPU seconds": d["seconds"]}
        for part, d in results.items()
    ]
    return Table("commands", "How these results were measured", rows)
