"""The claims, what was measured for each, and whether it holds."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from angular_lab.report.tables import Mark, Row, Table
from angular_lab.theory.tables import momentum, verdict

Data = dict[str, Any]
SLACK = 0.05  # of predictions that hold on average only


def claim(text: str, measured: str, holds: bool) -> Row:
    return {"claim": text, "measured": measured, "verdict": verdict(holds)}


def claims(found: dict[str, Data]) -> Table:
    makers = {
        "solver": _solver_claims,
        "guarantee": _guarantee_claims,
        "regimes": _regime_claims,
        "geometry": _geometry_claims,
    }
    rows = [row for part, make in makers.items() if part in found for row in make(found[part])]
    if "shortcut" in found:
        rows += _shortcut_numbers(found["shortcut"])
    return Table("claims", "What was claimed and what was seen", rows)


def _solver_claims(data: Data) -> list[Row]:
    cells = data["cells"]
    rectangular = [c for c in cells if c["shape"][0] != c["shape"][1]]
    sharp = [c["steps_gap"][1] for c in cells]
    dual = [c["steps_dual"][0] for c in rectangular]
    gap = [c["steps_gap"][0] for c in rectangular]
    tangency, norm = (max(c[key] for c in cells) for key in ("tangency", "norm_excess"))
    return [
        claim("The solver's gap is at most 1e-6 within 50 steps",
              f"{_range(sharp)} steps", all(k is not None and k <= 50 for k in sharp)),
        claim("Rectangular: the dual value is within 1e-3 after 3 steps",
              f"{_range(dual)} steps", all(k is not None and k <= 3 for k in dual)),
        claim("Rectangular: the proven gap is 1e-3 after 3 steps",
              f"{_range(gap)} steps", all(k is not None and k <= 3 for k in gap)),
        claim("The direction is tangent, and its norm at most 1, to 1e-10",
              f"{tangency:.0e} and {norm:.0e}", tangency <= 1e-10 and norm <= 1e-10),
    ]  # fmt: skip


def _guarantee_claims(data: Data) -> list[Row]:
    every = [*data["cells"], *data.get("rank_cells", [])]
    ratios = [c["mean"] / c["bound"] for c in every]
    duals = [c["dual_mean"] / c["bound"] for c in every]
    # The Gaussian noise meets its bound with equality: 3% are its sampling.
    worst = max(max(a["measured"].values()) for a in data["assumptions"])
    rows = [
        claim("The problems keep the theorem's assumptions",
              f"the worst constant found is {worst:.3f} of the claimed one", worst <= 1.03),
        claim("The mean gradient is under the theorem's bound in every cell",
              f"{len(every)} cells, at {min(ratios):.3f} to {max(ratios):.3f} of the bound",
              max(ratios) <= 1),
        claim("So is its dual norm, which the proof is about",
              f"at {min(duals):.3f} to {max(duals):.3f} of the bound", max(duals) <= 1),
    ]  # fmt: skip
    for problem in dict.fromkeys(s["problem"] for s in data["slopes"]):
        slopes = [s["slope"] for s in data["slopes"] if s["problem"] == problem]
        near = all(abs(s + 0.25) <= 0.05 for s in slopes)
        rows.append(claim(f"{problem.capitalize()}: the mean falls as T^(-1/4), within 0.05",
                          f"exponents {_numbers(slopes)}", near))  # fmt: skip
    if "rank_exponents" in data:
        own, dual = (data["rank_exponents"][key] for key in ("mean", "dual_mean"))
        text = "At fixed L and σ the dual norm's mean grows no faster than min(m, n)^(1/4)"
        measured = f"exponent {dual:.2f}; that of the Frobenius norm is {own:.2f}"
        rows.append(claim(text, measured, dual <= 0.25))
    return rows


def _regime_claims(data: Data) -> list[Row]:
    rows = []
    for line in data["lines"]:
        late = line["late"]
        off = max(abs(late[key] / late[f"{key}_predicted"] - 1) for key in ("angle", "norm"))
        measured = (
            f"{late['angle']:.4g} rad, predicted {late['angle_predicted']:.4g}; "
            f"norm {late['norm']:.3g}, predicted {late['norm_predicted']:.3g}"
        )
        text = f"{line['name']}: late angle and norm are the closed forms', within {SLACK:.0%}"
        rows.append(claim(text, measured, off <= SLACK))
    return rows


def _geometry_claims(data: Data) -> list[Row]:
    worst = data["angle_error"]
    text = "The angle formula holds at every step size"
    rows = [claim(text, f"within {worst:.0e} degrees", worst < 1e-9)]
    for row in momentum(data).rows:
        change = row["transported: change"]
        text = f"Transporting the momentum lowers the best loss ({row['problem']})"
        rows.append(claim(text, f"{change}, seeds differ by {row['seeds differ by']}",
                          row["gain"].value))  # fmt: skip
    return rows


def _shortcut_numbers(data: Data) -> list[Row]:
    later = [row for row in data["rows"] if row["step"] > 1]
    rows = []
    for key, text, form in (
        ("dual_gap", "The shortcut's dual gap", "{:.1%}"),
        ("angle", "The shortcut's angle to the exact direction", "{:.0f}°"),
        ("lost", "Descent it misses at equal operator norm", "{:.0%}"),
    ):
        values = sorted(row[key] for row in later)
        measured = [form.format(x) for x in (median(values), values[0], values[-1])]
        rows.append({"claim": text, "measured": "median {}, from {} to {}".format(*measured),
                     "verdict": Mark("measured", "inconclusive")})  # fmt: skip
    return rows


def _range(steps: Sequence[int | None]) -> str:
    known = [k for k in steps if k is not None]
    missed = len(steps) - len(known)
    text = f"{min(known)} to {max(known)}" if known else "no"
    return text + (f", {missed} not reached in" if missed else "")


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)
