"""AngularMuown for JAX: an optax transformation that matches the torch optimizer numerically.

    schedule = optax.join_schedules(                     # warm-up, constant, cooldown
        [optax.linear_schedule(0.0, 0.02, 100), optax.constant_schedule(0.02),
         optax.linear_schedule(0.02, 0.0, 2500)], [100, 2500])
    labels = partial(label, rules={"*embed*": "adamw", "head/*": "adamw", "*/kernel": "transposed"})
    optimizer = with_adamw(schedule, labels, warmup_steps=100)
    state = optimizer.init(params)
    updates, state = optimizer.update(gradients, state, params)        # W' - W

With a schedule that falls over most of the run, pass decay_degree=0, which switches kappa off.

Features beyond the paper are in torch only, and so are blocks: split a fused kernel into its parts,
or stack parts of equal shape as (..., m, n) and label them as a stack.
"""

from collections.abc import Callable, Hashable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from angular_muown.params.options import check_value, plain_value
from angular_muown.params.roles import Patterns
from angular_muown.stages.orthogonalize import (
    POLAR_EXPRESS,
    POLAR_EXPRESS_MARGIN,
    QUINTIC,
    Triple,
)
from angular_muown.stages.scale import SCALES

# The functions down to POLARS mirror the torch update and its stages by name, for one matrix.
# They share the torch constants and scales, and tests compare the results.


class Moments(NamedTuple):
    """The state of matrices (..., m, n); row vectors are (..., m, 1)."""

    M: Array
    exp_avg: Array
    exp_avg_sq: Array


def update_one(
    W: Array,
    G: Array,
    moments: Moments,
    lr: Array,
    radius_lr: Array,
    kappa: Array,
    t: Array,
    *,
    momentum: float,
    nesterov: bool,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: Callable[[int, int], float],
    polar: Callable[[Array], Array],
) -> tuple[Array, Moments]:
    """Take one step for a matrix (m, n). Return W' - W and the new state."""
    W, G = W.astype(moments.M.dtype), G.astype(moments.M.dtype)
    U, g, r = polar_coordinates(W, G)
    T = g * (G - r * U)
    M = momentum * moments.M + T
    Q = polar(T + momentum * M if nesterov else M)
    # A row at zero takes a new direction, so its first moment restarts.
    first = jnp.where(g == 0, 0.0, moments.exp_avg)
    first = betas[0] * first + (1 - betas[0]) * r
    second = betas[1] * moments.exp_avg_sq + (1 - betas[1]) * r**2
    direction = first / (1 - betas[0] ** t) / nonzero(jnp.sqrt(second / (1 - betas[1] ** t)) + eps)
    g = g * (1 - lr * weight_decay) - radius_lr * direction
    W_new = g * normalize_rows(U - lr * kappa * scale(*W.shape) * Q)
    signs = jnp.where(g < 0, -1.0, 1.0)  # a row whose length crosses zero is reversed
    return W_new - W, Moments(M * signs, first * signs, second)


def inverse_polynomial(step: Array, warmup_steps: int, scale: float, degree: float) -> Array:
    """Return kappa_t = (1 + c (t - t_w)_+)^(-p)."""
    return (1.0 + scale * jnp.maximum(step - warmup_steps, 0)) ** -degree


def row_norm(X: Array) -> Array:
    return jnp.linalg.norm(X, axis=-1, keepdims=True)


def nonzero(x: Array) -> Array:
    return jnp.where(x == 0, 1.0, x)


def normalize_rows(X: Array) -> Array:
    return X / nonzero(row_norm(X))


def polar_coordinates(W: Array, G: Array) -> tuple[Array, Array, Array]:
    """Return unit rows U, lengths g >= 0 and r_i = <G_i, U_i>. A row at zero starts along -G_i."""
    g = row_norm(W)
    U = normalize_rows(jnp.where(g == 0, -G, W))
    return U, g, (G * U).sum(axis=-1, keepdims=True)


def unit(X: Array, margin: float) -> Array:
    X = X / nonzero(jnp.abs(X).max())
    return X / nonzero(margin * jnp.sqrt(jnp.square(X).sum()))


def iterate(X: Array, triples: tuple[Triple, ...], margin: float) -> Array:
    tall = X.shape[0] > X.shape[1]
    X = unit(X.T if tall else X, margin)
    for a, b, c in triples:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if tall else X


def svd(X: Array) -> Array:
    """Return the exact polar factor. Directions, rows and columns below rounding give zero."""
    X = unit(X, 1.0)
    U, S, Vh = jnp.linalg.svd(X, full_matrices=False)
    rounding = S[0] * jnp.finfo(S.dtype).eps
    directions = S > max(X.shape) * rounding
    rows, columns = (jnp.linalg.norm(X, axis=d, keepdims=True) > rounding for d in (1, 0))
    return (U * directions) @ Vh * rows * columns


POLARS: dict[str, Callable[[Array], Array]] = {
    "polar_express": partial(iterate, triples=POLAR_EXPRESS, margin=POLAR_EXPRESS_MARGIN),
    "newton_schulz": partial(iterate, triples=QUINTIC, margin=1.0),
    "svd": svd,
}


