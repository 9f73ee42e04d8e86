"""Time the training steps of several optimizers in turn on one device.

A step is the trainer's: the batch from the prefetched data, forward and backward passes, clipping,
the optimizer's step. Evaluating, logging, saving and measuring angles are left out. Optimizers take
turns of a few steps, in an order that is drawn anew for every round, so that a device that slows
down slows all of them.
"""

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random

import torch

from angular_lab.config.spec import OptimSpec, Spec
from angular_lab.errors import UserError
from angular_lab.experiments.definition import trained_by
from angular_lab.pace.record import Pace, Timed
from angular_lab.run_folder import RunFolder, git_state
from angular_lab.status.device_use import DeviceUse, look
from angular_lab.training.build import OPTIMIZER_NAMES
from angular_lab.training.ranks import Ranks, start_ranks
from angular_lab.training.recorded_passes import WARM_UP
from angular_lab.training.start import data_folder, fingerprint, versions
from angular_lab.training.trainer import Trainer

REFERENCE = "adamw"
LEAD_IN = 2  # untimed steps at the start of a turn: caches and prefetched batches
WARMUP = WARM_UP + 2  # compilation, recording, and a first replay
ADAMW_SHARE = 0.1  # of optim.lr: matrices are turned at rates at which AdamW may diverge
OTHER_THREADS = 1  # besides the main one, on a GPU: prefetching
log = logging.getLogger(__name__)
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Contestant:
    """An optimizer with a model of its own, between its turns."""

    trainer: Trainer
    batches: Iterator[Batch]
    memory_gib: float | None = None
    seconds: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.trainer.spec.optim.name

    def step(self) -> None:
        self.trainer.take_step(*next(self.batches))

    def take_turn(self, steps: int) -> None:
        for _ in range(LEAD_IN):
            self.step()
        self.seconds.append(tuple(clock(self.step, steps, self.trainer.ranks.device)))


def clock(work: Callable[[], None], steps: int, device: torch.device) -> list[float]:
    """Return the seconds of each call; on a GPU between events of its stream."""
    if device.type != "cuda":
        ticks = [time.perf_counter()]
        for _ in range(steps):
            work()
            ticks.append(time.perf_counter())
        return [b - a for a, b in pairwise(ticks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


def turns(names: Sequence[str], rounds: int, seed: int) -> list[tuple[str, ...]]:
    """Return the order of the optimizers in every round."""
    random = Random(seed)
    return [tuple(random.sample(names, len(names))) for _ in range(rounds)]


def measure(
    base: Spec,
    names: Sequence[str],
    rounds: int = 10,
    steps: int = 20,
    warmup: int = WARMUP,
    reference: str = REFERENCE,
    device: str = "",
    seed: int = 0,
) -> Pace:
    """Time `rounds` turns of `steps` steps of each optimizer, and return what was measured."""
    _check(base, names, rounds, steps, warmup, reference)
    ranks = start_ranks(device)
    gpu = _uuid(ranks.device)
    before = look(gpu, _reserved_mib(gpu))
    data = data_folder(base, ranks)
    order = turns(names, rounds, seed)
    with ExitStack() as stack:
        contestants = {
            name: _enter(optimizer_spec(base, name), ranks, data, warmup, stack, i, len(names))
            for i, name in enumerate(names)
        }
        use = _rounds(contestants, order, steps, gpu)
    threads = torch.get_num_threads() if gpu is None else 1 + OTHER_THREADS
    timed = tuple(Timed(c.trainer.spec.optim, tuple(c.seconds), c.memory_gib)
                  for c in contestants.values())  # fmt: skip
    return Pace(
        spec=_timed_spec(base), device=versions(ranks)["device"], reference=reference,
        warmup=warmup, lead_in=LEAD_IN, order=tuple(order), timed=timed, threads=threads,
        use=(before, *use), versions=versions(ranks), git=git_state(), data=fingerprint(data),
        seed=seed,
    )  # fmt: skip


def _check(
    base: Spec, names: Sequence[str], rounds: int, steps: int, warmup: int, reference: str
) -> None:
    for name in (*names, reference):
        if name not in OPTIMIZER_NAMES:
            raise UserError(
                f"--optimizers {name}: it must be all, or some of {', '.join(OPTIMIZER_NAMES)}"
            )
    if len({*names}) != len(names):
        raise UserError(f"--optimizers {','.join(names)}: each one once")
    if reference not in names:
        raise UserError(f"--reference {reference} is not among --optimizers: add it there")
    for option, value, least in (
        ("--rounds", rounds, 2), ("--steps", steps, 1), ("--warmup", warmup, WARM_UP + 1),
    ):  # fmt: skip
        if value < least:
            raise UserError(f"{option} {value}: it must be at least {least}")
    needed = warmup + rounds * (LEAD_IN + steps)
    if needed > base.steps:
        raise UserError(
            f"steps={base.steps}: each optimizer would take {needed} steps; set steps={needed}, or "
            "lower --rounds or --steps"
        )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("pace times one device: start it without torchrun")
    base.check()


def _timed_spec(base: Spec) -> Spec:
    """Return the settings without what happens between steps."""
    return replace(base, angle_every=None, loggers=())


def optimizer_spec(base: Spec, name: str) -> Spec:
    """Return the settings with another optimizer, at a learning rate at which it does not diverge:
    the time of a step does not depend on it."""
    spec = trained_by(_timed_spec(base), name)
    share = ADAMW_SHARE if name == "adamw" and base.optim.name != "adamw" else 1
    optim: OptimSpec = replace(spec.optim, lr=share * base.optim.lr)
    return replace(spec, optim=optim)


def _enter(
    spec: Spec, ranks: Ranks, data: Path, warmup: int, stack: ExitStack, number: int, of: int
) -> Contestant:
    """Build a model and its optimizer, and take the steps that compile and record it."""
    name, cuda = spec.optim.name, ranks.device.type == "cuda"
    log.info("%s: %s (%d of %d)", "compiling" if spec.compile else "starting", name, number + 1, of)
    if spec.compile:  # past this limit of models torch silently stops compiling
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    held = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        nowhere = RunFolder(Path(os.devnull))  # a trainer writes only in `train`
        trainer = Trainer(spec, nowhere, ranks, data)
        contestant = Contestant(trainer, stack.enter_context(trainer.prefetch()))
        for _ in range(warmup):
            contestant.step()
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"--optimizers: GPU memory is full at {name}, number {number + 1} of {of}, and all "
            "models are kept on the device: time fewer at once, each time with the reference, or "
            "lower micro_batch"
        ) from None
    if cuda:
        torch.cuda.synchronize()
        contestant.memory_gib = (torch.cuda.max_memory_allocated() - held) / 2**30
    return contestant


def _rounds(
    contestants: dict[str, Contestant],
    order: Sequence[Sequence[str]],
    steps: int,
    gpu: str | None,
) -> list[DeviceUse]:
    """Let the optimizers take their turns; return a look at the machine after every round."""
    use = []
    gc.collect()
    for number, names in enumerate(order, 1):
        log.info("round %d of %d", number, len(order))
        for name in names:
            contestants[name].take_turn(steps)
        use.append(look(gpu, _reserved_mib(gpu)))
    return use


def _uuid(device: torch.device) -> str | None:
    """Return the name by which nvidia-smi knows the device; None for a CPU."""
    if device.type != "cuda":
        return None
    torch.zeros((), device=device)  # nvidia-smi lists a process that has used the device
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return f"GPU-{uuid.removeprefix('GPU-')}"


def _reserved_mib(gpu: str | None) -> float:
    return 0.0 if gpu is None else torch.cuda.memory_reserved() / 2**20
