"""One step of one matrix in JAX: `angular_muown.engine.update` for AngularMuown, with the stages
under their own names. Constants and scales are the torch package's; parity is tested."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from angular_muown.stages.orthogonalize import (
    POLAR_EXPRESS,
    POLAR_EXPRESS_MARGIN,
    QUINTIC,
    Triple,
)


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
