"""The family: equations, defaults and recipes. There is no step() here.

Letters in the equations: W weight (m x n), G its gradient, M momentum with decay beta, Q polar
factor, s = s(m, n) the scale of a shape; g row lengths, U unit rows, r_i = <G_i, U_i>.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from typing import Any, Unpack

from torch import Tensor, nn

from angular_muown.docstrings import documented
from angular_muown.engine import Engine
from angular_muown.params.options import COMMON_DEFAULTS, CommonOptions, Group
from angular_muown.params.plan import PLAN_ARGUMENTS
from angular_muown.schedules import DoubleDecay, angle_degrees, inverse_polynomial
from angular_muown.stages.charts import Flat, GainedSphere, Oblique, Sphere, WeightNorm
from angular_muown.stages.normalize import UnitNorm
from angular_muown.stages.radius import Gains
from angular_muown.stages.scale import none
from angular_muown.stages.tangent import TANGENT, Constrained, Free
from angular_muown.update import Recipe, normalize_of, polar_of, radius_of, scale_of
from angular_muown.warn import warn

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


# AngularMuown's lr is an angle in radians; runs here and in the paper have 0.002 to 0.08.
LEAST_USUAL_LR = 5e-4


def _defaults(member: Engine, options: CommonOptions, **own: Any) -> dict[str, Any]:
    """Merge a member's own values with the shared options; refuse names that are neither."""
    for name in options:
        if name not in COMMON_DEFAULTS:
            close = get_close_matches(name, [*own, *COMMON_DEFAULTS, *PLAN_ARGUMENTS], n=1)
            close = ["lr"] if name == "learning_rate" else close
            raise TypeError(
                f"{type(member).__name__}() got an unexpected keyword argument {name!r}"
                + "".join(f"; did you mean {one!r}?" for one in close)
            )
    return {**own, **options}


