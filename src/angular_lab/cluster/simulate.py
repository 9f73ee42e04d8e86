"""Owners, imbalance, bytes, memory and estimated times of a step over ranks that nobody has.

The model's parameters are spread by torch over a fake process group, the real optimizer is made,
and its own plan is asked. Only times are estimates (`rank_cost.py`); the rest is arithmetic that a
real run would do as well.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from angular_lab.cluster.cost import Exchange, Machine, Team, estimate, polar_operations
from angular_lab.cluster.models import Grid, Shapes, pretended, sharded_model
from angular_lab.report.plots import Panel, Trace, save_png
from angular_muown import AngularMuown, Group, plan
from angular_muown.distributed.assignment import Assignment
from angular_muown.params.state import init_state


@dataclass(frozen=True)
class Figures:
    """For one number of ranks; bytes and seconds, of the rank that has most of each."""

    ranks: int
    replicas: int
    expert_ranks: int  # that divide the experts
    owned_least: int
    owned_most: int
    imbalance: float
    sent: float
    buffers: float
    state: float
    products: float
    wire: float
    rows: float
    total: float
    dominant: list[tuple[str, float]]


def local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def plan_ranks(
    shapes: Shapes, ranks: int, machine: Machine, replicas: int = 1, wire_dtype: str | None = None
) -> Figures:
    grid = Grid.of(shapes, ranks, replicas)
    with pretended(ranks):
        model = sharded_model(shapes, grid)
        stacks = ["*.experts.*"] if shapes.experts else []
        optimizer = AngularMuown(plan(model, stacks=stacks), wire_dtype=wire_dtype)
        return figures(optimizer, grid, machine)


def figures(optimizer: AngularMuown, grid: Grid, machine: Machine) -> Figures:
    exchanges = [_placed(found, grid) for found in optimizer.exchange_plan().assignments]
    plans = [exchange.plan for exchange in exchanges]
    names = {task.name.rpartition("[")[0] for found in plans for task in found.tasks}
    held = _Held.of(optimizer, names)
    times = estimate(
        exchanges, polar_operations(held.alone), held.matrix, held.shared, held.adamw, machine
    )
    owned, sent = torch.full((grid.ranks,), float(held.matrices)), torch.zeros(grid.ranks)
    for found in plans:
        # A team works for as many ranks as there are teams beside it: those with other experts.
        beside = grid.ranks // (found.places * found.copies)
        counts = Counter(found.owners.values())
        each = torch.tensor([counts[rank] for rank in range(len(found.loads))])
        owned += each.repeat_interleave(beside)
        sent = sent + found.traffic[0].repeat_interleave(beside)
    longest = sum(float(found.loads.max()) for found in plans) + held.alone
    mean = sum(float(found.loads.mean()) for found in plans) + held.alone
    return Figures(
        grid.ranks, grid.replicas, grid.experts, int(owned.min()), int(owned.max()),
        longest / mean if mean else 1.0, float(sent.max()),
        max((float(found.peaks.max()) for found in plans), default=0.0), held.state,
        times.products, times.wire, times.rows, times.total,
        [found.dominant for found in plans if found.dominant],
    )  # fmt: skip


def _placed(found: Assignment, grid: Grid) -> Exchange:
    """Experts are innermost, then shards, then replicas; ranks count through in this order."""
    stride = 1 if found.places == grid.shards else grid.experts
    return Exchange(found, (Team(found.places, stride), Team(found.copies, grid.shards)))


@dataclass(frozen=True)
class _Held:
    """What rank 0 holds: nobody holds more, because parts are cut by ceil division."""

    matrix: int  # entries
    shared: int  # of these, of parameters whose matrices are exchanged
    adamw: int
    matrices: int  # that lie whole here, and nowhere else
    alone: float  # s^2 (2l + s) over them
    state: int  # bytes

    @staticmethod
    def of(optimizer: AngularMuown, exchanged: set[str]) -> "_Held":
        kinds: Counter[tuple[int, bool, torch.Size, torch.Size]] = Counter()
        examples = {}
        for index, group in enumerate(optimizer.param_groups):
            for name, p in zip(group["param_names"], group["params"], strict=True):
                kind = (index, name in exchanged, p.shape, local(p).shape)
                kinds[kind] += 1
                examples[kind] = p
        total = dict.fromkeys(("matrix", "shared", "adamw", "matrices", "alone", "state"), 0)
        for kind, count in kinds.items():
            p, group = examples[kind], optimizer.param_groups[kind[0]]
            entries, is_matrix = count * local(p).numel(), group["algorithm"] == "matrix"
            total["matrix" if is_matrix else "adamw"] += entries
            total["shared"] += entries if kind[1] else 0
            total["state"] += count * _state_bytes(optimizer, p, group)
            if is_matrix and not kind[1]:
                (s, long), matrices = sorted(p.shape[-2:]), entries // p.shape[-2:].numel()
                total["matrices"] += matrices
                total["alone"] += matrices * s * s * (2 * long + s)
        return _Held(**total)


def _state_bytes(optimizer: AngularMuown, p: Tensor, group: Group) -> int:
    state: dict[str, Tensor] = {}
    recipe = optimizer.recipe(group) if group["algorithm"] == "matrix" else None
    init_state(p, state, group, recipe)
    return sum(local(t).nbytes for t in state.values())


HEAD = ("ranks", "owned", "imbalance", "sent GB", "buffers GB", "state GB", "products ms",
        "wire ms", "rows ms", "total ms")  # fmt: skip


def table(rows: Sequence[Figures]) -> str:
    cells: list[tuple[str, ...]] = [HEAD]
    for f in rows:
        owned = f"{f.owned_least}-{f.owned_most}" if f.owned_least < f.owned_most else f.owned_most
        ratio = f"{f.imbalance:.2f}{'*' if f.dominant else ''}"
        sizes = [x / 1e9 for x in (f.sent, f.buffers, f.state)]
        times = [1e3 * x for x in (f.products, f.wire, f.rows, f.total)]
        cells.append((f"{f.ranks:,}", str(owned), ratio, *map(_digits, (*sizes, *times))))
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEAD))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([*lines, *_notes(rows)])


def _digits(value: float) -> str:
    """Three of them, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _notes(rows: Sequence[Figures]) -> list[str]:
    """When each matrix begins to dominate."""
    first: dict[str, tuple[int, float]] = {}
    for f in rows:
        for name, share in f.dominant:
            first.setdefault(name, (f.ranks, share))
    return [
        f"* from {ranks:,} ranks on a single matrix, {name}, is more than a rank's mean share of "
        f"those that are exchanged with it ({share:.2f} times): more ranks do not make this shorter"
        for name, (ranks, share) in first.items()
    ]


def to_json(model: str, machine: Machine, rows: Sequence[Figures]) -> str:
    content = {"model": model, "machine": asdict(machine), "figures": [asdict(f) for f in rows]}
    return json.dumps(content, indent=2)


def plot(rows: Sequence[Figures], path: Path) -> None:
    """Estimated times, and what a rank sends and holds."""
    ranks = [f.ranks for f in rows]
    ticks = ranks[:: max(1, len(ranks) // 6)]

    def panel(names: dict[str, str], scale: float, label: str) -> Panel:
        traces = [
            Trace(ranks, [scale * getattr(f, key) for f in rows], i, text, "dots")
            for i, (key, text) in enumerate(names.items())
        ]
        return Panel(traces, "ranks", label, log_x=True, log_y=True, x_ticks=ticks)

    times = {k: k for k in ("total", "products", "wire", "rows")}
    sizes = {"sent": "sent per step", "buffers": "buffers", "state": "state"}
    save_png(
        [
            panel(times, 1e3, "ms per step, estimated"),
            panel(sizes, 1e-9, "GB per rank, the most of any"),
            panel({"imbalance": "longest work / mean"}, 1.0, "imbalance"),
        ],
        path,
    )
