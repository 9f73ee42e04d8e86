"""Archive runs that later code must be able to continue.

    python -m tests.kept.make [--bits] [NAME ...]

Writes one small file per optimizer, or those that are named: the state dict and weights after five
steps, and the weights after ten. tests/library/test_kept_states.py loads each file and continues.
With --bits, write nothing and print a digest for each run of fifty steps, to compare two source
trees bit for bit on one machine.
"""

import argparse
import copy
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import angular_muown

FOLDER = Path(__file__).parent
MEMBERS = (
    "AngularMuown",
    "Muown",
    "NorMuown",
    "Muon",
    "NorMuon",
    "Hyperball",
    "MagnitudeDirection",
)
SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "wide": ((6, 10), {}),
    "tall": ((12, 5), {"blocks": 3}),
    "cut": ((8, 9), {"column_blocks": 3}),
    "experts": ((2, 6, 4), {"view": "stack"}),
    "turned": ((5, 8), {"transposed": True, "blocks": [3, 5]}),
    "bias": ((7,), {"algorithm": "adamw"}),
}
# Options beyond the defaults, by the variant's name: for all optimizers, and for some.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "svd": {"orthogonalize": "svd"},
    "gram": {"orthogonalize": "gram"},
    "newton_schulz": {"orthogonalize": "newton_schulz"},
    "polar_express": {"orthogonalize": "polar_express"},
    "no nesterov": {"nesterov": False, "momentum": 0.8},
    "decay": {"weight_decay": 0.3, "maximize": True},
    "average": {"average": 0.2},
}
MEMBER_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "AngularMuown": {
        "tangent": {"orthogonalize": "tangent", "tangent_steps": 2},
        "log radius": {"radius": "log_adam", "radius_lr": 0.005},
        "fixed": {"radius": "fixed", "scale": "rms"},
        "kappa": {"warmup_steps": 5, "decay_scale": 0.1, "decay_degree": 0.5},
    },
    "Muown": {"log radius": {"radius": "log_adam"}, "fixed": {"radius": "fixed"}},
    "NorMuown": {"row beta": {"row_beta": 0.5}},
    "NorMuon": {"row beta": {"row_beta": 0.5}},
    "Muon": {"adam_rms": {"scale": "adam_rms"}},
    "MagnitudeDirection": {"radius": {"radius_lr": 0.05}},
}


def noise(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=shape))


def start(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    params = {}
    for i, (name, (shape, _)) in enumerate(SHAPES.items()):
        params[name] = nn.Parameter((0.3 * noise(shape, 10**6 + i)).to(dtype))
    params["wide"].data[2] = 0.0  # a zero row
    return params


def optimizer_of(member: str, params: dict[str, nn.Parameter], values: dict[str, Any]) -> Any:
    groups = [{"params": [(name, p)], **SHAPES[name][1]} for name, p in params.items()]
    return getattr(angular_muown, member)(groups, lr=0.05, **values)


def advance(optimizer: Any, params: dict[str, nn.Parameter], steps: range) -> None:
    for t in steps:
        for i, p in enumerate(params.values()):
            p.grad = (noise(tuple(p.shape), 10 * t + i) + 0.1 * p.detach().double()).to(p.dtype)
        optimizer.step()


# Files: the optimizer's name and options.
KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    **{member: (member, {"average": 0.2}) for member in MEMBERS},
    "AngularMuown-int8": ("AngularMuown", {"state_dtype": "int8"}),
}


def archive(name: str) -> dict[str, Any]:
    member, values = KEPT[name]
    params = start(torch.float64)
    optimizer = optimizer_of(member, params, values)
    advance(optimizer, params, range(5))
    middle = {name: p.detach().clone() for name, p in params.items()}
    state = copy.deepcopy(optimizer.state_dict())
    advance(optimizer, params, range(5, 10))
    return {"middle": middle, "state": state, "end": {n: p.detach() for n, p in params.items()}}


def digests() -> dict[str, str]:
    result = {}
    for member in MEMBERS:
        for variant, values in {**VARIANTS, **MEMBER_VARIANTS.get(member, {})}.items():
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                params = start(dtype)
                optimizer = optimizer_of(member, params, values)
                advance(optimizer, params, range(50))
                tensors = [*params.values()]
                for p in params.values():
                    state = optimizer.state[p]
                    tensors += [state[key] for key in sorted(state)]
                digest = hashlib.sha256()
                for t in tensors:
                    digest.update(t.detach().contiguous().flatten().view(torch.uint8).numpy())
                result[f"{member}, {variant}, {dtype}"] = digest.hexdigest()[:16]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("names", nargs="*", default=list(KEPT), help="files to write")
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    if arguments.bits:
        for name, digest in digests().items():
            print(digest, name)
        return
    for name in arguments.names:
        torch.save(archive(name), FOLDER / f"{name}.pt")


if __name__ == "__main__":
    main()
