"""The theory of the paper, executable: Algorithm 2, its direction, its theorem.

`angular-lab theory` measures with it; docs/theory.md tells what came out.
"""

from angular_muown.theory.assumptions import Measured, check_assumptions
from angular_muown.theory.idealized import IdealizedAngularMuown
from angular_muown.theory.inner_steps import dual_steps
from angular_muown.theory.manifold import exponential, project, radial, retract, transport
from angular_muown.theory.problems import Alignment, Neurons, Problem, Regression
from angular_muown.theory.tangent import TangentPolar, feasible, solver_path, tangent_polar
from angular_muown.theory.theorem import Constants, Parameters, bound, parameters, terms

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