@documented
class AngularMuown(Engine):
    """Muon on unit rows, with an explicit angle: each step turns rows by about lr kappa_t.

        W = Diag(g) U,  U with unit rows
        T = g (G - r U)                                       tangent gradient
        M = beta M + T;  Q = polar(T + beta M)
        U <- rownormalize(U - lr kappa_t s Q)                 Muon turns the rows
        g <- Adam(g, r; lr)                                   Adam moves their lengths
        kappa_t = (1 + decay_scale (t - warmup_steps)_+)^(-decay_degree)

    Example:
        >>> optimizer = AngularMuown.for_model(model, lr=0.02)
        >>> scheduler = wsd_schedule(optimizer, total_steps=10_000)
        >>> loss.backward()
        >>> optimizer.step()
        >>> scheduler.step()

    Args:
        lr: the angle of a step at kappa = 1, in radians (with the "fan_ratio" scale); a float or a
            one-element tensor, for torch's schedulers to change.
        warmup_steps: steps at kappa = 1, an integer; use the warm-up of the lr schedule.
        decay_scale: c in kappa, per step: after 1/c steps kappa is 2^(-decay_degree).
        decay_degree: exponent of kappa; 0 keeps kappa = 1, for an lr schedule that decays to zero
            over the whole run.
        tangent_steps: dual steps of orthogonalize="tangent"; each costs one more polar factor.
        orthogonalize: "polar_express", "newton_schulz", "gram" (Polar Express, in its Gram form
            above an aspect ratio of 2), "svd", or "tangent": towards the polar factor with
            <Q_i, U_i> = 0 (the paper's Algorithm 2), from the last step's multiplier.

    Paper: Huebler, Lion, Orvieto, He: Muown Implicitly Performs Angular Step-size Decay, 2026.
    """

    family = "AngularMuown"
    _double_decay: DoubleDecay | None = None  # made at the first step, never saved

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        warmup_steps: int = 0,
        decay_scale: float = 1e-3,
        decay_degree: float = 1.0,
        tangent_steps: int = 1,
        scale: str = "fan_ratio",
        orthogonalize: str = "polar_express",
        radius: str = "adam",
        radius_lr: float | None = None,
        weight_decay: float = 0.0,
        **options: Unpack[CommonOptions],
    ) -> None:
        values = _defaults(
            self,
            options,
            lr=lr,
            warmup_steps=warmup_steps,
            decay_scale=decay_scale,
            decay_degree=decay_degree,
            tangent_steps=tangent_steps,
            scale=scale,
            orthogonalize=orthogonalize,
            radius=radius,
            radius_lr=radius_lr,
            weight_decay=weight_decay,
        )
        super().__init__(params, values)

    def _check_learning_rate(self) -> None:
        """Warn if lr is one of AdamW's, which hardly turns the rows."""
        lr = self.defaults["lr"]
        if isinstance(lr, Tensor) or self.defaults["scale"] != "fan_ratio":
            return
        if 0 < lr < LEAST_USUAL_LR:
            warn(
                f"lr={lr:g} turns a row by {angle_degrees(lr, 1.0):.2g} degrees per step, which is "
                "far less than usual: AdamW's learning rates do not apply to the matrices; start "
                "at 0.02, and pass yours as aux_lr if the weights come from a checkpoint"
            )

    def kappa(self, group: Group) -> float | Tensor:
        """Return the angular multiplier of the next step of a group.

        It is a tensor if the group's step is one (capturable=True).

        Args:
            group: a dict of `param_groups`.
        """
        return inverse_polynomial(
            group["step"], group["warmup_steps"], group["decay_scale"], group["decay_degree"]
        )

    def angle(self, group: Group) -> float:
        """Return the degrees by which the next step turns a typical row of a group.

        This holds for the "fan_ratio" scale.

        Args:
            group: a dict of `param_groups`.
        """
        return angle_degrees(float(group["lr"]), float(self.kappa(group)))

    def _check_schedule(self) -> None:
        """Warn once if lr falls over most of the run while kappa falls, too."""
        groups = [g for g in self.param_groups if g["algorithm"] == "matrix" and g["decay_degree"]]
        # base_lr may be missing where radius_lr does not need it
        group = max(groups, key=lambda g: float(g.get("base_lr", 0.0)), default=None)
        if group is None or isinstance(group["step"], Tensor) or isinstance(group["lr"], Tensor):
            return  # reading a tensor would wait for the device
        if self._double_decay is None:
            self._double_decay = DoubleDecay()
        step = group["step"] - 1
        kappa = partial(
            inverse_polynomial,
            *(step, group["warmup_steps"], group["decay_scale"], group["decay_degree"]),
        )
        if self._double_decay.notice(group["lr"], group.get("base_lr", 0.0), step, kappa):
            warn(
                f"lr has fallen to {group['lr']:.3g} over most of the run while kappa fell to "
                f"{kappa():.3g}, so the angle of a step decays twice. Use wsd_schedule, which "
                "keeps lr constant before its cooldown, or switch kappa off by decay_degree=0, as "
                "cosine_schedule and linear_schedule do, or tune lr for both: it has to be higher"
            )

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


@documented
class Muown(Engine):
    """Muon with weight normalization inside: the angle of a step falls as rho grows.

        W = Diag(g / rho) R,  rho_i = |R_i|,  U = R / rho
        T = (g / rho)(G - r U)
        M = beta M + T;  Q = polar(T + beta M)
        R <- R - lr s Q
        g <- Adam(g, r; lr)

    Example:
        >>> optimizer = Muown.for_model(model, lr=4e-3)

    Args:
        lr: length of a step of R in units of s Q; a float or a one-element tensor.

    Paper: Lion et al.: Muown, 2026; the gradient is that of its published code.
    """

    family = "Muown"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 4e-3,
        *,
        scale: str = "adam_rms",
        orthogonalize: str = "newton_schulz",
        radius: str = "adam",
        radius_lr: float | None = None,
        weight_decay: float = 0.0,
        **options: Unpack[CommonOptions],
    ) -> None:
        values = _defaults(
            self,
            options,
            lr=lr,
            scale=scale,
            orthogonalize=orthogonalize,
            radius=radius,
            radius_lr=radius_lr,
            weight_decay=weight_decay,
        )
        super().__init__(params, values)

    def recipe(self, group: Group) -> Recipe:
        return Recipe(WeightNorm(), polar_of(group), scale_of(group), radius=radius_of(group))


