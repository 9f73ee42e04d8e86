"""The command pace: which optimizers to time, and what to print of it."""

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from angular_lab.config.named_runs import named_run
from angular_lab.config.overrides import override
from angular_lab.pace.record import PACE
from angular_lab.text import counted

if TYPE_CHECKING:
    from angular_lab.pace.record import Pace

NO_FACTOR = "the times are printed without factors (--allow-shared prints those too)"
log = logging.getLogger(__name__)


def pace(arguments: argparse.Namespace) -> None:
    from angular_lab.pace.measure import measure
    from angular_lab.training.build import OPTIMIZER_NAMES

    text = arguments.optimizers
    names = [*OPTIMIZER_NAMES] if text == "all" else [x.strip() for x in text.split(",")]
    options = ("rounds", "steps", "warmup", "reference", "device", "seed")
    given = {name: x for name in options if (x := getattr(arguments, name)) is not None}
    measured = measure(
        override(named_run(arguments.named_run), arguments.overrides), names, **given
    )
    path = measured.write(arguments.out)
    with_factors = arguments.allow_shared or not measured.disturbed_by
    if arguments.json:
        print(json.dumps(_summary(measured, path, with_factors), indent=1))
    else:
        print(_text(measured, with_factors))
        print(f"\n{path}")
    for reason in measured.disturbed_by:
        log.warning("warning: the device was shared: %s", reason)
    if measured.disturbed_by and not with_factors:
        log.warning(
            "warning: %s; run it again when the device is free, or use --allow-shared", NO_FACTOR
        )


def _summary(measured: "Pace", path: Path, with_factors: bool) -> dict[str, Any]:
    rows = measured.rows()
    for row in rows:
        if not with_factors:
            row["time_ratio"] = None
    return {
        "file": str(path),
        "device": measured.device,
        "shared": measured.disturbed_by,
        "reference": measured.reference,
        "rows": rows,
    }


def _text(measured: "Pace", with_factors: bool) -> str:
    from angular_lab.report.results import pace_rows
    from angular_lab.report.tables import text_table

    spec = measured.spec
    first = measured.timed[0].seconds
    steps = counted(len(first[0]), "step")
    head = (
        f"{spec.name} on {measured.device}: {spec.batch} sequences of {spec.model.sequence} tokens "
        f"a step, {len(first)} rounds of {steps} in turn"
    )
    return f"{head}\n\n{text_table(pace_rows(measured, with_factors))}"


def add_pace(add: Callable[..., argparse.ArgumentParser]) -> None:
    summary = "time the training steps of several optimizers in turn on one device"
    sub = add("pace", pace, summary, "named_run")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    sub.add_argument(
        "--optimizers", default="all",
        help="names separated by commas, or all; default: all",
    )  # fmt: skip
    sub.add_argument("--reference", help="compare the others to this one; default: adamw")
    sub.add_argument("--rounds", type=int, help="turns of each optimizer; default: 10")
    sub.add_argument("--steps", type=int, help="timed steps in a turn; default: 20")
    sub.add_argument(
        "--warmup", type=int, help="steps of each optimizer before the first round; default: 5"
    )
    sub.add_argument("--seed", type=int, help="of the order of the turns; default: 0")
    sub.add_argument("--device", help="cpu or cuda; default: cuda if available")
    sub.add_argument("--out", type=Path, default=Path(PACE), help="folder; default: pace")
    sub.add_argument(
        "--allow-shared", action="store_true",
        help="print factors, marked, although other processes used the device",
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print JSON instead of text")
