"""The measured numbers as tables."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from angular_lab.report.tables import Mark, Row, Table

Data = dict[str, Any]


def shape_text(shape: Sequence[int]) -> str:
    return f"{shape[0]} x {shape[1]}"


def kind_of(matrix: str) -> str:
    """layers.0.attn.qkv.weight[2] is a value projection: v."""
    name, _, index = matrix.removesuffix("]").partition("[")
    name = name.removesuffix(".weight").rpartition(".")[2]
    parts = {"qkv": ("query", "key", "value"), "gate_up": ("gate", "up")}.get(name, ())
    return parts[int(index)] if index and int(index) < len(parts) else name


def layer_of(matrix: str) -> int:
    """layers.2.attn.out.weight is of layer 2."""
    return next(int(part) for part in matrix.split(".") if part.isdigit())


def verdict(holds: bool) -> Mark:
    return Mark("holds" if holds else "does not hold", "holds" if holds else "reversed")


def solver(data: Data) -> Table:
    rows = [
        {
            "spectrum": c["spectrum"],
            "shape": shape_text(c["shape"]),
            "dual within 1e-3 (steps)": c["steps_dual"][0],
            "dual within 1e-6 (steps)": c["steps_dual"][1],
            "gap 1e-3 (steps)": c["steps_gap"][0],
            "gap 1e-6 (steps)": c["steps_gap"][1],
            "without a step: dual": Mark(c["dual_excess"][0], text=f"{c['dual_excess'][0]:.2%}"),
            "without a step: gap": Mark(c["gap"][0], text=f"{c['gap'][0]:.1%}"),
            "float32 gap": Mark(c["float32_gap"], text=f"{c['float32_gap']:.0e}"),
        }
        for c in data["cells"]
    ]
    note = f"The worst of {data['samples']} matrices each, float64. A step is one decomposition."
    return Table("solver-steps", "Steps until the solution is good enough", rows, note)


def cells(data: Data) -> Table:
    rows = [
        {
            "problem": c["problem"],
            "shape": shape_text(c["shape"]),
            "T": c["steps"],
            "seeds": c["seeds"],
            "lr": c["lr"],
            "β": Mark(c["momentum"], text=f"{c['momentum']:.4f}"),
            "mean |grad|_F": c["mean"],
            "mean dual norm": c["dual_mean"],
            "bound": c["bound"],
            "dual / bound": Mark(x := c["dual_mean"] / c["bound"], text=f"{x:.3f}"),
            "under": verdict(max(c["mean"], c["dual_mean"]) <= c["bound"]),
            "direction's gap": Mark(c["direction_gap"], text=f"{c['direction_gap']:.0e}"),
        }
        for c in [*data["cells"], *data.get("rank_cells", [])]
    ]
    note = (
        "Directions are solved for up to T = 100; for longer runs one warm-started dual step each, "
        "with the mean gap δ in the last column, weighted by the gradient: so weighted, it raises "
        "the theorem's bound by 1/(1 - δ) at most."
    )
    return Table("cells", "Every cell of the guarantee", rows, note)


def slopes(data: Data) -> Table:
    rows = []
    for s in data["slopes"]:
        own = [c for c in data["cells"] if (c["problem"], c["shape"]) == (s["problem"], s["shape"])]
        row: Row = {"problem": s["problem"], "shape": shape_text(s["shape"])}
        for c in own:
            row[f"T = {c['steps']:,}"] = Mark(
                c["mean"], text=f"{c['mean']:.3f} of {c['bound']:.2f}"
            )
        rows.append({**row, "exponent": Mark(s["slope"], text=f"{s['slope']:.3f}")})
    note = (
        "The mean of |grad|_F over a run and the bound for it. The exponent is fitted to the last "
        "three; -1/4 means that an ε-stationary point takes ε^-4 steps."
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
                f"{key.replace('_', ' ')} seen": Mark(value, text=f"{value:.3f}")
                for key, value in a["measured"].items()
            },
        }
        for a in data["assumptions"]
    ]  # fmt: skip
    note = (
        "The worst that was found, relative to what the constants allow: at most 1 means that no "
        "violation was seen. Gaussian noise meets σ with equality, up to its sampling."
    )
    return Table("assumptions", "The theorem's assumptions, looked for a violation", rows, note)


def regimes(data: Data) -> Table:
    rows = [
        {
            "line": line["name"],
            "late angle (rad)": (late := line["late"])["angle"],
            "predicted": late["angle_predicted"],
            "ratio": Mark(r := late["angle"] / late["angle_predicted"], text=f"{r:.3f}"),
            "late norm": late["norm"],
            "predicted norm": late["norm_predicted"],
            "ratio of norms": Mark(r := late["norm"] / late["norm_predicted"], text=f"{r:.3f}"),
        }
        for line in data["lines"]
    ]
    note = (
        f"Means over the second half of {data['steps']:,} steps. Momentum 0.95 makes squared norms "
        f"grow {data['memory']:.1f} times as fast, by its weights alone."
    )
    return Table("regimes-late", "The angle late in training, and the norm behind it", rows, note)


def momentum(data: Data) -> Table:
    """For every problem: the best loss over the step sizes, and what transport changes."""
    runs = data["momentum"]["runs"]
    rows = []
    for problem in dict.fromkeys(run["problem"] for run in runs):
        own = [run for run in runs if run["problem"] == problem]
        best = {}
        for run in own:
            known = best.get(run["variant"])
            best[run["variant"]] = run if known is None or run["loss"] < known["loss"] else known
        paper, carried = best["as in the paper"], best["momentum transported"]
        gain = carried["loss"] < paper["loss"] - paper["spread"]
        rows.append(
            {
                "problem": problem,
                **{f"best loss, {name}": run["loss"] for name, run in best.items()},
                "transported: change": Mark(
                    change := carried["loss"] / paper["loss"] - 1, text=f"{change:+.1%}"
                ),
                "seeds differ by": Mark(
                    spread := paper["spread"] / paper["loss"], text=f"{spread:.0%}"
                ),
                "gain": Mark(gain, text="yes" if gain else "no"),
                "momentum along U": Mark(
                    paper["radial_share"], text=f"{paper['radial_share']:.2f}"
                ),
            }
        )
    note = (
        "At the best step size of each. The last column is the mean share of a row's momentum that "
        "points along the row when nothing carries it."
    )
    return Table("momentum", "What carrying the momentum is worth", rows, note)


def shortcut(data: Data) -> Table:
    rows = []
    for kind in sorted({kind_of(row["matrix"]) for row in data["rows"]}):
        own = [r for r in data["rows"] if kind_of(r["matrix"]) == kind]
        row: Row = {"matrix": kind, "shape": shape_text(own[0]["shape"])}
        for key, title, form in (
            ("dual_gap", "dual gap", "{:.1%}"),
            ("angle", "angle", "{:.0f}°"),
            ("norm", "norm of the tangent part", "{:.2f}"),
            ("lost", "descent lost at norm 1", "{:.0%}"),
            ("radial_share", "momentum along U", "{:.2f}"),
        ):
            middle = median(r[key] for r in own)
            row[title] = Mark(middle, text=form.format(middle))
        for title, values in (
            ("... after 1 dual step", [r["lost_after"][0] for r in own]),
            ("... after 1 warm one", [r["lost_warm"] for r in own]),
            (f"... after {data['inner_steps'][-1]}", [r["lost_after"][-1] for r in own]),
        ):
            row[title] = Mark(middle := median(values), text=f"{middle:.1%}")
        rows.append(row)
    worst = max(r["solver_gap"] for r in data["rows"])
    note = (
        "Medians over layers and looks. The shortcut's tangent part has an operator norm above 1: "
        "its steps are longer than the theorem allows, and at norm 1 they descend less. A warm "
        "dual step starts from the multiplier of the training step before. The exact directions "
        f"are solved to a gap of {worst:.0e}."
    )
    return Table("shortcut-kinds", "The shortcut against the exact direction", rows, note)


def made(found: dict[str, Data]) -> Table:
    rows = [
        {"part": part, "command": d["command"], "torch": d["torch"], "CPU seconds": d["seconds"]}
        for part, d in found.items()
    ]
    return Table("made", "How this page was made", rows)
