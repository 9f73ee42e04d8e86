"""The family: equations, defaults and recipes. There is no step() here.

Shared letters: W weight (m x n), G gradient, M momentum, Q polar factor, eta = lr, s = s(m, n),
g row lengths, U unit rows, r_i = <G_i, U_i>. X = G' + beta M is the Nesterov look-ahead of the
gradient G' that a member feeds into M <- beta M + G'.

Arguments that all members share:
    params: parameters, (name, parameter) pairs, or groups such as `plan(model)` makes.
    lr: learning rate eta, a float or a one-element tensor; schedulers act on it.
    momentum, nesterov: beta, and whether the look-ahead is used.
    betas, eps: Adam's, for row lengths and gains and for groups with algorithm="adamw".
    scale: "fan_ratio" sqrt(max(1, m/n)), "adam_rms" 0.2 sqrt(max(m, n)), "rms",
        "aspect" sqrt(max(m/n, n/m)) or "none".
    orthogonalize: "polar_express", "newton_schulz", "gram" or "svd".
    weight_decay: decoupled, W <- (1 - lr * weight_decay) W.
    maximize: ascend.
    state_dtype: dtype of the momentum; None is float32 (float64 for float64 weights).
    write_back: for 16-bit weights, "stochastic" rounding or a float32 "master" copy.
    capturable: keep lr and counters on the device, so that a step can be recorded in a CUDA graph.
    workspace: what a step may take beside parameters, gradients and state, as a fraction of the
        matrices' size: the kernels' work buffer, the eager step's copies (of at least 2^24 elements
        at a time, however small the fraction), matrices that are on their way between ranks.
    average: keep an average of the last weights in the state, for `with optimizer.averaged():`. A
        share of the steps (0.1: about the last tenth) or a number of them, as `averaging` says;
        None keeps none. 4 bytes per parameter; no weight changes
        by it.
    process_group: ranks that hold copies of plain parameters (DDP) and share the work; None is the
        default group (on a GPU: every rank by itself), False is every rank by itself. Parameters
        that are DTensors (FSDP2, tensor parallel) bring their ranks along.
    wire_dtype: dtype of matrices between ranks; None is what the polar factor is computed in (bf16
        for iterations on a GPU, otherwise float32 or float64).
Arguments of the members with row lengths:
    radius: "adam", "log_adam" (multiplicative) or "fixed".
    radius_lr: the row lengths' learning rate at the initial lr; follows lr's schedule. None: lr.
"""

from typing import Any

import torch
from torch import Tensor

from angular_muown.engine import Engine
from angular_muown.params.options import Group, arguments
from angular_muown.schedules import angle_degrees, inverse_polynomial
from angular_muown.stages.charts import Flat, GainedSphere, Oblique, Sphere, WeightNorm
from angular_muown.stages.normalize import UnitNorm
from angular_muown.stages.radius import Gains
from angular_muown.stages.scale import none
from angular_muown.stages.tangent import TANGENT, Constrained, Free
from angular_muown.update import Recipe, normalize_of, polar_of, radius_of, scale_of


