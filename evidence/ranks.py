"""Kept benchmarks of one rank out of many, and the cost model of copies."""

from typing import Any
from unittest.mock import patch

from angular_muown.distributed import copies
from angular_muown.distributed.mesh import RankGroup
from angular_muown.stages.orthogonalize import polar_express
from benchmarks.shapes import gpt124, llama1b
from evidence.kept import Rows, read_json
from evidence.measures import Facts, spread

MODELS = ("gpt124", "llama1b")


def _rows(file: str, model: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_json(f"ranks_{file}")[model]
    return rows


def _row(file: str, model: str, ranks: int) -> dict[str, Any]:
    return next(row for row in _rows(file, model) if row["ranks"] == ranks)


def facts() -> Facts:
    repeated = ("h200", "h200_first", "hsdp_h200", "hsdp_h200_first")
    two, eight = (_row("h200", "llama1b", ranks) for ranks in (2, 8))
    goals = {8: 8.5, 64: 2.5}  # milliseconds of llama1b, by ranks
    times = {r: [_row(f, "llama1b", r)["ms"] for f in ("h200", "h200_first")] for r in goals}
    gpt124_ms = spread(_row(file, "gpt124", 8)["ms"] for file in repeated)
    members = {row["optimizer"]: row["ms"] for row in _rows("members_h200", "llama1b")}
    return {
        "ranks": {
            "gpt124_on_8": gpt124_ms,
            "gpt124_goal_missed": gpt124_ms["min"] > 1.2,
            "llama1b_goals_reached": all(max(times[r]) < goal for r, goal in goals.items()),
            "members_on_8": members,
            "llama1b_memory_on_2": two["extra_mib"] / two["shard_mib"],
            "llama1b_memory_on_8_above_a_quarter": eight["extra_mib"] - eight["shard_mib"] / 4,
        },
        "copies": _copies(),
    }


def _copies() -> Facts:
    """What the cost model says of nodes with 8 ranks."""
    shapes: dict[str, list[Any]] = {"gpt124": gpt124(), "llama1b": llama1b()}
    node, across = RankGroup(tuple(range(8)), 0), RankGroup(tuple(range(0, 64, 8)), 0)
    found: Facts = {}
    with patch.object(copies, "ranks_per_node", lambda: 8):
        for model, matrices in shapes.items():
            products, wire = copies.modelled_times(matrices, polar_express, node)
            found[model] = {
                "products_ms": products / 1e3,
                "wire_ms": wire / 1e3,
                "shares_within_a_node": copies.sharing_pays(matrices, polar_express, node, 1),
                "shares_across_nodes": copies.sharing_pays(matrices, polar_express, across, 8),
            }
    alone = {model for model, x in found.items() if not x["shares_across_nodes"]}
    return found | {"only_gpt124_steps_alone_across_nodes": alone == {"gpt124"}}


def _wire(row: dict[str, Any]) -> str:
    return f"{row['wire_ms']:.2f}" if "wire_ms" in row else ""


def strong_scaling() -> Rows:
    rows = []
    for model in MODELS:
        eager = {row["ranks"]: f"{row['ms']:.1f}" for row in _rows("h200_eager", model)}
        alone = _row("h200", model, 1)["ms"]
        for row in _rows("h200", model):
            ranks = row["ranks"]
            title = model if ranks == 1 else ""
            times = [f"{row['ms']:.1f}", eager.get(ranks, ""), f"{alone / ranks:.2f}", _wire(row)]
            memory = [f"{row['shard_mib']:,.1f}", f"{row['extra_mib']:,.0f}"]
            rows.append([title, str(ranks), *times, *memory])
    head = ["strong scaling", "ranks", "ms per step", "eager exchange"]
    head += ["one GPU's time over the ranks", "wire, modelled", "shard, MiB", "above state, MiB"]
    return [head, *rows]


def weak_scaling() -> Rows:
    sources = {
        "gpt124": ("h200", "gpt124", 1),
        "llama1b, 4 of 16 layers": ("4layers_h200", "llama1b", 2),
        "llama1b": ("h200", "llama1b", 8),
        "llama8b": ("8b_h200", "llama8b", 64),
        "llama70b": ("70b_h200", "llama70b", 512),
    }
    head = ["weak scaling", "ranks", "parameters per rank", "ms per step", "wire, modelled"]
    rows = []
    for title, source in sources.items():
        row = _row(*source)
        parameters = f"{row['shard_mib'] * 2**20 / 4e6:.0f}M"
        times = f"{row['ms']:.1f}", _wire(row), f"{row['extra_mib']:,.0f}"
        rows.append([title, str(source[2]), parameters, *times])
    return [[*head, "above state, MiB"], *rows]


def placements() -> Rows:
    titles = {"columns": "columns", "hsdp": "HSDP, nodes of 8", "ddp": "DDP, nodes of 8"}
    rows = []
    for name, title in titles.items():
        for ranks in (8, 64):
            times = (f"{_row(f'{name}_h200', model, ranks)['ms']:.1f}" for model in MODELS)
            rows.append([title if ranks == 8 else "", str(ranks), *times])
    return [["ms per step, rank 0", "ranks", *MODELS], *rows]
