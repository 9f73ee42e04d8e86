"""The command plan-ranks: simulate a step on many ranks and print, save or plot the result."""

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from angular_lab.cluster.machine import Machine, flag
from angular_lab.cluster.models import MODELS
from angular_lab.errors import UserError

log = logging.getLogger(__name__)
if TYPE_CHECKING:
    from angular_lab.cluster.simulate import Simulation

MAX_RANKS = 1 << 20
WIRE_DTYPES = ("float32", "bfloat16")
HEAD = ("ranks", "owned", "imbalance", "sent GB", "buffers GB", "state GB", "products ms",
        "wire ms", "rows ms", "total ms")  # fmt: skip


def rank_counts(text: str) -> list[int]:
    """Parse 64, 8,96,512 or 8..16384, which doubles from 8 on."""
    try:
        if ".." in text:
            first, last = map(int, text.split(".."))
            counts = [first << i for i in range(64) if first << i <= last] if first > 0 else []
        else:
            counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > MAX_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write 8..16384 (doubling), 64, or 8,96,512; from 1 to {MAX_RANKS:,}"
        )
    return counts


def plan_ranks(arguments: argparse.Namespace) -> None:
    from angular_lab.cluster.simulate import simulate

    machine = Machine(**{f.name: getattr(arguments, f.name) for f in fields(Machine)})
    if arguments.hsdp < 1:
        raise UserError(f"--hsdp {arguments.hsdp}: it must be at least 1")
    rows = []
    for ranks in arguments.ranks:
        log.info("%s ranks", f"{ranks:,}")
        shapes = MODELS[arguments.model]
        rows.append(simulate(shapes, ranks, machine, arguments.hsdp, arguments.wire_dtype))
    figures = [asdict(row) for row in rows]
    content = {"model": arguments.model, "machine": asdict(machine), "figures": figures}
    text = json.dumps(content, indent=2)
    print(text if arguments.json else table(rows))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        stem = arguments.out / f"plan_{arguments.model}"
        stem.with_suffix(".json").write_text(text + "\n")
        plot(rows, stem.with_suffix(".png"))
    if arguments.plot:
        plot(rows, arguments.plot)


def table(rows: "Sequence[Simulation]") -> str:
    cells: list[tuple[str, ...]] = [HEAD]
    for r in rows:
        owned = f"{r.owned_least}-{r.owned_most}" if r.owned_least < r.owned_most else r.owned_most
        imbalance = f"{r.imbalance:.2f}{'*' if r.dominant else ''}"
        sizes = [x / 1e9 for x in (r.sent, r.buffers, r.state)]
        times = [1e3 * x for x in (r.products, r.wire, r.rows, r.total)]
        cells.append((f"{r.ranks:,}", str(owned), imbalance, *map(_digits, (*sizes, *times))))
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEAD))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([*lines, *_notes(rows)])


def _digits(value: float) -> str:
    """Format with three significant digits, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _notes(rows: "Sequence[Simulation]") -> list[str]:
    """Note the number of ranks from which each matrix dominates."""
    first: dict[str, tuple[int, float]] = {}
    for row in rows:
        for name, share in row.dominant:
            first.setdefault(name, (row.ranks, share))
    return [
        f"* from {ranks:,} ranks on, a single matrix, {name}, takes more than a rank's mean share "
        f"of those exchanged with it ({share:.2f} times): more ranks do not shorten this"
        for name, (ranks, share) in first.items()
    ]


def plot(rows: "Sequence[Simulation]", path: Path) -> None:
    """Draw times, bytes and imbalance over the number of ranks."""
    from angular_lab.report.figures.plots import Panel, Trace, save_png

    ranks = [row.ranks for row in rows]
    ticks = ranks[:: max(1, len(ranks) // 6)]

    def panel(names: dict[str, str], scale: float, label: str) -> Panel:
        traces = [
            Trace(ranks, [scale * getattr(row, key) for row in rows], i, text, "dots")
            for i, (key, text) in enumerate(names.items())
        ]
        return Panel(traces, "ranks", label, log_x=True, log_y=True, x_ticks=ticks)

    times = {k: k for k in ("total", "products", "wire", "rows")}
    sizes = {"sent": "sent per step", "buffers": "buffers", "state": "state"}
    panels = [
        panel(times, 1e3, "ms per step, estimated"),
        panel(sizes, 1e-9, "GB per rank, the most of any"),
        panel({"imbalance": "longest work / mean"}, 1.0, "imbalance"),
    ]
    save_png(panels, path)


def add_ranks(add: Callable[..., argparse.ArgumentParser]) -> None:
    summary = "simulate a step on many ranks: work, bytes, memory, estimated time"
    sub = add("plan-ranks", plan_ranks, summary)
    sub.add_argument(
        "--model", help="shapes of the parameters", choices=tuple(MODELS), required=True
    )
    sub.add_argument("--ranks", type=rank_counts, required=True, help="8..16384, 64 or 8,96,512")
    text = "replicas of the model that share the work; default: 1"
    sub.add_argument("--hsdp", type=int, default=1, metavar="REPLICAS", help=text)
    for field in fields(Machine):
        kind, text = type(field.default), f"{field.metadata['help']}; default: {field.default:g}"
        sub.add_argument(flag(field.name), type=kind, default=field.default, help=text)
    sub.add_argument("--wire-dtype", choices=WIRE_DTYPES, help="default: bfloat16, as on a GPU")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="write a plot over the ranks")
    sub.add_argument("--out", type=Path, metavar="DIR", help="write JSON and a plot to a folder")
    sub.add_argument("--json", action="store_true", help="print JSON instead of the table")
