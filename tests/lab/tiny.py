"""Every kind of model in a size for tests, with nothing left at a special value."""

from dataclasses import replace

import torch
from torch import Tensor

from angular_lab.config.spec import ModelSpec
from angular_lab.models import LanguageModel, build_model

VOCABULARY, LENGTH = 61, 12

_BASE = ModelSpec(vocabulary=VOCABULARY, sequence=LENGTH, layers=2, width=32, heads=4, mlp=48)
SPECS = {
    "dense": _BASE,
    "qwen2": replace(_BASE, kind="qwen2", kv_heads=2, rope_base=500.0),
    "moe": replace(
        _BASE, kind="moe", layers=3, kv_heads=2, tied=False, dense_layers=1, experts=4,
        experts_per_token=2, expert_mlp=16, shared_mlp=24,
    ),
    "gpt_speedrun": replace(
        _BASE, kind="gpt_speedrun", heads=2, mlp=None, tied=False, soft_cap=2.0, rope_base=1024.0
    ),
}  # fmt: skip
KINDS = list(SPECS)


def scrambled(spec: ModelSpec, seed: int = 0) -> LanguageModel:
    """No norm at 1, no bias at 0, no head at 0: what is not used or used twice shows."""
    model = build_model(spec)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def text(seed: int = 0, batch: int = 3, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (batch, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
