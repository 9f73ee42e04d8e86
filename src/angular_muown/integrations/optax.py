"""AngularMuown for JAX: an optax transformation with the numbers of the torch optimizer.

    labels = partial(label, rules={"*embed*": "adamw", "head/*": "adamw", "*/kernel": "transposed"})
    optimizer = with_adamw(0.02, labels, aux_learning_rate=2e-3, warmup_steps=100)
    state = optimizer.init(params)
    updates, state = optimizer.update(gradients, state, params)        # W' - W

What is beyond the paper is in torch only. So are blocks:
split a fused kernel into its parts, or stack equal ones as (..., m, n) and say so.
"""

from collections.abc import Callable, Hashable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from angular_muown.params.roles import Patterns
from angular_muown.stages.orthogonalize import (
    POLAR_EXPRESS,
    POLAR_EXPRESS_MARGIN,
    QUINTIC,
    Triple,
)
from angular_muown.stages.scale import SCALES

# One step of one matrix in JAX: `angular_muown.update.update` for AngularMuown, with the stages
# under their own names. Constants and scales are the torch package's; parity is tested.


class Moments(NamedTuple):
    """What a matrix (..., m, n) carries from step to step; rows are (..., m, 1)."""

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
    """One step of one matrix (m, n): W' - W and what is carried on."""
    W, G = W.astype(moments.M.dtype), G.astype(moments.M.dtype)
    U, g, r = polar_coordinates(W, G)
    T = g * (G - r * U)
    M = momentum * moments.M + T
    Q = polar(T + momentum * M if nesterov else M)
    # A row at zero takes a new direction: its first moment has no past.
    first = jnp.where(g == 0, 0.0, moments.exp_avg)
    first = betas[0] * first + (1 - betas[0]) * r
    second = betas[1] * moments.exp_avg_sq + (1 - betas[1]) * r**2
    direction = first / (1 - betas[0] ** t) / nonzero(jnp.sqrt(second / (1 - betas[1] ** t)) + eps)
    g = g * (1 - lr * weight_decay) - radius_lr * direction
    W_new = g * normalize_rows(U - lr * kappa * scale(*W.shape) * Q)
    signs = jnp.where(g < 0, -1.0, 1.0)  # a row whose length crossed zero turns round
    return W_new - W, Moments(M * signs, first * signs, second)


def inverse_polynomial(step: Array, warmup_steps: int, scale: float, degree: float) -> Array:
    """kappa_t = (1 + c (t - t_w)_+)^(-p)."""
    return (1.0 + scale * jnp.maximum(step - warmup_steps, 0)) ** -degree


def row_norm(X: Array) -> Array:
    return jnp.linalg.norm(X, axis=-1, keepdims=True)


def nonzero(x: Array) -> Array:
    return jnp.where(x == 0, 1.0, x)


def normalize_rows(X: Array) -> Array:
    return X / nonzero(row_norm(X))


def polar_coordinates(W: Array, G: Array) -> tuple[Array, Array, Array]:
    """Unit rows U, lengths g >= 0 and r_i = <G_i, U_i>; a row at zero leaves along -G_i."""
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
    """The exact polar factor; directions, rows and columns below rounding give zero."""
    X = unit(X, 1.0)
    U, S, Vh = jnp.linalg.svd(X, full_matrices=False)
    error = S[0] * jnp.finfo(S.dtype).eps
    kept = S > max(X.shape) * error
    seen = [jnp.linalg.norm(X, axis=d, keepdims=True) > error for d in (1, 0)]
    return (U * kept) @ Vh * seen[0] * seen[1]


POLARS: dict[str, Callable[[Array], Array]] = {
    "polar_express": partial(iterate, triples=POLAR_EXPRESS, margin=POLAR_EXPRESS_MARGIN),
    "newton_schulz": partial(iterate, triples=QUINTIC, margin=1.0),
    "svd": svd,
}


