"""The command submit: the trials of an experiment as jobs of a cluster."""

import argparse
import logging
import re
from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING

from angular_lab.cli.experiments import (
    EXPERIMENT,
    add_sweep_options,
    open_sweep,
    seconds,
    settle,
)
from angular_lab.errors import UserError
from angular_lab.text import command, counted, estimated_time

if TYPE_CHECKING:  # they import torch
    from angular_lab.sweeps.slurm import Resources
    from angular_lab.sweeps.sweep import Sweep

REFERENCE = "H100"  # the GPU of the estimate: the login node cannot know which one a job gets
LOCAL_MINUTES = 24 * 60
log = logging.getLogger(__name__)


def gigabytes(text: str) -> int:
    """Parse 64G, 64GB, 1T or a plain number of GB."""
    match = re.fullmatch(r"(\d+)\s*(G|T|)B?", text.upper())
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"'{text}': write memory as in 64G")
    return int(match[1]) * (1000 if match[2] == "T" else 1)


def submit(arguments: argparse.Namespace) -> None:
    from angular_lab.sweeps import slurm
    from angular_lab.sweeps.dry_run import check_disk

    if arguments.executor not in slurm.EXECUTORS:
        known = " or ".join(slurm.EXECUTORS)
        raise UserError(f"--executor {arguments.executor}: it must be {known}")
    sweep = open_sweep(arguments.experiment, arguments)
    settle([sweep], arguments)
    sweep.extend = arguments.extend
    sweep.check()
    if arguments.status:
        print(_status(sweep))
        return
    resources = _resources(sweep, arguments)
    resources.check()
    log.info(sweep.state())
    _print_plan(sweep, resources, arguments.executor)
    if arguments.dry_run or not slurm.free_trials(sweep):
        return
    check_disk([sweep])
    if arguments.executor == "local":
        _run_here(sweep, resources, arguments.until_done)
    else:
        partition = arguments.follow_partition
        started = slurm.start_round(sweep, resources, partition, arguments.until_done)
        ids = list(dict.fromkeys(str(job.job_id).partition("_")[0] for job in started))
        print(f"submitted {' and '.join(ids)}; logs are in {started[0].paths.folder}")
    _print_next(sweep, arguments)


def _resources(sweep: "Sweep", arguments: argparse.Namespace) -> "Resources":
    from angular_lab.sweeps import slurm

    local = arguments.executor == "local"
    if arguments.time is None and not local:
        raise UserError(
            "--time is missing: give the time limit of a job, as in --time 4h. It may be shorter "
            "than a trial: a job saves its run before the limit, and is requeued"
        )
    minutes = LOCAL_MINUTES if arguments.time is None else ceil(arguments.time / 60)
    parallel = 1 if local and arguments.max_parallel is None else arguments.max_parallel
    models = [arm.spec.model for arm in sweep.experiment.trained_arms]
    return slurm.Resources(
        minutes=minutes,
        memory=arguments.memory or slurm.default_memory(models),
        gpus=arguments.gpus,
        cpus=arguments.cpus,
        partition=arguments.partition,
        account=arguments.account,
        qos=arguments.qos,
        max_parallel=parallel,
        max_requeues=arguments.max_requeues,
        more=tuple(slurm.parameter(word) for word in arguments.set),
    )


def _run_here(sweep: "Sweep", resources: "Resources", until_done: bool) -> None:
    """Run the jobs on this machine, and wait for them."""
    from angular_lab.sweeps import slurm
    from angular_lab.sweeps.progress import SweepProgress

    while trials := slurm.free_trials(sweep):
        before = sweep.counts()[0]
        round_ = slurm.Round.of(sweep)
        sweep.write()
        jobs = slurm.jobs(round_, trials, resources.max_parallel)
        started = slurm.submit(jobs, round_.folder, "local", resources)
        print("\n".join(slurm.wait(started, SweepProgress([sweep]))))
        if not until_done or sweep.counts()[0] <= before:
            break


def _status(sweep: "Sweep") -> str:
    """Return how far the sweep is, and which runs are being trained now."""
    from angular_lab.sweeps.progress import take_snapshot

    now = take_snapshot([sweep])
    ended = f"{len(now.ended)} of {counted(now.total, 'run')} done, {now.diverged} diverged"
    state = f"{ended}; {now.tokens_left:.3g} tokens left"
    return "\n".join([sweep.state(), state, *(f"  {run}" for run in now.training)])


