"""AngularMuown for JAX: an optax transformation with the numbers of the torch optimizer.

    labels = partial(label, rules={"*embed*": "adamw", "head/*": "adamw", "*/kernel": "transposed"})
    optimizer = with_adamw(0.02, labels, aux_learning_rate=2e-3, warmup_steps=100)
    state = optimizer.init(params)
    updates, state = optimizer.update(gradients, state, params)        # W' - W

The mathematics is in `optax_stages`. What is beyond the paper is in torch only. So are blocks:
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

from angular_muown.integrations.optax_stages import POLARS, Moments, inverse_polynomial, update_one
from angular_muown.patterns import Patterns
from angular_muown.stages.scale import SCALES

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