Rate = float | Callable[[Any], Any]  # a number or an optax schedule
# How matrices are stored; `angular_muown`'s arguments
STORED: dict[str, dict[str, Any]] = {
    "matrix": {},
    "transposed": {"transposed": True},
    "stack": {"stacks": True},
    "transposed_stack": {"transposed": True, "stacks": True},
}
LABELS = (*STORED, "adamw")


class AngularMuownState(NamedTuple):
    step: Array  # kappa's clock, and Adam's
    moments: Any  # the parameters' tree, with Moments for leaves


def angular_muown(
    learning_rate: Rate = 0.02,
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
    radius_learning_rate: Rate | None = None,
    peak_learning_rate: float | None = None,
    weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """W = Diag(g) U with unit rows; an angle of about lr * kappa per step.

        T = g (G - r U);  M = beta M + T;  Q = polar(T + beta M)
        U <- rownormalize(U - lr kappa_t s Q);  g <- Adam(g, r; lr)

    Every leaf is a matrix (m, n) with a row for each output, as torch stores it.

    Args:
        transposed: they are stored in x out, as flax's kernels are.
        stacks: leaves may be stacks of matrices (..., m, n). A convolution's kernel is none.
        learning_rate, radius_learning_rate: numbers or schedules; None: the radii follow lr. A
            number for the radii beside a schedule of lr is their rate at its peak, as in torch.
        peak_learning_rate: the schedule's peak, for such numbers.
        others: as in `angular_muown.AngularMuown`.
    """
    for name, value, known in (("scale", scale, SCALES), ("orthogonalize", orthogonalize, POLARS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is not valid: it must be one of {', '.join(known)}")
    radius_rate = _following(
        "radius_learning_rate", radius_learning_rate, learning_rate, peak_learning_rate
    )
    one = partial(
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
                "angular_muown reads the weights: use update(gradients, state, params)"
            )
        t = state.step
        lr, radius_lr = _at(learning_rate, t), _at(radius_rate, t)
        kappa = inverse_polynomial(t, warmup_steps, decay_scale, decay_degree)
        advance = partial(_advance, one, transposed, (lr, radius_lr, kappa, t + 1))
        leaves, tree = jax.tree.flatten(params)
        own = (tree.flatten_up_to(x) for x in (updates, state.moments))
        pairs = [advance(*x) for x in zip(leaves, *own, strict=True)]
        moments = tree.unflatten([moments for _, moments in pairs])
        changes = tree.unflatten([change for change, _ in pairs])
        return changes, AngularMuownState(t + 1, moments)

    return optax.GradientTransformationExtraArgs(init, update)


def _rows_out(W: Array, transposed: bool) -> Array:
    return W.mT if transposed else W


def _advance(
    one: Callable[..., tuple[Array, Moments]],
    transposed: bool,
    rates: tuple[Any, ...],
    W: Array,
    G: Array,
    moments: Moments,
) -> tuple[Array, Moments]:
    """One leaf, one matrix at a time: a stack may be spread over devices."""
    numbers = [jnp.asarray(x, moments.M.dtype) for x in rates]

    def step(W: Array, G: Array, moments: Moments) -> tuple[Array, Moments]:
        return one(W, G, moments, *numbers)

    for _ in range(W.ndim - 2):
        step = jax.vmap(step)
    change, moments = step(_rows_out(W, transposed), _rows_out(G, transposed), moments)
    return _rows_out(change, transposed), moments


def with_adamw(
    learning_rate: Rate,
    labels: Any,
    *,
    aux_learning_rate: Rate | None = None,
    aux_weight_decay: float = 0.0,
    peak_learning_rate: float | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    **settings: Any,
) -> optax.GradientTransformationExtraArgs:
    """One transformation for a whole model: AngularMuown for the matrices, AdamW for the rest.

    Args:
        labels: a tree like the parameters' with "matrix" (out x in), "transposed" (in x out),
            "stack" or "transposed_stack" (leading dimensions count matrices) or "adamw" for leaves,
            or a function that makes it of them, such as `label` with rules.
        aux_learning_rate, aux_weight_decay: for AdamW; None means learning_rate.
        peak_learning_rate: of the schedule, where learning_rate is one. A number for
            aux_learning_rate or radius_learning_rate is the rate there, and follows the schedule.
        settings: as in `angular_muown`.
    """
    rate = _following("aux_learning_rate", aux_learning_rate, learning_rate, peak_learning_rate)
    common: dict[str, Any] = {
        "betas": betas,
        "eps": eps,
        "peak_learning_rate": peak_learning_rate,
        **settings,
    }
    rules: dict[Hashable, optax.GradientTransformation] = {
        name: angular_muown(learning_rate, **common, **stored) for name, stored in STORED.items()
    }
    rules["adamw"] = optax.adamw(rate, *betas, eps=eps, weight_decay=aux_weight_decay)
    return optax.multi_transform(rules, labels)


def label(params: Any, rules: Mapping[str, str]) -> Any:
    """A tree of labels from globs over paths such as "layers/0/kernel"; the first match counts.

    What has fewer than two dimensions goes to AdamW. What no rule names is an error: whether a
    matrix is hidden, a head or an embedding cannot be seen from its shape. So is a pattern that
    matches nothing.
    """
    for pattern, found in rules.items():
        if found not in LABELS:
            raise ValueError(f"rules[{pattern!r}]={found!r} must be one of {', '.join(LABELS)}")

    known = Patterns(_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))
    for pattern in rules:
        known.matching("rules", pattern)

    def choose(path: Any, W: Array) -> str:
        name = _name(path)
        if W.ndim < 2:
            return "adamw"
        for pattern, found in rules.items():
            if fnmatchcase(name, pattern):
                return found
        raise ValueError(f"no rule for parameter {name!r} (shape {W.shape}): add one to rules")

    return jax.tree_util.tree_map_with_path(choose, params)


def _following(name: str, rate: Rate | None, lr: Rate, peak: float | None) -> Rate:
    """A rate beside lr's: a number is meant at the peak of lr's schedule, as torch's are."""
    if peak is not None and not callable(lr):
        raise ValueError(
            f"peak_learning_rate={peak!r} with learning_rate={lr!r}, which is no schedule: drop it"
        )
    if peak is not None and not peak > 0:
        raise ValueError(f"peak_learning_rate={peak!r} must be a number > 0")
    if rate is None:
        return lr
    if callable(rate) or not callable(lr):
        return rate
    if peak is None:
        raise ValueError(
            f"{name}={rate!r} is a number and learning_rate a schedule: give the schedule's peak, "
            "peak_learning_rate=..., and the number follows it, or give a schedule for it too"
        )
    return lambda t: rate / peak * lr(t)


def _at(rate: Rate, t: Array) -> Any:
    return rate(t) if callable(rate) else rate


def _zeros(W: Array) -> Moments:
    dtype = jnp.promote_types(W.dtype, jnp.float32)
    rows = jnp.zeros((*W.shape[:-1], 1), dtype)
    return Moments(jnp.zeros(W.shape, dtype), rows, rows)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _check(stacks: bool, path: Any, W: Array) -> None:
    what = f"parameter {_name(path)!r} (shape {W.shape}, {W.dtype})"
    if W.ndim < 2 or not jnp.issubdtype(W.dtype, jnp.floating):
        raise ValueError(f"{what} is no real matrix: label it 'adamw'")
    if W.ndim > 2 and not stacks:
        raise ValueError(
            f"{what} has {W.ndim} dimensions, a matrix two: where the leading ones count matrices "
            "label it 'stack' or (in x out) 'transposed_stack', which is stacks=True; otherwise, "
            "as a convolution's kernel, label it 'adamw' or reshape it to outputs and all inputs"
        )