def _print_plan(sweep: "Sweep", resources: "Resources", executor: str) -> None:
    """Print what is submitted now, what will follow, and what it costs."""
    from angular_lab.sweeps.slurm import free_trials

    trials, (done, total) = free_trials(sweep), sweep.counts()
    for trial in trials:
        print(f"{trial.arm.label:30} {trial.value:<10g} seed {trial.seed}")
    if executor == "local":  # processes share the trials, and nothing limits their memory
        print(f"{counted(len(trials), 'trial')} on this machine: {resources.limits}")
    else:
        print(f"{counted(len(trials), 'job')} ({executor}), each with {resources}")
    if training := len(sweep.pending()) - len(trials):
        verb = "is" if training == 1 else "are"
        print(f"{counted(training, 'further trial')} {verb} being made by other processes now")
    if later := total - done - len(trials) - training:
        print(f"{counted(later, 'more trial')}, on the other seeds, can run once values are chosen")
    if trials:
        print(_longest_trial(sweep, resources))


def _longest_trial(sweep: "Sweep", resources: "Resources") -> str:
    from angular_lab.experiments.cost import flops_per_token, steps_per_trial
    from angular_lab.show import USUAL_MFU
    from angular_lab.training.progress import PEAKS

    plan = sweep.experiment
    flops = {arm.spec.model: flops_per_token(arm.spec.model) for arm in plan.trained_arms}
    operations, tokens = max(
        (flops[arm.spec.model] * count, count)
        for arm in plan.trained_arms
        for count in (steps_per_trial(plan, arm) * arm.spec.tokens_per_step,)
    )
    time = operations / (USUAL_MFU * PEAKS[REFERENCE])
    allowed = 60 * resources.minutes * (1 + resources.max_requeues)
    expected = f"{'about ' * (time >= 1)}{estimated_time(time)}"
    line = (
        f"longest trial: {tokens:.3g} tokens, {operations:.3g} FLOP, {expected} on an {REFERENCE} "
        f"at {USUAL_MFU:.0%} of its peak"
    )
    if time > allowed:
        line += f"; --time and --max-requeues allow {estimated_time(allowed)}, which is not enough"
    return line


def _print_next(sweep: "Sweep", arguments: argparse.Namespace) -> None:
    """Print what to do next; on a cluster, once the jobs have ended."""
    again = command(*arguments.words)
    here = arguments.executor == "local"
    done, total = sweep.counts()
    if here and done < total:
        print(f"next, with {counted(total - done, 'trial')} left: {again}")
    elif not here and not arguments.until_done:
        later = total - done - len(sweep.pending())
        what = f"the {counted(later, 'trial')} on the other seeds" if later else "what is left"
        print(f"when these jobs have ended, for {what}: {again}")
    if not here:
        print(f"how far it is: {again} --status; what is queued: squeue --me")
    print(f"for a page about it: {command('report', sweep.path)}")


def add_submit(add: Callable[..., argparse.ArgumentParser]) -> None:
    summary = "submit the trials of an experiment that can run now as jobs, one for each"
    sub = add("submit", submit, summary)
    sub.add_argument("experiment", help=EXPERIMENT)
    sub.add_argument("--executor", default="slurm", help="slurm, or local for processes of this "
                     "machine; default: slurm")  # fmt: skip
    sub.add_argument("--dry-run", action="store_true", help="only print what would be submitted")
    help_text = "only print how far the sweep is, and what is being trained now"
    sub.add_argument("--status", action="store_true", help=help_text)
    help_text = "submit the next round when this one has ended, until all trials are done"
    sub.add_argument("--until-done", action="store_true", help=help_text)
    _add_resources(sub)
    add_sweep_options(sub)


def _add_resources(sub: argparse.ArgumentParser) -> None:
    default = "default: the cluster's"
    for name in ("partition", "account", "qos"):
        sub.add_argument(f"--{name}", metavar="NAME", help=f"of the jobs; {default}")
    help_text = "time limit of a job, as in 4h; it may be shorter than a trial"
    sub.add_argument("--time", type=seconds, help=help_text)
    sub.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="of a job, 0 or 1; default: 1"
    )
    sub.add_argument("--cpus", type=int, default=8, metavar="N", help="of a job; default: 8")
    sub.add_argument("--memory", type=gigabytes, help="of a job's host, as in 64G; default: 8G and "
                     "32 bytes for each parameter, at least 16G")  # fmt: skip
    help_text = "jobs that run at the same time; default: all on Slurm, 1 with --executor local"
    sub.add_argument("--max-parallel", type=int, metavar="N", help=help_text)
    help_text = "how often a job may reach its time limit and continue; default: 10"
    sub.add_argument("--max-requeues", type=int, default=10, metavar="N", help=help_text)
    help_text = "where --until-done runs its small job without a GPU; default: --partition"
    sub.add_argument("--follow-partition", metavar="NAME", help=help_text)
    sub.add_argument("--set", action="append", default=[], metavar="PARAMETER:VALUE",
                     help="a further parameter of submitit, such as slurm_constraint:a100"
                     )  # fmt: skip
