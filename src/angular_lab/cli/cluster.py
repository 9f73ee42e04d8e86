"""The command plan-ranks."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from angular_lab.cluster.machine import Machine, flag

MODELS = ("llama-8b", "llama-70b", "moe-1t")
WIRES = ("float32", "bfloat16")
MOST = 1 << 20


def rank_counts(text: str) -> list[int]:
    """8..16384 doubles from 8 on; 64 and 8,96,512 are what they say."""
    try:
        if ".." in text:
            first, last = map(int, text.split(".."))
            found = [first << i for i in range(64) if first << i <= last] if first > 0 else []
        else:
            found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write 8..16384 (doubling), 64, or 8,96,512; from 1 to {MOST:,}"
        )
    return found


def plan_ranks(arguments: argparse.Namespace) -> None:
    from angular_lab.cluster import simulate as planning
    from angular_lab.cluster.models import MODELS as SHAPES

    machine = Machine(**{f.name: getattr(arguments, f.name) for f in fields(Machine)})
    if arguments.hsdp < 1:
        raise ValueError(f"--hsdp {arguments.hsdp}: it must be at least 1")
    rows = []
    for ranks in arguments.ranks:
        print(f"{ranks:,} ranks", file=sys.stderr)
        shapes = SHAPES[arguments.model]
        rows.append(
            planning.plan_ranks(shapes, ranks, machine, arguments.hsdp, arguments.wire_dtype)
        )
    content = planning.to_json(arguments.model, machine, rows)
    print(content if arguments.json else planning.table(rows))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        stem = arguments.out / f"plan_{arguments.model}"
        stem.with_suffix(".json").write_text(content + "\n")
        planning.plot(rows, stem.with_suffix(".png"))
    if arguments.plot:
        planning.plot(rows, arguments.plot)


def add_ranks(add: Callable[..., argparse.ArgumentParser]) -> None:
    summary = "a step over ranks that nobody has: work, bytes, memory, estimated time"
    sub = add("plan-ranks", plan_ranks, summary)
    sub.add_argument("--model", choices=MODELS, required=True)
    sub.add_argument("--ranks", type=rank_counts, required=True, help="8..16384, 64 or 8,96,512")
    sub.add_argument("--hsdp", type=int, default=1, metavar="REPLICAS", help="that share the work")
    for field in fields(Machine):
        kind = type(field.default)
        text = f"{field.metadata['help']}; default: {field.default:g}"
        sub.add_argument(flag(field.name), type=kind, default=field.default, help=text)
    sub.add_argument("--wire-dtype", choices=WIRES, help="default: bfloat16, as on a GPU")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="a picture over ranks")
    sub.add_argument("--out", type=Path, metavar="DIR", help="picture and JSON in a folder")
    sub.add_argument("--json", action="store_true", help="JSON instead of the table")
