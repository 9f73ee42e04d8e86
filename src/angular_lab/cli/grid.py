"""The command grid: an experiment of one's own in one line."""

import argparse
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from angular_lab.cli.experiments import (
    PROCESSES,
    add_dry_run,
    add_passes,
    add_until,
    check_passes,
    run_and_print,
    seconds,
)
from angular_lab.cli.runs import horizons
from angular_lab.errors import UserError

if TYPE_CHECKING:  # it imports torch
    from angular_lab.sweeps.sweep import Sweep

MANY = 200  # trials that a grid has without --yes
EPILOG = """\
values of an axis:
  optim.lr=0.01,0.02,0.04       these
  optim.lr=0.005:0.04:x2        from 0.005 to 0.04, each twice the one before
  optim.momentum=0.9:0.98:+0.02 from 0.9 to 0.98 in steps of 0.02
  seed=0..2                     0, 1, 2
  optim.lr@muon=0.01:0.04:x2    for methods that have the value muon: the others keep theirs

Each method takes the optim.lr that is best on one seed (--tune and --pick-on change that), and the
other seeds judge it. Values of other settings make methods, which are compared with the first.

  angular-lab grid s optim.name=muon,normuon optim.lr=0.005:0.04:x2 seed=0..2 --dry-run
"""


def grid(arguments: argparse.Namespace) -> None:
    sweep = _sweep(arguments)
    if arguments.dry_run:
        from angular_lab.cli.experiments import print_dry_run

        print_dry_run([sweep], arguments.tflops)
        print(f"name       {sweep.name}")
        return
    trials = sweep.counts()[1]
    if trials > MANY and not arguments.yes:
        raise UserError(
            f"{trials} trials: look at them with --dry-run, and add --yes to train more than {MANY}"
        )
    run_and_print([sweep], arguments)


def _sweep(arguments: argparse.Namespace) -> "Sweep":
    from angular_lab.experiments.comparison import EXPERIMENTS
    from angular_lab.experiments.grid import make_grid
    from angular_lab.sweeps.dry_run import check_specs
    from angular_lab.sweeps.growth import check_growth
    from angular_lab.sweeps.sweep import Sweep

    words, name = arguments.overrides, arguments.name
    if arguments.data:
        if any(word.startswith("data=") for word in words):
            raise UserError("data=... and --data say the same: give one of them")
        words = [*words, f"data={arguments.data}"]
    if name in EXPERIMENTS:
        raise UserError(f"--name {name} is an experiment of the lab: give another name")
    plan = make_grid(
        arguments.named_run,
        words,
        horizons=arguments.horizons or (),
        tune=arguments.tune,
        pick_on=arguments.pick_on,
        ours=arguments.ours,
        name=name,
    )
    prepare = not arguments.dry_run
    sweep = Sweep(plan, arguments.out, None, arguments.device, plan.name, prepare)
    check_passes(sweep, arguments.passes)
    check_specs(sweep)
    check_growth(sweep)
    return sweep


def add_grid(add: Callable[..., argparse.ArgumentParser]) -> None:
    summary = "compare settings of a named run; run again to continue"
    sub = add("grid", grid, summary, "named_run", epilog=EPILOG)
    sub.add_argument("overrides", nargs="*", metavar="key=values",
                     help="settings to change, and axes with several values")  # fmt: skip
    sub.add_argument("--horizons", type=horizons, metavar="STEPS,STEPS",
                     help="where runs end; default: the named run's steps. With several, cooldowns "
                     "branch off one run")  # fmt: skip
    sub.add_argument("--tune", default="optim.lr", metavar="KEY",
                     help="the setting of which each method takes its best value; default: "
                     "optim.lr")  # fmt: skip
    help_text = "the seed that chooses this value; default: the first. none: nothing is tuned, and "
    help_text += "every value is a method on all seeds"
    sub.add_argument("--pick-on", metavar="SEED", help=help_text)
    help_text = "the method that is compared with the others; default: the first"
    sub.add_argument("--ours", metavar="METHOD", help=help_text)
    sub.add_argument("--name", help="of the sweep's file; default: one that follows from the words")
    sub.add_argument("--out", type=Path, default=Path(), help="folder with runs/ and sweeps/; "
                     "default: the working directory")  # fmt: skip
    sub.add_argument("--data", help="folder of shards; the same as data=FOLDER")
    sub.add_argument("--device", default="", help="cpu or cuda; default: cuda if available")
    sub.add_argument("--processes", type=int, default=1, help=PROCESSES)
    sub.add_argument("--budget", type=seconds, default=inf, help="stop after 540s, 30m, 2h")
    help_text = "add up to N values at the edge of a grid where its best value is"
    sub.add_argument("--extend", type=int, default=0, metavar="N", help=help_text)
    add_until(sub)
    add_passes(sub)
    add_dry_run(sub)
    sub.add_argument("--yes", action="store_true", help=f"train more than {MANY} trials")
