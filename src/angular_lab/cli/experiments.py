"""The commands about experiments: experiments, sweep, report, theory, convert-runs."""

import argparse
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING

from angular_lab.errors import UserError
from angular_lab.experiments.statistics import BestRate
from angular_lab.text import command

if TYPE_CHECKING:  # it imports torch
    from angular_lab.sweeps.sweep import Sweep

EXPERIMENT = "a name that `angular-lab experiments` lists"
PROCESSES = (
    "worker processes on this machine; a small model does not fill a large GPU, so several on one "
    "raise the total throughput; several GPUs are used in turn"
)
NUMBER = re.compile(r"<?[\d.,e+-]+( [a-z]+)?")  # perhaps with a unit
log = logging.getLogger(__name__)


def seconds(text: str) -> float:
    """Parse 540s, 30m or 2h; a plain number is seconds."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    try:
        number = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"'{text}': write a time above 0, as in 540s, 30m or 2h")
    return number


def seed_list(text: str) -> tuple[int, ...]:
    """Parse 0,1,2 or 0..2, which is the same."""
    first, dots, last = text.partition("..")
    try:
        seeds = range(int(first), int(last) + 1) if dots else map(int, text.split(","))
        numbers = tuple(dict.fromkeys(seeds))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"'{text}': write seeds as in 0,1,2 or 0..2")
    return numbers


def open_sweep(name: str, arguments: argparse.Namespace) -> "Sweep":
    """Return the sweep of an experiment, with what the command line changes about it."""
    from angular_lab.experiments.comparison import planned
    from angular_lab.experiments.definition import only_arms
    from angular_lab.sweeps.dry_run import check_specs
    from angular_lab.sweeps.sweep import Sweep

    _refuse_name_of_sweep(name, arguments)
    plan = planned(name, arguments.scale, arguments.data)
    data = arguments.data or plan.arms[0].spec.data
    if plan.scale == "paper" and data == "stdlib":
        raise UserError(
            "--scale paper without a corpus would train on Python's standard library: prepare one "
            "(angular-lab prepare --help) and give its folder with --data"
        )
    if arguments.seeds:
        plan = replace(plan, seeds=arguments.seeds)
    if arguments.only:
        plan = only_arms(plan, arguments.only)
    prepare = not arguments.dry_run
    sweep = Sweep(plan, arguments.out, arguments.data, arguments.device, arguments.name, prepare)
    check_passes(sweep, arguments.passes)
    check_specs(sweep)
    return sweep


def _refuse_name_of_sweep(name: str, arguments: argparse.Namespace) -> None:
    """Raise UserError if a name is not that of an experiment, but of a sweep in the store."""
    from angular_lab.experiments.comparison import EXPERIMENTS
    from angular_lab.sweeps.sweep_file import SWEEPS, SweepRecord

    path = arguments.out / SWEEPS / f"{name}.json"
    if name in EXPERIMENTS or not path.is_file():
        return
    record = SweepRecord.read(path)
    if record.experiment in EXPERIMENTS:
        named = () if name == f"{record.experiment}-{record.scale}" else ("--name", name)
        words = (record.experiment, "--scale", record.scale, *named)
        raise UserError(f"'{name}' is a sweep: give its experiment, as in "
                        f"{command(arguments.command, *words)}")  # fmt: skip
    raise UserError(
        f"'{name}' is a grid, and {arguments.command} takes an experiment of the lab: run the grid "
        f"again as angular-lab grid {record.scale} ... --processes N, with the words it had"
    )


def check_passes(sweep: "Sweep", most: float) -> None:
    """Raise UserError if a run would read its corpus more often than the user allows."""
    passes = sweep.passes
    if passes == inf:
        raise UserError(
            f"data={sweep.longest.data}: no training tokens; make them with angular-lab prepare"
        )
    if passes is not None and passes > most:
        allowed = ceil(10 * passes) / 10
        raise UserError(
            f"the longest run of {sweep.name} makes {sweep.passes_text}, and --passes allows "
            f"{most:g}: prepare more text, or allow it with --passes {allowed:g}"
        )


def sweep(arguments: argparse.Namespace) -> None:
    names = [*dict.fromkeys(arguments.experiments)]
    if arguments.name and len(names) > 1:
        raise UserError(
            f"--name {arguments.name} for {len(names)} experiments: give one experiment"
        )
    sweeps = [open_sweep(name, arguments) for name in names]
    if arguments.dry_run:
        print_dry_run(sweeps, arguments.tflops)
    else:
        run_and_print(sweeps, arguments)


def _print_table(rows: "list[dict[str, str]]") -> None:
    """Print the rows with numbers aligned right."""
    from angular_lab.report.tables import Mark, text_table

    def cell(text: str) -> "Mark | str":
        return Mark(0, "", text) if NUMBER.fullmatch(text) else text

    print(text_table([{name: cell(text) for name, text in row.items()} for row in rows]))


def print_dry_run(sweeps: "list[Sweep]", tflops: float | None) -> None:
    """Print what the sweeps would train and what that costs."""
    from angular_lab.sweeps import dry_run

    for i, sweep in enumerate(sweeps):
        works = dry_run.work_of(sweep)
        print(f"{chr(10) * bool(i)}{sweep.experiment.title}\n")
        _print_table(dry_run.rows(works))
        print("\n".join(["", *dry_run.notes(sweep, works, tflops)]))


def run_and_print(sweeps: "list[Sweep]", arguments: argparse.Namespace) -> None:
    """Run the sweeps and print what came out."""
    from angular_lab.sweeps.dry_run import check_disk
    from angular_lab.sweeps.sweep import run_sweeps
    from angular_lab.sweeps.workers import run_in_processes

    settle(sweeps, arguments)
    check_disk(sweeps)
    budget = arguments.budget - (time.monotonic() - arguments.began)  # imports take seconds
    if arguments.processes == 1:
        run_sweeps(sweeps, budget, arguments.extend)
    else:
        run_in_processes(sweeps, arguments.processes, budget, arguments.extend)
    for finished in sweeps:
        _print_outcome(finished)
        if arguments.until or arguments.command == "grid":
            _print_pairs(finished)
    files = (finished.path for finished in sweeps)
    print(f"for a page about it: {command('report', *files)}")


def settle(sweeps: "list[Sweep]", arguments: argparse.Namespace) -> None:
    """Let open pairs have more judging seeds, if the user asked for that."""
    until, most = arguments.until, arguments.max_seeds
    if until is None and most is None:
        return
    if until is None or most is None:
        missing = "--until settled" if until is None else "--max-seeds N"
        given = f"--max-seeds {most}" if until is None else f"--until {until}"
        raise UserError(f"{given} without {missing}: give both")
    if most < 2:
        raise UserError(f"--max-seeds {most}: a verdict takes at least 2 judging seeds")
    for sweep in sweeps:
        if not sweep.experiment.pairs:
            raise UserError(f"--until settled: {sweep.experiment.name} does not compare methods")
        if not sweep.experiment.trained_pairs:
            raise UserError(
                f"--until settled: --only leaves no two methods that {sweep.experiment.name} "
                "compares; name both of a pair"
            )
        sweep.max_seeds = most


def _print_pairs(sweep: "Sweep") -> None:
    for (a, b), verdict in sweep.verdicts().items():
        if verdict is None:
            print(f"{a} below {b}: not judged, a run is unfinished or no value was chosen")
        else:
            left = f"; to settle: {verdict.to_settle}" if verdict.to_settle else ""
            seeds = ", ".join(map(str, verdict.paired.seeds))
            print(f"{a} below {b}: {verdict.label} (seeds {seeds}){left}")


def _print_outcome(sweep: "Sweep") -> None:
    plan, chosen = sweep.experiment, sweep.chosen
    arms = [arm for arm in plan.trained_arms if not arm.variant_of]
    width, seed = max(len(arm.label) for arm in arms), plan.seeds[0]
    for arm in arms:
        print(f"{arm.label:{width}}  {_outcome(chosen.get(arm.label), seed)}")
    print(sweep.path)


def _outcome(best: BestRate | None, seed: int) -> str:
    if best is None:
        return "every value diverged; --extend N tries smaller ones where there are several"
    # a single value is at both ends: there is no grid, no choice and no edge to report
    choice = ", which chose it" if len(best.extend) < 2 else ""
    edge = f", at the grid's edge: {best.extend[0]}" if len(best.extend) == 1 else ""
    return f"best {best.lr:g}, loss {best.loss:.4f} on seed {seed}{choice}{edge}"


def report(arguments: argparse.Namespace) -> None:
    from angular_lab.report.report import make_report

    print(make_report(arguments.sources, arguments.out))


def theory(arguments: argparse.Namespace) -> None:
    from angular_lab.theory.measure import measure
    from angular_lab.theory.page import make_page

    measure(arguments.parts, arguments.results, arguments.data, arguments.quick)
    print(make_page(arguments.results, arguments.out))


def experiments(arguments: argparse.Namespace) -> None:
    from angular_lab.experiments.cost import listing, questions

    rows, note = listing(arguments.scale)
    _print_table(questions())
    print()
    _print_table(rows)
    print(f"\n{note}")


def convert_runs(arguments: argparse.Namespace) -> None:
    from angular_lab.convert import convert

    print(convert(arguments.sources, arguments.out))


def add_experiments(add: Callable[..., argparse.ArgumentParser]) -> None:
    sub = add("experiments", experiments, "list the experiments and what they cost, by device")
    sub.add_argument("--scale", help="paper, s or nano; default: all")
    sub = add("report", report, "make a page about sweeps and runs")
    sub.add_argument("sources", type=Path, nargs="*", default=[Path()], metavar="source",
                     help="files of sweeps, run folders, or folders that hold them at any depth; "
                     "default: the working directory")  # fmt: skip
    sub.add_argument("-o", "--out", type=Path, default=Path("report"), help="default: report")
    sub = add("theory", theory, "measure the paper's theory here, and make a page about it")
    sub.add_argument("parts", nargs="*", metavar="part", help="solver, guarantee, regimes, "
                     "geometry, shortcut; page only draws; default: all")  # fmt: skip
    sub.add_argument("--results", type=Path, default=Path("results/theory"), help="JSON files")
    sub.add_argument("-o", "--out", type=Path, default=Path("build/theory"), help="the page")
    sub.add_argument("--data", default="stdlib", help="folder of shards for the training run")
    sub.add_argument("--quick", action="store_true", help="toy sizes: a look at the page only")
    sub = add("convert-runs", convert_runs, "convert runs and sweeps of the first edition")
    help_text = "folders of sweeps or runs; give those that share runs at once"
    sub.add_argument("sources", type=Path, nargs="+", metavar="folder", help=help_text)
    sub.add_argument("--out", type=Path, required=True, help="folder for runs/ and sweeps/")
    summary = "run experiments on this machine; run again to continue"
    sub = add("sweep", sweep, summary)
    sub.add_argument("experiments", nargs="+", metavar="experiment", help=EXPERIMENT)
    sub.add_argument("--budget", type=seconds, default=inf, help="stop after 540s, 30m, 2h")
    sub.add_argument("--processes", type=int, default=1, help=PROCESSES)
    add_dry_run(sub)
    add_sweep_options(sub)


def add_until(sub: argparse.ArgumentParser) -> None:
    help_text = "add judging seeds to pairs whose verdict is open, at the last horizon"
    sub.add_argument("--until", choices=["settled"], help=help_text)
    sub.add_argument("--max-seeds", type=int, metavar="N", help="judging seeds of a pair at most")


def add_passes(sub: argparse.ArgumentParser) -> None:
    help_text = "how often a run may read its corpus; default: 1"
    sub.add_argument("--passes", type=float, default=1.0, metavar="N", help=help_text)


def add_dry_run(sub: argparse.ArgumentParser) -> None:
    help_text = "only print the runs and what they cost; nothing is written"
    sub.add_argument("--dry-run", action="store_true", help=help_text)
    help_text = "with --dry-run: speed of your device, for its hours"
    sub.add_argument("--tflops", type=tflops, metavar="X", help=help_text)


def tflops(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < inf:
        raise argparse.ArgumentTypeError(f"'{text}': write TFLOP/s above 0, as in 400")
    return speed


def add_sweep_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--scale", default="nano", help="paper, s or nano; default: nano")
    sub.add_argument("--data", help="folder of shards; default: the scale's own")
    sub.add_argument("--out", type=Path, default=Path(), help="folder with runs/ and sweeps/; "
                     "default: the working directory")  # fmt: skip
    sub.add_argument("--name", help="of the sweep's file; default: experiment-scale")
    sub.add_argument("--device", default="", help="cpu or cuda; default: cuda if available")
    help_text = "add up to N values at the edge of a grid where its best value is"
    sub.add_argument("--extend", type=int, default=0, metavar="N", help=help_text)
    add_until(sub)
    help_text = "as in 0,1,2 or 0..2: the first picks the value, the others judge it; default: the "
    sub.add_argument("--seeds", type=seed_list, metavar="SEEDS", help=help_text + "experiment's")
    help_text = "train only methods whose name matches this, as in 'normuon*'; may be repeated"
    sub.add_argument("--only", action="append", metavar="METHOD", help=help_text)
    add_passes(sub)
