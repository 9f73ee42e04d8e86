"""AngularMuown in JAX: a small flax network by optax, saved half-way and resumed.

pip install -e '.[jax]'
python examples/flax_mlp.py --out runs/flax_mlp
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import serialization

from angular_muown.integrations.optax import label, with_adamw

# flax stores kernels in x out. Embedding and head go to AdamW; vectors do by themselves.
RULES = {"*/embedding": "adamw", "*/head/kernel": "adamw", "*/kernel": "transposed"}


class Network(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(32, 32)(tokens)
        for _ in range(2):
            x = x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return nn.Dense(32, name="head")(x)


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """The task: token t is answered by 5 t + 3 modulo 32."""
    tokens = jax.random.randint(jax.random.key(step), (16, 8), 0, 32)
    return tokens, (5 * tokens + 3) % 32


def loss(network: Network, params: Any, tokens: jax.Array, answers: jax.Array) -> jax.Array:
    logits = network.apply(params, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, answers).mean()


def wsd(peak: float, steps: int) -> tuple[optax.Schedule, int]:
    """Return a schedule of warm-up, constant and cooldown, and the steps of its warm-up."""
    warmup, cooldown = steps // 10, steps // 2
    parts = [
        optax.linear_schedule(peak / (warmup + 1), peak, warmup),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, 0.0, cooldown),
    ]
    return optax.join_schedules(parts, [warmup, steps - cooldown]), warmup


def main(out: Path, steps: int = 60) -> dict[str, Any]:
    network = Network()
    params = network.init(jax.random.key(0), batch(0)[0])
    schedule, warmup = wsd(0.02, steps)
    optimizer = with_adamw(schedule, partial(label, rules=RULES), warmup_steps=warmup)

    @jax.jit
    def train(params: Any, state: Any, tokens: Any, answers: Any) -> tuple[Any, Any, Any]:
        value, gradients = jax.value_and_grad(partial(loss, network))(params, tokens, answers)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def run(params: Any, state: Any, start: int, end: int) -> tuple[Any, Any, list[float]]:
        losses = []
        for step in range(start, end):
            params, state, value = train(params, state, *batch(step))
            losses.append(float(value))
        return params, state, losses

    half = steps // 2
    params, state, losses = run(params, optimizer.init(params), 0, half)
    out.mkdir(parents=True, exist_ok=True)
    saved = out / "half.msgpack"
    saved.write_bytes(serialization.to_bytes((params, state)))
    blank = jax.tree.map(jnp.zeros_like, (params, state))
    resumed = run(*serialization.from_bytes(blank, saved.read_bytes()), half, steps)
    params, state, more = run(params, state, half, steps)
    print(f"loss {losses[0]:.3f} -> {more[-1]:.3f} in {steps} steps")
    return {"losses": losses + more, "params": params, "resumed": resumed[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/flax_mlp"))
    parser.add_argument("--steps", type=int, default=60)
    main(**vars(parser.parse_args()))
