"""What rounding does to the polar factor: forms of the iteration on several spectra, on the CPU.

    python benchmarks/spectra.py --json results/spectra.json

Products are computed in float64 and rounded as a GPU would store them: `bf16` is the iteration as
published, the others are forms of angular_muown.kernels.polar_chain in float16. Numbers are
relative errors of Q (Frobenius) against the iteration without rounding.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from angular_muown.kernels.polar_chain import SCALE, Kind, products
from angular_muown.stages.orthogonalize import POLAR_EXPRESS, POLAR_EXPRESS_MARGIN

Round = Callable[[Tensor], Tensor]
FORMS = {"single": (1, 1, 1, 1, 1), "pairs": (1, 2, 2), "pairs first": (2, 2, 1)}


def iterate(X: Tensor, rounded: Round) -> Tensor:
    X = rounded(X)
    for a, b, c in POLAR_EXPRESS:
        A = rounded(X @ X.mT)
        X = rounded(a * X + rounded(b * A + c * A @ A) @ X)
    return X


def by_schedule(X: Tensor, segments: tuple[int, ...]) -> Tensor:
    values = [(SCALE * X).half().double()]
    for product in products(POLAR_EXPRESS, segments):
        L, R = values[product.left], values[product.right]
        out = product.alpha * (L @ L.mT if product.kind is Kind.GRAM else L @ R)
        if product.C >= 0:
            out = out + product.beta * values[product.C]
        if product.kind is not Kind.APPLY:
            out.diagonal().add_(product.delta)
            out = out.triu() + out.triu(1).mT  # half is computed, half mirrored
        values.append(out.half().double())
    return values[-1] / SCALE


def spectra(m: int, n: int) -> dict[str, Tensor]:
    def noise() -> Tensor:
        return torch.randn(m, n, dtype=torch.float64)

    U, V = (torch.linalg.qr(torch.randn(side, m, dtype=torch.float64))[0] for side in (m, n))

    def of(values: Tensor) -> Tensor:
        return U @ torch.diag(values.double()) @ V.mT

    at = torch.arange(m)
    row, column = noise(), noise()
    row[3] *= 1e4
    column[:, 3] *= 1e4
    rank_one = torch.randn(m, 1, dtype=torch.float64) @ torch.randn(1, n, dtype=torch.float64)
    return {
        "gauss": noise(),
        "1/k": of(1 / (at + 1.0)),
        "1..1e-3": of(torch.logspace(0, -3, m)),
        "1..1e-12": of(torch.logspace(0, -12, m, dtype=torch.float64)),
        "rank one": of(at == 0),
        "rank one + noise": 3 * rank_one + noise(),
        "two values": of(torch.where(at < m // 2, 1.0, 0.01)),
        "huge row": row,
        "huge column": column,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs=2, type=int, default=[256, 1024], help="short side first")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    errors: dict[str, dict[str, float]] = {}
    for name, X in spectra(*arguments.shape).items():
        X = X / (POLAR_EXPRESS_MARGIN * X.norm())
        exact = iterate(X, lambda x: x)
        made = {"bf16": iterate(X, lambda x: x.bfloat16().double())}
        made |= {form: by_schedule(X, segments) for form, segments in FORMS.items()}
        errors[name] = {k: float((Q - exact).norm() / exact.norm()) for k, Q in made.items()}
        print(f"{name:18}", *(f"{k} {e:.1e}" for k, e in errors[name].items()), sep="  ")
    if arguments.json:
        content = {"shape": arguments.shape, "torch": torch.__version__, "errors": errors}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
