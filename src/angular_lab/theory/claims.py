"""The claims about the theory, each with its check and the section of the docs it belongs to."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

from angular_lab.report.tables import Mark, Table
from angular_lab.theory.tables import Data, transport, verdict

SLACK = 0.05  # of predictions that hold only on average
NOISE_SLACK = 0.03  # Gaussian noise meets its bound with equality, up to its sampling


class Finding(NamedTuple):
    measured: str
    holds: bool | None  # None: a measurement without a prediction


@dataclass(frozen=True)
class Claim:
    text: str
    source: str  # the section of docs/explanation/theory.md or derivation.md about it
    check: Callable[[Data], Finding]


def claims_table(results: dict[str, Data]) -> Table:
    """Check every claim about the parts that were measured."""
    rows = []
    for part in results:
        for claim in CLAIMS[part]:
            measured, holds = claim.check(results[part])
            mark = Mark("measured", "inconclusive") if holds is None else verdict(holds)
            row = {"claim": claim.text, "measured": measured, "verdict": mark}
            rows.append({**row, "section": claim.source})
    note = "Sections are those of docs/explanation/theory.md and derivation.md."
    return Table("claims", "Claims and measurements", rows, note)


def steps_within(
    limit: int, key: str, accuracy: float, data: Data, *, rectangular: bool = False
) -> Finding:
    """Compare the steps to an accuracy with a limit; None is an accuracy that was not reached."""
    cells = [c for c in data["cells"] if not rectangular or c["shape"][0] != c["shape"][1]]
    steps = [cell[key][data["accuracies"].index(accuracy)] for cell in cells]
    reached = [k for k in steps if k is not None]
    measured = f"{min(reached)} to {max(reached)} steps" if reached else "never reached"
    if len(reached) < len(steps):
        return Finding(f"{measured}, in {len(reached)} of {len(steps)} cells", False)
    return Finding(measured, max(reached) <= limit)


def feasible(data: Data) -> Finding:
    tangency, norm = (max(c[key] for c in data["cells"]) for key in ("tangency", "norm_excess"))
    return Finding(f"{tangency:.0e} and {norm:.0e}", tangency <= 1e-10 and norm <= 1e-10)


def assumptions_hold(data: Data) -> Finding:
    worst = max(max(row["measured"].values()) for row in data["assumptions"])
    measured = f"the largest value is {worst:.3f} of the claimed constant"
    return Finding(measured, worst <= 1 + NOISE_SLACK)


def below_bound(key: str, data: Data) -> Finding:
    ratios = [cell[key] / cell["bound"] for cell in data["cells"] + data["rank_cells"]]
    measured = f"{len(ratios)} cells, at {min(ratios):.3f} to {max(ratios):.3f} of the bound"
    return Finding(measured, max(ratios) <= 1)


def falls_as_predicted(problem: str, data: Data) -> Finding:
    slopes = [row["slope"] for row in data["slopes"] if row["problem"] == problem]
    listed = ", ".join(f"{slope:.3f}" for slope in slopes)
    return Finding(f"exponents {listed}", max(abs(slope + 0.25) for slope in slopes) <= 0.05)


def rank_exponent(data: Data) -> Finding:
    frobenius, dual = (data["rank_exponents"][key] for key in ("mean", "dual_mean"))
    measured = f"exponent {dual:.2f}; that of the Frobenius norm is {frobenius:.2f}"
    return Finding(measured, dual <= 0.25)


def regime_predicted(name: str, data: Data) -> Finding:
    late = next(regime["late"] for regime in data["lines"] if regime["name"] == name)
    error = max(abs(late[key] / late[f"{key}_predicted"] - 1) for key in ("angle", "norm"))
    measured = (
        f"{late['angle']:.4g} rad, predicted {late['angle_predicted']:.4g}; "
        f"norm {late['norm']:.3g}, predicted {late['norm_predicted']:.3g}"
    )
    return Finding(measured, error <= SLACK)


def angle_formula(data: Data) -> Finding:
    error = data["angle_error"]
    return Finding(f"within {error:.0e} degrees", error < 1e-9)


def transport_gains(problem: str, data: Data) -> Finding:
    t = transport(data, problem)
    return Finding(f"{t.change:+.1%}, seeds differ by {t.spread:.0%}", t.gains)


def distribution(key: str, form: str, data: Data) -> Finding:
    """Describe a column over all matrices and sampled steps but the first step."""
    values = [row[key] for row in data["rows"] if row["step"] > 1]
    middle, low, high = (form.format(x) for x in (median(values), min(values), max(values)))
    return Finding(f"median {middle}, from {low} to {high}", None)


DIRECTION, GUARANTEE, SHORTCUT = "The direction", "The guarantee", "The shortcut"
CLAIMS = {  # by the part whose results the checks read
    "solver": [
        Claim("The solver's gap is at most 1e-6 within 50 steps", DIRECTION,
              partial(steps_within, 50, "steps_gap", 1e-6)),
        Claim("Rectangular: the dual value is within 1e-3 after 3 steps", DIRECTION,
              partial(steps_within, 3, "steps_dual", 1e-3, rectangular=True)),
        Claim("Rectangular: the proven gap is 1e-3 after 3 steps", DIRECTION,
              partial(steps_within, 3, "steps_gap", 1e-3, rectangular=True)),
        Claim("The direction is tangent, and its norm at most 1, to 1e-10", DIRECTION, feasible),
    ],
    "guarantee": [
        Claim("The problems satisfy the theorem's assumptions", GUARANTEE, assumptions_hold),
        Claim("The mean gradient is below the theorem's bound in every cell", GUARANTEE,
              partial(below_bound, "mean")),
        Claim("So is its dual norm, which the proof bounds", GUARANTEE,
              partial(below_bound, "dual_mean")),
        *(Claim(f"{problem.capitalize()}: the mean falls as T^(-1/4), within 0.05", GUARANTEE,
                partial(falls_as_predicted, problem))
          for problem in ("alignment", "regression", "neurons")),
        Claim("At fixed L and σ the mean dual norm grows no faster than min(m, n)^(1/4)",
              GUARANTEE, rank_exponent),
    ],
    "regimes": [
        Claim(f"{name}: late angle and norm match the closed forms within {SLACK:.0%}",
              "The regimes, simulated", partial(regime_predicted, name))
        for name in ("weight decay", "weight decay, momentum", "Muown", "Muown, momentum",
                     "AngularMuown, momentum")
    ],
    "geometry": [
        Claim("The angle formula holds at every step size", "The angle of a step", angle_formula),
        *(Claim(f"Transporting the momentum lowers the best loss ({problem})",
                "The geometry of a step", partial(transport_gains, problem))
          for problem in ("regression", "neurons")),
    ],
    "shortcut": [
        Claim("Dual gap of the shortcut", SHORTCUT, partial(distribution, "dual_gap", "{:.1%}")),
        Claim("Angle between the shortcut and the exact direction", SHORTCUT,
              partial(distribution, "angle", "{:.0f}°")),
        Claim("Descent that the shortcut loses at equal operator norm", SHORTCUT,
              partial(distribution, "lost", "{:.0%}")),
    ],
}  # fmt: skip
