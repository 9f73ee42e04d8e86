"""Context: what a stage may use besides the tensors it is called with."""

from dataclasses import dataclass

from torch import Tensor

from angular_muown.stages.reductions import LOCAL, Reductions

State = dict[str, Tensor]


@dataclass(frozen=True)
class Context:
    """One step of one stack of matrices.

    A stage replaces entries of `state`; the step writes them back to the parameters at its end.
    """

    state: State  # the vectors that stages keep between steps, by name
    reductions: Reductions = LOCAL
    lr: float | Tensor = 0.0
    radius_lr: float | Tensor = 0.0
    t: float | Tensor = 1.0  # the number of this step, from 1, for bias corrections