class AngularMuown(Engine):
    """W = Diag(g) U with unit rows; an angle of about lr * kappa per step.

        T = g (G - r U)                                       tangent gradient
        M = beta M + T;  Q = polar(T + beta M)
        U <- rownormalize(U - lr kappa_t s Q)                 Muon turns the rows
        g <- Adam(g, r; lr)                                   Adam moves their lengths
        kappa_t = (1 + decay_scale (t - warmup_steps)_+)^(-decay_degree)

    Args (the shared ones are in this module's docstring):
        warmup_steps: steps at kappa = 1; use the warm-up of your learning-rate schedule.
        decay_scale, decay_degree: c and p of kappa; degree 0 keeps kappa = 1 (for a schedule of
            lr that falls all the way, such as cosine).
        orthogonalize: "tangent" as well, towards the polar factor with <Q_i, U_i> = 0 (the paper's
            Algorithm 2): tangent_steps dual steps from the multiplier of the step before, each at
            the cost of one more polar factor (by Polar Express).

    Paper: Huebler, Lion, Orvieto, He: Muown Implicitly Performs Angular Step-size Decay, 2026.
    """

    family = "AngularMuown"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        warmup_steps: int = 0,
        decay_scale: float = 1e-3,
        decay_degree: float = 1.0,
        tangent_steps: int = 1,
        scale: str = "fan_ratio",
        orthogonalize: str = "polar_express",
        radius: str = "adam",
        radius_lr: float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_dtype: str | torch.dtype | None = None,
        write_back: str = "stochastic",
        capturable: bool = False,
        workspace: float = 0.25,
        average: float | None = None,
        process_group: Any = None,
        wire_dtype: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def kappa(self, group: Group) -> Any:
        """The angular multiplier of the group's next step; a tensor where the step is one."""
        return inverse_polynomial(
            group["step"], group["warmup_steps"], group["decay_scale"], group["decay_degree"]
        )

    def angle(self, group: Group) -> float:
        """Degrees that the next step turns a typical row by (with the fan_ratio scale)."""
        return angle_degrees(float(group["lr"]), float(self.kappa(group)))

    def recipe(self, group: Group) -> Recipe:
        constrained = group["orthogonalize"] == TANGENT
        return Recipe(
            Oblique(),
            polar_of(group),
            scale_of(group),
            radius=radius_of(group),
            kappa=self.kappa(group),
            tangent=Constrained(group["tangent_steps"]) if constrained else Free(),
        )


class Muown(Engine):
    """Weight normalisation inside: W = Diag(g / rho) R, rho_i = |R_i|, U = R / rho.

        T = (g / rho)(G - r U)
        M = beta M + T;  Q = polar(T + beta M)
        R <- R - lr s Q                           the angle falls as rho grows
        g <- Adam(g, r; lr)

    Paper: Lion et al.: Muown, 2026; the gradient is that of its published code.
    """

    family = "Muown"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 4e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        scale: str = "adam_rms",
        orthogonalize: str = "newton_schulz",
        radius: str = "adam",
        radius_lr: float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_dtype: str | torch.dtype | None = None,
        write_back: str = "stochastic",
        capturable: bool = False,
        workspace: float = 0.25,
        average: float | None = None,
        process_group: Any = None,
        wire_dtype: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def recipe(self, group: Group) -> Recipe:
        return Recipe(WeightNorm(), polar_of(group), scale_of(group), radius=radius_of(group))


class NorMuown(Engine):
    """Muown with NorMuon's row normalisation of Q: R <- R - lr s rownorm(Q). See both."""

    family = "NorMuown"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 4e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        row_beta: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        scale: str = "adam_rms",
        orthogonalize: str = "newton_schulz",
        radius: str = "adam",
        radius_lr: float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_dtype: str | torch.dtype | None = None,
        write_back: str = "stochastic",
        capturable: bool = False,
        workspace: float = 0.25,
        average: float | None = None,
        process_group: Any = None,
        wire_dtype: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def recipe(self, group: Group) -> Recipe:
        stages = (polar_of(group), scale_of(group), normalize_of(group), radius_of(group))
        return Recipe(WeightNorm(), *stages)


# The family's members without row lengths. Arguments are explained in optimizers.py.


class Muon(Engine):
    """The weight itself, no radii.

        M = beta M + G;  Q = polar(G + beta M)
        W <- (1 - lr weight_decay) W - lr s Q

    scale="fan_ratio" is Keller Jordan's rule, "adam_rms" Moonlight's (arXiv 2502.16982).
    """

    family = "Muon"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        scale: str = "fan_ratio",
        orthogonalize: str = "newton_schulz",
        weight_decay: float = 0.1,
        maximize: bool = False,
        state_dtype: str | torch.dtype | None = None,
        write_back: str = "stochastic",
        capturable: bool = False,
        workspace: float = 0.25,
        average: float | None = None,
        process_group: Any = None,
        wire_dtype: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def recipe(self, group: Group) -> Recipe:
        return Recipe(Flat(), polar_of(group), scale_of(group))