@documented
class NorMuown(Engine):
    """Muown with NorMuon's normalization of the rows of Q.

        W = Diag(g / rho) R,  rho_i = |R_i|,  U = R / rho
        T = (g / rho)(G - r U)
        M = beta M + T;  Q = polar(T + beta M)
        v = row_beta v + (1 - row_beta) mean(Q_i^2)
        Q <- Q / sqrt(v), rescaled to the Frobenius norm that Q had
        R <- R - lr s Q
        g <- Adam(g, r; lr)

    Example:
        >>> optimizer = NorMuown.for_model(model, lr=4e-3)

    Args:
        lr: length of a step of R in units of s Q; a float or a one-element tensor.

    See Muown and NorMuon for the papers.
    """

    family = "NorMuown"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 4e-3,
        *,
        row_beta: float = 0.95,
        scale: str = "adam_rms",
        orthogonalize: str = "newton_schulz",
        radius: str = "adam",
        radius_lr: float | None = None,
        weight_decay: float = 0.0,
        **options: Unpack[CommonOptions],
    ) -> None:
        values = _defaults(
            self,
            options,
            lr=lr,
            row_beta=row_beta,
            scale=scale,
            orthogonalize=orthogonalize,
            radius=radius,
            radius_lr=radius_lr,
            weight_decay=weight_decay,
        )
        super().__init__(params, values)

    def recipe(self, group: Group) -> Recipe:
        stages = (polar_of(group), scale_of(group), normalize_of(group), radius_of(group))
        return Recipe(WeightNorm(), *stages)


@documented
class Muon(Engine):
    """Momentum with an orthogonalized step; there are no row lengths.

        M = beta M + G;  Q = polar(G + beta M)
        W <- (1 - lr weight_decay) W - lr s Q

    Example:
        >>> optimizer = Muon.for_model(model, lr=0.02)

    Args:
        lr: length of a step of W in units of s Q; a float or a one-element tensor.
        scale: s(m, n): "fan_ratio" is Keller Jordan's rule, "adam_rms" Moonlight's (arXiv
            2502.16982); "rms", "aspect" and "none" exist as well.

    Source: Keller Jordan: Muon, 2024.
    """

    family = "Muon"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        scale: str = "fan_ratio",
        orthogonalize: str = "newton_schulz",
        weight_decay: float = 0.1,
        **options: Unpack[CommonOptions],
    ) -> None:
        values = _defaults(
            self,
            options,
            lr=lr,
            scale=scale,
            orthogonalize=orthogonalize,
            weight_decay=weight_decay,
        )
        super().__init__(params, values)

    def recipe(self, group: Group) -> Recipe:
        return Recipe(Flat(), polar_of(group), scale_of(group))


@documented
class NorMuon(Engine):
    """Muon with the rows of Q normalized by their second moment.

        M = beta M + G;  Q = polar(G + beta M)
        v = row_beta v + (1 - row_beta) mean(Q_i^2)
        Q <- Q / sqrt(v), rescaled to the Frobenius norm that Q had
        W <- (1 - lr weight_decay) W - lr s Q

    Example:
        >>> optimizer = NorMuon.for_model(model, lr=4e-3)

    Args:
        lr: length of a step of W in units of s Q; a float or a one-element tensor.

    Paper: Li et al.: NorMuon, arXiv 2510.05491.
    """

    family = "NorMuon"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 4e-3,
        *,
        row_beta: float = 0.95,
        scale: str = "fan_ratio",
        orthogonalize: str = "newton_schulz",
        weight_decay: float = 0.0,
        **options: Unpack[CommonOptions],
    ) -> None:
        values = _defaults(
            self,
            options,
            lr=lr,
            row_beta=row_beta,
            scale=scale,
            orthogonalize=orthogonalize,
            weight_decay=weight_decay,
        )
        super().__init__(params, values)

    def recipe(self, group: Group) -> Recipe:
        return Recipe(Flat(), polar_of(group), scale_of(group), normalize_of(group))


