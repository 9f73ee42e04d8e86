"""The optax transformation matches the torch optimizer; stacks, jit, sharding, labels."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax import Array

from angular_muown import AngularMuown, wsd
from angular_muown.integrations.optax import angular_muown, label, with_adamw
from tests.integrations.scripts import assert_falls, load

STEPS = 100
PRUNED = 40  # a row is set to zero after this step
SHAPES = [(8, 16), (24, 10), (2, 2, 6, 9)]
DTYPES = ("float32", "float64")
KAPPA = {"warmup_steps": 10, "decay_scale": 0.05, "decay_degree": 0.7}
SETTINGS: list[dict[str, Any]] = [
    {},
    {
        "nesterov": False,
        "scale": "adam_rms",
        "weight_decay": 0.3,
        "betas": (0.8, 0.99),
        "eps": 1e-3,
    },
]


class Problem(NamedTuple):
    """A regression with one row at zero and one that soon crosses it.

    The gradient is noisy. Without noise, the momentum becomes nearly singular, and the polar factor
    amplifies rounding errors in both libraries.
    """

    W: Any
    X: Any
    Y: Any
    noise: Any

    @staticmethod
    def of(shape: tuple[int, ...], dtype: str) -> "Problem":
        rng = np.random.default_rng(1)
        W = rng.standard_normal(shape) / 4
        W[..., 0, :] = 0
        W[..., 1, :] *= 0.01
        X = rng.standard_normal((*shape[:-2], shape[-1], 64))
        Y = rng.standard_normal((*shape[:-2], shape[-2], 64))
        noise = rng.standard_normal((STEPS, *shape)) / 50
        return Problem(*(A.astype(dtype) for A in (W, X, Y, noise)))


PROBLEMS = {dtype: [Problem.of(shape, dtype) for shape in SHAPES] for dtype in DTYPES}


def train_torch(
    problems: list[Problem], factor: Callable[[int], float], **values: Any
) -> list[Any]:
    tensors = [Problem(*map(torch.tensor, problem)) for problem in problems]
    params = [torch.nn.Parameter(problem.W) for problem in tensors]
    groups = [{"params": [p], "view": "stack" if p.ndim > 2 else "matrix"} for p in params]
    optimizer = AngularMuown(groups, **values)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for t in range(STEPS):
        optimizer.zero_grad()
        for p, (_, X, Y, noise) in zip(params, tensors, strict=True):
            ((p @ X - Y).square().mean() + (p * noise[t]).sum()).backward()
        optimizer.step()
        scheduler.step()
        if t == PRUNED:
            for p in params:
                p.data[..., 2, :] = 0
    return [p.detach().numpy() for p in params]


def train_jax(problems: list[Problem], transformation: Any) -> list[Any]:
    traces = []

    def loss(params: list[Array], t: Array) -> Array:
        terms = [
            jnp.square(W @ X - Y).mean() + (W * jnp.asarray(noise)[t]).sum()
            for W, (_, X, Y, noise) in zip(params, problems, strict=True)
        ]
        return jnp.stack(terms).sum()

    @jax.jit
    def step(params: list[Array], state: Any, t: Array) -> tuple[Any, Any]:
        traces.append(1)
        updates, state = transformation.update(jax.grad(loss)(params, t), state, params)
        return optax.apply_updates(params, updates), state

    params = [jnp.asarray(problem.W) for problem in problems]
    state = transformation.init(params)
    for t in range(STEPS):
        params, state = step(params, state, t)
        if t == PRUNED:
            params = [W.at[..., 2, :].set(0) for W in params]
    assert len(traces) == 1  # compiled once, independent of the step number
    return [np.asarray(W) for W in params]


def assert_close(actual: list[Any], expected: list[Any], atol: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("orthogonalize", ["polar_express", "newton_schulz"])
def test_parity_in_float32(orthogonalize: str) -> None:
    problems = PROBLEMS["float32"]
    values = {"orthogonalize": orthogonalize, **KAPPA}
    expected = train_torch(problems, lambda t: 1.0, lr=0.02, **values)
    actual = train_jax(problems, angular_muown(0.02, stacks=True, **values))
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("number", [True, False], ids=["number", "schedule"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_parity_in_float64_with_the_exact_polar_factor(
    settings: dict[str, Any], number: bool
) -> None:
    """With a learning rate schedule, and a separate learning rate for the radii.

    The latter is a number that follows the schedule, as in torch, or a schedule.
    """
    problems, values = PROBLEMS["float64"], {"orthogonalize": "svd", **KAPPA, **settings}
    schedule = partial(wsd, total_steps=STEPS, warmup_steps=10, decay_steps=20)
    expected = train_torch(problems, schedule, lr=0.02, radius_lr=0.01, **values)
    factors = np.array([schedule(t) for t in range(STEPS)])
    with jax.enable_x64(True):
        factor = jnp.asarray(factors)
        transformation = angular_muown(
            lambda t: 0.02 * factor[t],
            radius_learning_rate=0.01 if number else lambda t: 0.01 * factor[t],
            peak_learning_rate=0.02 if number else None,
            stacks=True,
            **values,
        )
        actual = train_jax(problems, transformation)
    assert_close(actual, expected, 1e-12)


def one_update(W: Array, G: Array, **values: Any) -> Array:
    transformation = angular_muown(0.1, **values)
    return jax.jit(transformation.update)(G, transformation.init(W), W)[0]


def test_a_transposed_kernel_gets_the_transposed_update() -> None:
    W, X, *_ = Problem.of((5, 7), "float32")
    W, G = jnp.asarray(W), jnp.asarray(X[:5, :7])
    update = one_update(W.T, G.T, transposed=True)
    np.testing.assert_allclose(update.T, one_update(W, G), rtol=0, atol=1e-6)
    assert not np.allclose(update.T, one_update(W.T, G.T).T)


def test_a_16_bit_weight_gets_a_float32_update() -> None:
    W, X, *_ = Problem.of((5, 7), "float32")
    half, G = jnp.asarray(W, jnp.bfloat16), jnp.asarray(X[:5, :7])
    update = one_update(half, G.astype(jnp.bfloat16))
    assert update.dtype == jnp.float32
    exact = one_update(half.astype(jnp.float32), G.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(update, exact)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_model_with_adamw_matches_the_torch_optimizer(scheduled: bool) -> None:
    """The learning rates of AdamW and of the radii follow the schedule in both libraries."""
    schedule = partial(wsd, total_steps=20, warmup_steps=5, decay_steps=5) if scheduled else None
    factors = jnp.asarray([schedule(t) if schedule else 1.0 for t in range(20)])
    rng = np.random.default_rng(0)
    shapes = {"embed": (11, 6), "hidden": (6, 12), "bias": (12,), "head": (12, 3)}
    params = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    torch_params = {name: torch.nn.Parameter(torch.tensor(W)) for name, W in params.items()}
    hidden = torch_params.pop("hidden")
    rest = {"params": [*torch_params.values()], "algorithm": "adamw", "lr": 3e-3}
    rest |= {"betas": (0.8, 0.99)} if scheduled else {}
    optimizer = AngularMuown(
        [{"params": [hidden], "transposed": True}, {**rest, "weight_decay": 0.1}],
        lr=0.02,
        radius_lr=0.05,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule or (lambda t: 1.0))
    labels = partial(label, rules={"embed": "adamw", "head": "adamw", "*": "transposed"})
    transformation = with_adamw(
        (lambda t: 0.02 * factors[t]) if scheduled else 0.02,
        labels,
        aux_learning_rate=3e-3,
        radius_learning_rate=0.05,
        peak_learning_rate=0.02 if scheduled else None,
        aux_weight_decay=0.1,
        aux_betas=(0.8, 0.99) if scheduled else None,
    )
    jax_params = jax.tree.map(jnp.asarray, params)
    state = transformation.init(jax_params)
    update = jax.jit(transformation.update)
    for _ in range(20):
        gradients = {n: rng.standard_normal(s).astype("float32") for n, s in shapes.items()}
        updates, state = update(gradients, state, jax_params)
        jax_params = optax.apply_updates(jax_params, updates)
        for name, p in {**torch_params, "hidden": hidden}.items():
            p.grad = torch.tensor(gradients[name])
        optimizer.step()
        scheduler.step()
    for name, p in {**torch_params, "hidden": hidden}.items():
        np.testing.assert_allclose(jax_params[name], p.detach().numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["aux_learning_rate", "radius_learning_rate"])
def test_a_number_next_to_a_schedule_requires_the_peak(name: str) -> None:
    values: dict[str, Any] = {name: 0.01}
    schedule = optax.constant_schedule(0.02)
    with pytest.raises(ValueError, match=rf"{name}=0.01 .* schedule: .*peak_learning_rate=") as e:
        with_adamw(schedule, {}, **values)
    assert f"or pass a schedule for {name}" in str(e.value)
    with_adamw(schedule, {}, peak_learning_rate=0.02, **values)
    with_adamw(0.02, {}, **values)
    with pytest.raises(ValueError, match=r"peak_learning_rate=0\.0 must be a number > 0"):
        with_adamw(schedule, {}, peak_learning_rate=0.0, **values)
    with pytest.raises(ValueError, match=r"peak_learning_rate=0\.02 with learning_rate=0\.02"):
        with_adamw(0.02, {}, peak_learning_rate=0.02, **values)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_declared_stack_equals_its_matrices(transposed: bool) -> None:
    W, G = (jax.random.normal(jax.random.key(i), (3, 4, 6)) for i in (0, 1))
    single, stack = ("transposed", "transposed_stack") if transposed else ("matrix", "stack")
    updates = []
    for name, params, gradients in ((single, [*W], [*G]), (stack, W, G)):
        transformation = with_adamw(0.1, partial(label, rules={"*": name}))
        update = jax.jit(transformation.update)
        updates.append(update(gradients, transformation.init(params), params)[0])
    np.testing.assert_allclose(updates[1], jnp.stack(updates[0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["matrix", "transposed"])
def test_a_convolution_kernel_is_not_treated_as_a_stack(name: str) -> None:
    params = {"conv": {"kernel": jnp.ones((3, 3, 8, 16))}}
    transformation = with_adamw(0.1, partial(label, rules={"conv/*": name}))
    message = r"'conv/kernel' \(shape \(3, 3, 8, 16\), float32\) has 4 dimensions.*transposed_stack"
    with pytest.raises(ValueError, match=message):
        transformation.init(params)


def test_invalid_labels_and_arguments_are_rejected() -> None:
    params = {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
    assert label(params, {"*/kernel": "transposed"})["layer"]["bias"] == "adamw"
    with pytest.raises(ValueError, match=r"no rule for parameter 'layer/kernel' \(shape \(2, 3\)"):
        label(params, {"*/bias": "adamw"})
    with pytest.raises(ValueError, match=r"rules: pattern 'head/\*' matches no .*layer/kernel"):
        label(params, {"head/*": "adamw", "*/kernel": "matrix"})
    with pytest.raises(ValueError, match="must be one of matrix, transposed, stack, transposed_st"):
        label(params, {"*": "muon"})
    with pytest.raises(ValueError, match=r"'layer/bias' .* label it 'adamw'"):
        angular_muown().init(params)
    with pytest.raises(ValueError, match=r"orthogonalize='gram' is not valid: .*polar_express"):
        angular_muown(orthogonalize="gram")
    for betas in ((), (0.9,), (0.9, 1.0), 0.9):
        message = r"betas=.* is not valid: it must be two numbers in \[0, 1\)"
        with pytest.raises(ValueError, match="^aux_" + message):
            with_adamw(0.02, params, aux_betas=betas)
        with pytest.raises(ValueError, match="^" + message):
            with_adamw(0.02, params, betas=betas)
        with pytest.raises(ValueError, match="^" + message):
            angular_muown(betas=betas)
    transformation = angular_muown()
    state = transformation.init(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"update\(gradients, state, params\)"):
        transformation.update(jnp.ones((2, 3)), state)


@pytest.mark.parametrize("settings", [{"average": 0.1}], ids=str)
def test_torch_only_settings_are_rejected_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(TypeError, match=rf"angular_muown\(\) got an unexpected .*'{name}'"):
        angular_muown(0.02, **settings)
    with pytest.raises(TypeError, match=rf"angular_muown\(\) got an unexpected .*'{name}'"):
        with_adamw(0.02, {"kernel": "matrix"}, **settings)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from angular_muown.integrations.optax import angular_muown

assert jax.device_count() == 2
mesh = jax.make_mesh((2,), ("stack",))
sharding = NamedSharding(mesh, PartitionSpec("stack"))
W, G = (jax.random.normal(jax.random.key(i), (4, 12, 8)) for i in range(2))
optimizer = angular_muown(0.02, stacks=True)
expected, _ = jax.jit(optimizer.update)(G, optimizer.init(W), W)
W, G = (jax.device_put(X, sharding) for X in (W, G))
state = jax.jit(optimizer.init)(W)
state = state._replace(moments=jax.device_put(state.moments, sharding))
compiled = jax.jit(optimizer.update).lower(G, state, W).compile()
updates, state = compiled(G, state, W)
assert updates.sharding.is_equivalent_to(sharding, 3), updates.sharding
assert state.moments.exp_avg.sharding.is_equivalent_to(sharding, 3)
np.testing.assert_allclose(updates, expected, rtol=0, atol=1e-6)
program = compiled.as_text()
collectives = [op for op in ("all-gather", "all-reduce", "all-to-all") if op in program]
assert not collectives, collectives
"""


def test_a_stack_sharded_across_devices_is_stepped_without_collectives() -> None:
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", SHARDED], capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_the_flax_example_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    result = load("flax_mlp").main(tmp_path, steps=40)
    assert_falls(result["losses"], 0.1)
    same = jax.tree.map(np.array_equal, result["params"], result["resumed"])
    assert all(jax.tree.leaves(same)), same