class NorMuon(Engine):
    """Muon with rows of Q normalised by their second moment.

        v = row_beta v + (1 - row_beta) mean(Q_i^2)
        Q <- Q / sqrt(v), then back to the Frobenius norm that Q had
        W <- (1 - lr weight_decay) W - lr s Q

    Paper: Li et al.: NorMuon, arXiv 2510.05491.
    """

    family = "NorMuon"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 4e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        row_beta: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        scale: str = "fan_ratio",
        orthogonalize: str = "newton_schulz",
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_dtype: str | torch.dtype | None = None,
        write_back: str = "stochastic",
        capturable: bool = False,
        workspace: float = 0.25,
        average: float | None = None,
        process_group: Any = None,
        wire_dtype: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def recipe(self, group: Group) -> Recipe:
        return Recipe(Flat(), polar_of(group), scale_of(group), normalize_of(group))


# Rivals that came out beside the paper, each one more chart; `optimizers` explains the letters and
# the arguments that all members share.
#
# Here a matrix keeps one Frobenius norm g: what it has when it is first seen, or when it was
# changed from outside. A matrix of zeros has none to keep: it grows, as under Muon, until its norm
# is sqrt(m), that of unit rows. weight_decay shrinks g; both papers do without.


class Hyperball(Engine):
    """Muon on a sphere, also called MuonH: |W|_F = g for ever, and no size learns.

        M = beta M + G;  Q = polar(G + beta M)
        W <- g unit(W - lr g unit(Q)),            unit(X) = X / |X|_F

    lr is the size of a step relative to W, whatever the shape, so there is no scale.

    Paper: Wen, Dang, Lyu, Ma, Liang: Fantastic Pretraining Optimizers and Where to Find Them II:
    Hyperball Optimization, arXiv 2606.16899.
    """

    family = "Hyperball"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        orthogonalize: str = "newton_schulz",
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_dtype: str | torch.dtype | None = None,
        write_back: str = "stochastic",
        capturable: bool = False,
        workspace: float = 0.25,
        average: float | None = None,
        process_group: Any = None,
        wire_dtype: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def recipe(self, group: Group) -> Recipe:
        return Recipe(Sphere(), polar_of(group), none, UnitNorm())


class MagnitudeDirection(Engine):
    """A direction on a sphere between gains: W = Diag(a) V Diag(b), |V|_F = g, a and b positive.

        T = Diag(a) G Diag(b)                                 the plain chain rule, not projected
        M = beta M + T;  Q = polar(T + beta M)
        V <- g unit(V - lr s (g / sqrt(max(m, n))) Q)
        x <- Adam(x; radius_lr),  a = softplus(x);  b likewise

    The gains start at 1. With the scale "aspect" a step has the relative size lr, as on the
    paper's sphere of radius sqrt(max(m, n)); here a matrix keeps the norm that it starts with.

    Args (the shared ones are in the docstring of `optimizers`):
        radius_lr: learning rate of x at the initial lr; follows lr's schedule. None: lr.

    Paper: Haegele, Hernandez-Cano, Kosson, Jaggi: Improving Neural Network Training by Decoupling
    the Magnitude and Direction of Weight Vectors, arXiv 2606.25971.
    """

    family = "MagnitudeDirection"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        scale: str = "aspect",
        orthogonalize: str = "newton_schulz",
        radius_lr: float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_dtype: str | torch.dtype | None = None,
        write_back: str = "stochastic",
        capturable: bool = False,
        workspace: float = 0.25,
        average: float | None = None,
        process_group: Any = None,
        wire_dtype: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def recipe(self, group: Group) -> Recipe:
        gains = Gains(group["betas"], group["eps"])
        return Recipe(GainedSphere(), polar_of(group), scale_of(group), radius=gains)
