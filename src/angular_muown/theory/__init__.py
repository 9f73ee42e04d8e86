"""The paper's theory as code: Algorithm 2, its direction, its convergence theorem.

`angular-lab theory` runs the measurements; docs/explanation/theory.md reports the results.
"""

from angular_muown.theory.convergence import (
    Alignment,
    Constants,
    Measured,
    Neurons,
    Parameters,
    Problem,
    Regression,
    bound,
    check_assumptions,
    parameters,
    terms,
)
from angular_muown.theory.idealized import IdealizedAngularMuown
from angular_muown.theory.manifold import exponential, project, radial, retract, transport
from angular_muown.theory.polar_solver import (
    TangentPolar,
    dual_steps,
    feasible,
    solver_path,
    tangent_polar,
)

__all__ = [
    "Alignment",
    "Constants",
    "IdealizedAngularMuown",
    "Measured",
    "Neurons",
    "Parameters",
    "Problem",
    "Regression",
    "TangentPolar",
    "bound",
    "check_assumptions",
    "dual_steps",
    "exponential",
    "feasible",
    "parameters",
    "project",
    "radial",
    "retract",
    "solver_path",
    "tangent_polar",
    "terms",
    "transport",
]
