"""Named runs: functions that return a spec; a variant is `dataclasses.replace`."""

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches

from angular_lab.config.spec import ModelSpec, OptimSpec, ScheduleSpec, Spec
from angular_lab.errors import UserError

# Matched to the paper's setup: 512 x 1024 tokens a step, WSD with 100 warm-up steps and 10% decay.
CHINCHILLA_STEPS = 4768  # 2.5B tokens


def dense(width: int) -> Spec:
    """PlainLM of the paper: 12 layers, heads of 64."""
    return Spec(
        name={512: "dense-67m", 768: "dense-124m", 1280: "dense-308m"}[width],
        steps=CHINCHILLA_STEPS,
        micro_batch=32,
        model=ModelSpec(width=width, heads=width // 64),
        optim=OptimSpec(lr=0.04),
    )


def nano() -> Spec:
    """Seconds per hundred steps on a CPU, on text that every machine has."""
    return Spec(
        name="nano",
        steps=300,
        batch=16,
        eval_every=50,
        eval_tokens=16_384,
        save_every=100,
        angle_every=10,
        precision="fp32",
        compile=False,
        model=ModelSpec(vocabulary=257, sequence=128, layers=3, width=96, heads=3, mlp=256),
        optim=OptimSpec(lr=0.02),
        schedule=ScheduleSpec(warmup=20, decay=0.2),
    )


def small() -> Spec:
    """Model S: 20.5M parameters. 16,384 tokens a step, so that 90M tokens are 5,500 steps and kappa
    has time to fall."""
    return Spec(
        name="s",
        steps=5493,  # 90M tokens
        batch=32,
        eval_every=500,
        save_every=1000,
        model=ModelSpec(vocabulary=16_384, sequence=512, layers=8, width=384, heads=6, mlp=1024),
        optim=OptimSpec(lr=0.02),
    )


def qwen2() -> Spec:
    base = dense(768)
    return replace(
        base,
        name="qwen2-0.5b",
        batch=256,
        micro_batch=8,
        model=ModelSpec(
            kind="qwen2", vocabulary=151_936, sequence=2048, layers=24, width=896, heads=14,
            kv_heads=2, mlp=4864,
        ),
    )  # fmt: skip


def moe() -> Spec:
    """1.1B-A370M; the paper gives no MLP widths, these meet its parameter counts."""
    return Spec(
        name="moe-1.1b",
        steps=28_610,  # 30B tokens
        batch=256,
        micro_batch=4,
        model=ModelSpec(
            kind="moe", sequence=4096, layers=14, width=1024, heads=16, kv_heads=4, mlp=5632,
            experts=32, experts_per_token=6, expert_mlp=704, shared_mlp=1408, dense_layers=1,
            tied=False,
        ),
        optim=OptimSpec(lr=2e-3, scale="rms"),
    )  # fmt: skip


def speedrun() -> Spec:
    """The optimization track of modded-nanogpt: to a validation loss of 3.28."""
    return Spec(
        name="speedrun",
        steps=3075,
        micro_batch=32,
        model=ModelSpec(
            kind="gpt_speedrun",
            vocabulary=50_304,
            heads=6,
            mlp=3072,
            tied=False,
            soft_cap=15.0,
            rope_base=1024.0,
            init_std=0.0207,
        ),
        optim=OptimSpec(lr=0.031, decay_scale=1.05e-3),
    )


NAMED_RUNS: dict[str, Callable[[], Spec]] = {
    "nano": nano,
    "s": small,
    "dense-67m": lambda: dense(512),
    "dense-124m": lambda: dense(768),
    "dense-308m": lambda: dense(1280),
    "qwen2-0.5b": qwen2,
    "moe-1.1b": moe,
    "speedrun": speedrun,
}


def named_run(name: str) -> Spec:
    if name not in NAMED_RUNS:
        near = get_close_matches(name, NAMED_RUNS, n=1)
        hint = f": did you mean {near[0]}?" if near else "."
        raise UserError(f"unknown run '{name}'{hint} The named runs are {', '.join(NAMED_RUNS)}")
    return NAMED_RUNS[name]()