# Concurrent methods, each one more chart. A matrix keeps one Frobenius norm g: the one it has when
# it is first seen, or when it was changed from outside. A matrix of zeros has no norm to keep: it
# grows, as under Muon, until its norm is sqrt(m), that of unit rows. weight_decay shrinks g; both
# papers do without it.


@documented
class Hyperball(Engine):
    """Muon on a sphere, also called MuonH: |W|_F stays at g, and only the direction learns.

        M = beta M + G;  Q = polar(G + beta M)
        W <- g unit(W - lr g unit(Q)),            unit(X) = X / |X|_F

    Example:
        >>> optimizer = Hyperball.for_model(model, lr=0.02)

    Args:
        lr: length of a step relative to |W|_F, whatever the shape; a float or a one-element tensor.

    Paper: Wen, Dang, Lyu, Ma, Liang: Fantastic Pretraining Optimizers and Where to Find Them II:
    Hyperball Optimization, arXiv 2606.16899.
    """

    family = "Hyperball"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        orthogonalize: str = "newton_schulz",
        weight_decay: float = 0.0,
        **options: Unpack[CommonOptions],
    ) -> None:
        values = _defaults(
            self, options, lr=lr, orthogonalize=orthogonalize, weight_decay=weight_decay
        )
        super().__init__(params, values)

    def recipe(self, group: Group) -> Recipe:
        return Recipe(Sphere(), polar_of(group), none, UnitNorm())


@documented
class MagnitudeDirection(Engine):
    """A direction on a sphere between gains of rows and columns.

        W = Diag(a) V Diag(b),  |V|_F = g,  a and b positive
        T = Diag(a) G Diag(b)                                 the plain chain rule, not projected
        M = beta M + T;  Q = polar(T + beta M)
        V <- g unit(V - lr s (g / sqrt(max(m, n))) Q),        unit(X) = X / |X|_F
        x <- Adam(x; radius_lr),  a = softplus(x);  b likewise

    The gains start at 1. With the scale "aspect" a step has the relative size lr, as on the
    paper's sphere of radius sqrt(max(m, n)); here a matrix keeps the norm that it starts with.

    Example:
        >>> optimizer = MagnitudeDirection.for_model(model, lr=0.02)

    Args:
        lr: relative length of a step of V (with the "aspect" scale); a float or a one-element
            tensor.
        radius_lr: learning rate of x at the initial lr; it follows lr's schedule. None: lr.

    Paper: Haegele, Hernandez-Cano, Kosson, Jaggi: Improving Neural Network Training by Decoupling
    the Magnitude and Direction of Weight Vectors, arXiv 2606.25971.
    """

    family = "MagnitudeDirection"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        *,
        scale: str = "aspect",
        orthogonalize: str = "newton_schulz",
        radius_lr: float | None = None,
        weight_decay: float = 0.0,
        **options: Unpack[CommonOptions],
    ) -> None:
        values = _defaults(
            self,
            options,
            lr=lr,
            scale=scale,
            orthogonalize=orthogonalize,
            radius_lr=radius_lr,
            weight_decay=weight_decay,
        )
        super().__init__(params, values)

    def recipe(self, group: Group) -> Recipe:
        gains = Gains(group["betas"], group["eps"])
        return Recipe(GainedSphere(), polar_of(group), scale_of(group), radius=gains)


FAMILY: dict[str, type[Engine]] = {
    "angular_muown": AngularMuown,
    "muown": Muown,
    "normuown": NorMuown,
    "muon": Muon,
    "normuon": NorMuon,
    "hyperball": Hyperball,
    "magnitude_direction": MagnitudeDirection,
}


def create(name: str, model: nn.Module, lr: float | Tensor | None = None, **options: Any) -> Engine:
    """Construct an optimizer by its name, for settings that come from a file.

    Args:
        name: "angular_muown", "muown", "normuown", "muon", "normuon", "hyperball" or
            "magnitude_direction".
        model: its parameters are sorted by `plan`.
        lr: learning rate; None is the member's default.
        options: further arguments of the member's `for_model`.
    """
    if name not in FAMILY:
        raise ValueError(f"name={name!r} is not an optimizer: choose one of {', '.join(FAMILY)}")
    return FAMILY[name].for_model(model, lr, **options)
