"""The commands experiments, sweep, submit, report, theory; they import what they need when run."""

import argparse
import shlex
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from angular_lab.experiments.statistics import BestRate

if TYPE_CHECKING:  # it imports torch
    from angular_lab.sweeps.sweep import Sweep

PROCESSES = (
    "worker processes on this machine; a small model does not fill a large GPU, so several on one "
    "raise the total throughput; several GPUs are used in turn"
)


def seconds(text: str) -> float:
    """540s, 30m, 2h; a plain number is seconds."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    number = float(text[:-1]) * unit if unit else float(text)
    if not number > 0:
        raise ValueError(text)
    return number


def sweep(arguments: argparse.Namespace) -> None:
    from angular_lab.experiments.comparison import planned
    from angular_lab.sweeps.sweep import Sweep, run_together
    from angular_lab.sweeps.workers import run_in_processes

    if arguments.out and len(arguments.names) > 1:
        raise ValueError(
            f"--out {arguments.out} for {len(arguments.names)} experiments: each has a folder of "
            "its own; leave --out away, and they are in runs/, or give one experiment"
        )
    sweeps = []
    for name in dict.fromkeys(arguments.names):
        plan = planned(name, arguments.scale, arguments.data)
        out = arguments.out or Path("runs") / f"{plan.name}-{plan.scale}"
        sweeps.append(Sweep(plan, out, arguments.data, arguments.device))
    budget = arguments.budget - (time.monotonic() - arguments.began)  # imports took seconds
    if arguments.processes == 1:
        run_together(sweeps, budget, arguments.extend)
    else:
        run_in_processes(sweeps, arguments.processes, budget, arguments.extend)
    for made in sweeps:
        _tell(made)
    print(f"a page about it: angular-lab report {shlex.join(str(made.root) for made in sweeps)}")


def _tell(sweep: "Sweep") -> None:
    lines, chosen = sweep.experiment.lines, sweep.chosen
    width, chooser = max(len(line.label) for line in lines), sweep.experiment.seeds[0]
    for line in lines:
        print(f"{line.label:{width}}  {_outcome(chosen.get(line.label), chooser)}")
    print(sweep.root)


def _outcome(best: BestRate | None, chooser: int) -> str:
    if best is None:
        return "every value diverged: --extend N tries smaller ones"
    # a single value is at both ends: there is no grid, no choice, and no edge to tell of
    choice = ", which chose it" if len(best.extend) < 2 else ""
    edge = f", at the grid's edge: {best.extend[0]}" if len(best.extend) == 1 else ""
    return f"best {best.lr:g}, loss {best.loss:.4f} on seed {chooser}{choice}{edge}"


def submit(arguments: argparse.Namespace) -> None:
    from angular_lab.experiments.comparison import planned
    from angular_lab.sweeps import slurm as launch
    from angular_lab.sweeps.sweep import Sweep

    plan = planned(arguments.name, arguments.scale, arguments.data)
    out: Path = arguments.out or Path("runs") / f"{plan.name}-{plan.scale}"
    settings = dict(launch.parameter(word) for word in arguments.set)
    runner = Sweep(plan, out, arguments.data, arguments.device)
    runner.extend = arguments.extend
    runner.check()
    runner.say(runner.state())
    found = launch.jobs(runner)
    print(launch.described(found, {"executor": arguments.executor, "folder": out, **settings}))
    if found and not arguments.dry_run:
        started = launch.submit(found, out / "jobs", arguments.executor, settings)
        runner.write()
        print("\n".join(str(job.job_id) for job in started))
        if arguments.executor == "local":
            print("\n".join(launch.wait(started)))


def report(arguments: argparse.Namespace) -> None:
    from angular_lab.report.report import make_report

    print(make_report(arguments.runs, arguments.out))


def theory(arguments: argparse.Namespace) -> None:
    from angular_lab.theory.measure import measure
    from angular_lab.theory.page import make_page

    measure(arguments.parts, arguments.results, arguments.data, arguments.quick)
    print(make_page(arguments.results, arguments.out))


def experiments(arguments: argparse.Namespace) -> None:
    from angular_lab.experiments.cost import listing

    print(listing(arguments.scale))


def add_experiments(add: Callable[..., argparse.ArgumentParser]) -> None:
    sub = add("experiments", experiments, "list the paper's experiments and what they cost here")
    sub.add_argument("--scale", default="", help="paper, s or nano; default: all")
    sub = add("report", report, "a page about sweeps and runs")
    sub.add_argument("runs", type=Path, nargs="+", help="folders with runs, at any depth")
    sub.add_argument("-o", "--out", type=Path, default=Path("report"))
    sub = add("theory", theory, "measure the paper's theory here, and a page of figures about it")
    sub.add_argument("parts", nargs="*", metavar="part", help="solver, guarantee, regimes, "
                     "geometry, shortcut; page only draws; default: all")  # fmt: skip
    sub.add_argument("--results", type=Path, default=Path("results/theory"), help="JSON files")
    sub.add_argument("-o", "--out", type=Path, default=Path("build/theory"), help="the page")
    sub.add_argument("--data", default="stdlib", help="folder of shards for the training run")
    sub.add_argument("--quick", action="store_true", help="toy sizes: a look at the page only")
    for name, function, summary in (
        ("sweep", sweep, "run an experiment of the paper here; run again to go on"),
        ("submit", submit, "start what can run now of an experiment in other processes"),
    ):
        sub = add(name, function, summary, *(["name"] if name == "submit" else []))
        sub.add_argument("--scale", default="nano", help="paper, s or nano")
        sub.add_argument("--data", default="", help="folder of shards; default: the scale's own")
        sub.add_argument("--out", type=Path, help="folder of the runs")
        sub.add_argument("--device", default="", help="cpu or cuda; default: what there is")
        sub.add_argument("--extend", type=int, default=0, help="rounds at a grid's edge")
        if name == "sweep":
            sub.add_argument("names", nargs="+", metavar="name", help="one or more experiments")
            sub.add_argument("--budget", type=seconds, default=inf, help="540s, 30m, 2h")
            sub.add_argument("--processes", type=int, default=1, help=PROCESSES)
        else:
            sub.add_argument("--executor", default="slurm", help="slurm or local")
            sub.add_argument("--dry-run", action="store_true", help="only say what would be done")
            sub.add_argument("--set", action="append", default=[], metavar="PARAMETER:VALUE")