LearningRate = float | Callable[[Any], Any]  # a number or an optax schedule
# Labels for matrices by storage layout, with the arguments of `angular_muown`.
LAYOUTS: dict[str, dict[str, Any]] = {
    "matrix": {},
    "transposed": {"transposed": True},
    "stack": {"stacks": True},
    "transposed_stack": {"transposed": True, "stacks": True},
}
LABELS = (*LAYOUTS, "adamw")


class AngularMuownState(NamedTuple):
    step: Array  # for kappa and Adam
    moments: Any  # a tree like the parameters', with Moments as leaves


def angular_muown(
    learning_rate: LearningRate = 0.02,
    *,
    transposed: bool = False,
    stacks: bool = False,
    momentum: float = 0.95,
    nesterov: bool = True,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    warmup_steps: int = 0,
    decay_scale: float = 1e-3,
    decay_degree: float = 1.0,
    scale: str = "fan_ratio",
    orthogonalize: str = "polar_express",
    radius_learning_rate: LearningRate | None = None,
    peak_learning_rate: float | None = None,
    weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Rotate rows by about lr * kappa per step: W = Diag(g) U with unit rows.

        T = g (G - r U);  M = beta M + T;  Q = polar(T + beta M)
        U <- rownormalize(U - lr kappa_t s Q);  g <- Adam(g, r; lr)

    Every leaf is a matrix (m, n) with one row per output, as in torch.

    Args:
        learning_rate: a number or a schedule.
        transposed: leaves are stored as (in, out), like flax's kernels.
        stacks: leaves may be stacks of matrices (..., m, n). A convolution kernel is not a stack.
        momentum: decay beta of the momentum M, in [0, 1).
        nesterov: True orthogonalizes the look-ahead T + beta M, False orthogonalizes M.
        betas: Adam's two decay rates, for the row lengths.
        eps: Adam's epsilon.
        warmup_steps: steps at kappa = 1; use the warm-up of the schedule.
        decay_scale: c in kappa, per step.
        decay_degree: exponent of kappa; 0 keeps kappa = 1.
        scale: s(m, n) by name, as in `angular_muown.AngularMuown`.
        orthogonalize: "polar_express", "newton_schulz" or "svd".
        radius_learning_rate: a number or a schedule; None is learning_rate. If only learning_rate
            is a schedule, a number is the value at its peak and follows it, as in torch.
        peak_learning_rate: the peak of the schedule, required in that case.
        weight_decay: decoupled decay, W <- (1 - lr weight_decay) W.
    """
    for name, value, choices in (
        ("scale", scale, SCALES),
        ("orthogonalize", orthogonalize, POLARS),
    ):
        if value not in choices:
            names = ", ".join(choices)
            raise ValueError(f"{name}={value!r} is not valid: it must be one of {names}")
    check_value("betas", plain_value(betas), "betas")
    radius_lr_or_schedule = _follow(
        "radius_learning_rate", radius_learning_rate, learning_rate, peak_learning_rate
    )
    step_one = partial(
        update_one, momentum=momentum, nesterov=nesterov, betas=betas, eps=eps,
        weight_decay=weight_decay, scale=SCALES[scale], polar=POLARS[orthogonalize],
    )  # fmt: skip

    def init(params: Any) -> AngularMuownState:
        jax.tree_util.tree_map_with_path(partial(_check, stacks), params)
        moments = jax.tree.map(lambda W: _zeros(_rows_out(W, transposed)), params)
        return AngularMuownState(jnp.zeros((), jnp.int32), moments)

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, AngularMuownState]:
        if params is None:
            raise ValueError(
                "params=None: angular_muown needs the weights, update(gradients, state, params)"
            )
        t = state.step
        lr, radius_lr = _at(learning_rate, t), _at(radius_lr_or_schedule, t)
        kappa = inverse_polynomial(t, warmup_steps, decay_scale, decay_degree)
        advance = partial(_advance, step_one, transposed, (lr, radius_lr, kappa, t + 1))
        leaves, tree = jax.tree.flatten(params)
        gradients, states = (tree.flatten_up_to(x) for x in (updates, state.moments))
        pairs = [advance(*x) for x in zip(leaves, gradients, states, strict=True)]
        moments = tree.unflatten([moments for _, moments in pairs])
        changes = tree.unflatten([change for change, _ in pairs])
        return changes, AngularMuownState(t + 1, moments)

    return optax.GradientTransformationExtraArgs(init, update)


def _rows_out(W: Array, transposed: bool) -> Array:
    return W.mT if transposed else W


def _advance(
    step_one: Callable[..., tuple[Array, Moments]],
    transposed: bool,
    scalars: tuple[Any, ...],
    W: Array,
    G: Array,
    moments: Moments,
) -> tuple[Array, Moments]:
    """Step one leaf. vmap keeps matrices apart, so a stack may be sharded across devices."""
    arrays = [jnp.asarray(x, moments.M.dtype) for x in scalars]

    def step(W: Array, G: Array, moments: Moments) -> tuple[Array, Moments]:
        return step_one(W, G, moments, *arrays)

    for _ in range(W.ndim - 2):
        step = jax.vmap(step)
    change, moments = step(_rows_out(W, transposed), _rows_out(G, transposed), moments)
    return _rows_out(change, transposed), moments


def with_adamw(
    learning_rate: LearningRate,
    labels: Any,
    *,
    aux_learning_rate: LearningRate | None = None,
    aux_weight_decay: float = 0.0,
    aux_betas: tuple[float, float] | None = None,
    peak_learning_rate: float | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    **settings: Any,
) -> optax.GradientTransformationExtraArgs:
    """Optimize a whole model: matrices by AngularMuown, all other parameters by AdamW.

    Args:
        learning_rate: for the matrices, a number or a schedule.
        labels: a tree like the parameters' whose leaves are "matrix" (out, in), "transposed"
            (in, out), "stack" or "transposed_stack" (leading dimensions count matrices) or "adamw";
            or a function that computes it from the parameters, such as `label` with rules.
        aux_learning_rate: for AdamW; None is learning_rate.
        aux_weight_decay: for AdamW.
        aux_betas: Adam's two decay rates for AdamW; None is betas.
        peak_learning_rate: the peak of learning_rate if it is a schedule. A number as
            aux_learning_rate or radius_learning_rate is the value there and follows the schedule.
        betas: Adam's two decay rates, for row lengths and AdamW.
        eps: Adam's epsilon, likewise.
        **settings: as in `angular_muown`.
    """
    aux_lr = _follow("aux_learning_rate", aux_learning_rate, learning_rate, peak_learning_rate)
    common: dict[str, Any] = {
        "betas": betas,
        "eps": eps,
        "peak_learning_rate": peak_learning_rate,
        **settings,
    }
    transformations: dict[Hashable, optax.GradientTransformation] = {
        name: angular_muown(learning_rate, **common, **layout) for name, layout in LAYOUTS.items()
    }
    if aux_betas is None:
        aux_betas = betas
    else:
        check_value("aux_betas", plain_value(aux_betas), "betas")
    transformations["adamw"] = optax.adamw(
        aux_lr, *aux_betas, eps=eps, weight_decay=aux_weight_decay
    )
    return optax.multi_transform(transformations, labels)


def label(params: Any, rules: Mapping[str, str]) -> Any:
    """Return a tree of labels from globs over paths such as "layers/0/kernel".

    The first match counts. Parameters with fewer than two dimensions get "adamw". A larger one that
    no rule matches is an error, because its shape does not tell a hidden matrix from a head or an
    embedding. A pattern that matches nothing is an error too.
    """
    for pattern, name in rules.items():
        if name not in LABELS:
            raise ValueError(f"rules[{pattern!r}]={name!r} must be one of {', '.join(LABELS)}")

    names = Patterns(_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))
    for pattern in rules:
        names.matching("rules", pattern)

    def choose(path: Any, W: Array) -> str:
        name = _name(path)
        if W.ndim < 2:
            return "adamw"
        for pattern, chosen in rules.items():
            if fnmatchcase(name, pattern):
                return chosen
        raise ValueError(f"no rule for parameter {name!r} (shape {W.shape}): add one to rules")

    return jax.tree_util.tree_map_with_path(choose, params)


def _follow(
    name: str, value: LearningRate | None, lr: LearningRate, peak: float | None
) -> LearningRate:
    """Return a further learning rate, as a multiple of the schedule lr if only lr is a schedule."""
    if peak is not None and not callable(lr):
        raise ValueError(
            f"peak_learning_rate={peak!r} with learning_rate={lr!r}, which is not a schedule: "
            "leave peak_learning_rate out"
        )
    if peak is not None and not peak > 0:
        raise ValueError(f"peak_learning_rate={peak!r} must be a number > 0")
    if value is None:
        return lr
    if callable(value) or not callable(lr):
        return value
    if peak is None:
        raise ValueError(
            f"{name}={value!r} is a number and learning_rate is a schedule: pass the schedule's "
            f"peak as peak_learning_rate=..., or pass a schedule for {name}"
        )
    return lambda t: value / peak * lr(t)


def _at(lr: LearningRate, t: Array) -> Any:
    return lr(t) if callable(lr) else lr


def _zeros(W: Array) -> Moments:
    dtype = jnp.promote_types(W.dtype, jnp.float32)
    vector = jnp.zeros((*W.shape[:-1], 1), dtype)
    return Moments(jnp.zeros(W.shape, dtype), vector, vector)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _check(stacks: bool, path: Any, W: Array) -> None:
    description = f"parameter {_name(path)!r} (shape {W.shape}, {W.dtype})"
    if W.ndim < 2 or not jnp.issubdtype(W.dtype, jnp.floating):
        raise ValueError(f"{description} is not a real matrix: label it 'adamw'")
    if W.ndim > 2 and not stacks:
        raise ValueError(
            f"{description} has {W.ndim} dimensions instead of 2: label a stack of matrices "
            "'stack' or, for (in, out), 'transposed_stack' (stacks=True); label others, such as a "
            "convolution kernel, 'adamw', or reshape it to (outputs, all inputs)"
        )
