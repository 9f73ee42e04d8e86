"""The progress of a run: what is logged, what is timed, and what a person sees of it."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch

from angular_lab.config.spec import Spec
from angular_lab.data.passes import describe_passes
from angular_lab.data.prepare import TOKENIZER
from angular_lab.models import LanguageModel
from angular_lab.run_folder import RunFolder, shared_device
from angular_lab.status.clock import COMPILING, PHASES, Clock
from angular_lab.status.device_use import device_use
from angular_lab.status.screen import Row, Screen, Shown, Smoothed, Status
from angular_lab.text import command, counted, measured_time, short_number
from angular_lab.training import checkpoint
from angular_lab.training.loggers import Logger, close_loggers, make_loggers
from angular_lab.training.ranks import Ranks

# Dense bf16 peak in FLOP/s, by the vendor's datasheets; MFU is a share of this.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAKS.items() if key in name), None)


def device_uuid(device: torch.device) -> str | None:
    """Return the UUID of a GPU, "" if torch does not know it; None for other devices."""
    if device.type != "cuda":
        return None
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


class Progress:
    """Rank 0 writes metrics.jsonl, timing.jsonl and the screen; the others stay silent."""

    def __init__(
        self, spec: Spec, run: RunFolder, ranks: Ranks, model: LanguageModel, data: Path,
        shown: Shown = "steps",
    ) -> None:  # fmt: skip
        self.spec, self.run, self.ranks, self.data = spec, run, ranks, data
        self.flops = model.flops_per_token()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.peak = peak_flops(ranks.device)
        self.loggers: list[Logger] = []
        self.screen, self.status = Screen(shown), Status(steps=spec.steps)
        cuda = ranks.device.type == "cuda"
        self.clock = Clock(spec, torch.cuda.synchronize if cuda else lambda: None)
        self.uuid = device_uuid(ranks.device)
        self.smoothed, self.best = Smoothed(spec.steps), (inf, 0)  # a validation loss and its step
        self._written = dict.fromkeys(PHASES, 0.0)
        self._pending: dict[str, Any] | None = None  # a line of timing.jsonl
        self._logged: dict[str, Any] = {}  # the line of metrics.jsonl that goes with it
        self._use: dict[str, Any] = {}
        self._uses: list[dict[str, Any]] = []

    # -- the course of a run -------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Begin after `step`, when everything is built and restored."""
        if not self.ranks.first:
            return
        self._read_earlier(step)
        self.screen.table(header(self, step))
        self.loggers = make_loggers(self.spec, self.run, step)
        self._use = self._device_use()
        self.screen.open()
        self.clock.start(step)
        self.status.step = step

    def _read_earlier(self, step: int) -> None:
        """Take the last and the best validation from the log of a run that continues."""
        lines = self.run.read_metrics() if step > self.spec.parent_step else []
        for line in lines:
            if (value := line.get("val_loss")) is not None:
                self.status.validation = value
                self.best = min(self.best, (value, line.step))
        self.status.best = self.best[0] if isfinite(self.best[0]) else None

    @contextmanager
    def phase(self, name: str, steps: int = 0) -> Iterator[None]:
        """Show and time what is not training; `steps` are taken inside."""
        if not self.ranks.first:
            yield
            return
        if name == COMPILING and not self.clock.counts[name] and not self.screen.terminal:
            self.screen.line("compiling: the first steps take longer")
        self._draw(name)
        with self.clock.phase(name, steps):
            yield
        self._draw("")

    def compiling(self, compiles: bool) -> AbstractContextManager[None]:
        """Time a step that compiles on its own."""
        return self.phase(COMPILING, steps=1) if compiles else nullcontext()

    def tick(self, step: int, loss: float) -> None:
        """Note a step's loss, after every step."""
        if not self.ranks.first:
            return
        self.status.step, self.status.finite = step, isfinite(loss)
        if self.status.finite:
            self.smoothed.add(loss)
            self.status.loss = self.smoothed.value
        self._draw("", now=False)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Log the values of a step. Its times are written by `end_step`."""
        if not self.ranks.first:
            return
        self.run.append(self.run.metrics_path, metrics)
        speed = self._speed(step)
        stays = metrics.get("val_loss") is not None or step == self.spec.steps
        if stays:
            self._use = self._device_use()
        self._pending = {"step": step, **speed, **self._use}
        self._use = {}
        self._logged = metrics
        self._update(step, metrics, speed)
        self.screen.log(self.status, stays=stays)

    def end_step(self) -> None:
        """Write the times of a step, a checkpoint's included, and send all of it to dashboards."""
        if self._pending is None:
            return
        phases = {
            name: seconds - self._written[name]
            for name, seconds in self.clock.phases.items()
            if seconds > self._written[name]
        }
        times = self._pending | phases
        self.run.append(self.run.timing_path, times)
        for logger in self.loggers:
            logger.log(self._logged["step"], {**self._logged, **times})
        self._written, self._pending = dict(self.clock.phases), None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        self.end_step()
        self.screen.close(keep=error is not None)
        close_loggers(self.loggers, self.run, error)
        if self.ranks.first and error is None:
            self.screen.table(summary(self))
            self.screen.end(one_line(self))

    # -- what is measured ----------------------------------------------------------------------

    def _speed(self, step: int) -> dict[str, Any]:
        rate = self.clock.lap(step)
        speed: dict[str, Any] = {"seconds": self.clock.elapsed}
        if rate is not None:
            speed["tokens_per_second"] = rate
            if self.peak:
                speed["mfu"] = rate * self.flops / (self.peak * self.ranks.world)
        if self.ranks.device.type == "cuda":
            speed["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return speed

    def _device_use(self) -> dict[str, Any]:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self._uses.append(device_use(torch.get_num_threads() * local_ranks, self.uuid))
        return self._uses[-1]

    @property
    def shared(self) -> bool | None:
        """True if other processes used the device, as far as it was recorded."""
        return shared_device(self._uses)

    def _update(self, step: int, metrics: dict[str, Any], speed: dict[str, Any]) -> None:
        """Bring the status up to date with what was logged."""
        status, spec = self.status, self.spec
        status.step, status.finite = step, metrics["loss"] is not None
        for name, key in (("angle", "angle_mean"), ("lr", "lr"), ("kappa", "kappa")):
            setattr(status, name, metrics.get(key, getattr(status, name)))
        status.speed = speed.get("tokens_per_second", status.speed)
        status.mfu, status.memory = speed.get("mfu", status.mfu), speed.get("memory_gib")
        status.averages = {f"{w:g}": metrics[n] for w, n in spec.averages.items() if n in metrics}
        if (value := metrics.get("val_loss")) is not None:
            self.best = min(self.best, (value, step))
            status.validation, status.best = value, self.best[0]
        self._draw("", now=False)

    def _draw(self, phase: str, now: bool = True) -> None:
        status = self.status
        status.phase, status.elapsed = phase, self.clock.elapsed
        status.remaining = self.clock.remaining(status.step)
        self.screen.draw(status, now)


# -- as text -----------------------------------------------------------------------------------


def header(progress: Progress, step: int) -> list[Row]:
    """Return what is trained, as rows for the screen."""
    spec, run, ranks = progress.spec, progress.run, progress.ranks
    m, o = spec.model, spec.optim.with_all_rates()
    aux = f", aux lr {o.aux_lr:g}" if o.aux_lr != o.lr else ""
    cuda = ranks.device.type == "cuda"
    threads = torch.get_num_threads()
    device = (
        torch.cuda.get_device_name(ranks.device) if cuda else f"cpu, {counted(threads, 'thread')}"
    )
    many = f", {ranks.world} ranks ({spec.parallel})" if ranks.world > 1 else ""
    tokens = short_number(spec.steps * spec.tokens_per_step)
    every = f"evaluates every {spec.eval_every:,}" if spec.eval_every else "never evaluates"
    rows = [
        ("run", f"{spec.name} in {run.path}"),
        ("model", f"{m.kind}, {counted(m.layers, 'layer')}, width {m.width}, "
                  f"{short_number(progress.parameters)} parameters"),
        ("optimizer", f"{o.name}, lr {o.lr:g}{aux}; {schedule(spec)}"),
        ("data", f"{progress.data}, {describe_passes(spec, progress.data)}"),
        ("device", f"{device}, {spec.precision}{', compiled' * spec.compile}{many}"),
        ("length", f"{counted(spec.steps, 'step')} of {spec.tokens_per_step:,} tokens: {tokens} "
                   f"tokens; {every}"),
    ]  # fmt: skip
    if step:
        rows.append(("resumes", f"continues after step {step:,}"))
    return rows


def schedule(spec: Spec) -> str:
    """Describe the learning rate's schedule and the end of kappa."""
    s = spec.schedule
    parts = [f"{s.kind}, {counted(s.warmup, 'step')} of warmup"]
    if s.kind == "wsd":
        parts.append(f"{spec.decay_steps:,} of cooldown")
    if spec.has_kappa:
        parts.append(f"kappa to {spec.kappa(spec.steps):.2f}")
    return ", ".join(parts)


def summary(progress: Progress) -> list[Row]:
    """Return how a finished run went, as rows for the screen."""
    spec, times = progress.spec, progress.clock
    trained = f"{counted(spec.steps, 'step')}, {short_number(spec.steps * spec.tokens_per_step)}"
    split = {"training": times.training, **times.phases}
    spent = ", ".join(
        f"{name} {measured_time(value)}" for name, value in split.items() if value >= 0.05
    )
    value, best = progress.status.validation, progress.best
    rows = [("done", f"{trained} tokens in {measured_time(times.elapsed)}"
                     f"{f': {spent}' if spent else ''}")]  # fmt: skip
    if value is not None:
        rows.append(
            ("validation", f"{value:.4f} at the end; best {best[0]:.4f} at step {best[1]:,}")
        )
    speed = f"{short_number(times.speed)} tokens/s (median), " if times.speed else ""
    shared = "; other processes used the device" * bool(progress.shared)
    memory = peak_memory(progress.ranks.device)
    rows.append(("speed", f"{speed}peak memory {memory:.2f} GiB{shared}"))
    rows.append(("folder", str(progress.run.path)))
    names = ["next"]
    return rows + [(names.pop() if names else "", text) for text in next_commands(progress)]


def one_line(progress: Progress) -> str:
    """Return how a finished run went, in one line."""
    status, times = progress.status, progress.clock
    value = f"val {status.validation:.4f}, " if status.validation is not None else ""
    speed = f"{short_number(times.speed)} tokens/s, " if times.speed else ""
    return f"{progress.run.path.name}: done, {value}{speed}{measured_time(times.elapsed)}"


def next_commands(progress: Progress) -> list[str]:
    """Return the commands that can follow this run."""
    spec, folder = progress.spec, progress.run.path
    saved = checkpoint.steps(progress.run.checkpoints)
    commands = []
    if (progress.data / TOKENIZER).exists():
        commands.append(command("sample", folder, "the beginning"))
    commands += [
        command("watch", folder),
        command("report", folder),
        command("export", folder, "--out", "FOLDER"),
    ]
    points = [step for step in saved if step <= spec.full_rate_until]
    if points and spec.parent is None:
        commands.append(command("branch", folder, "--at", points[-1]))
    if spec.schedule.kind == "constant" and spec.parent is None:
        commands.append(command("extend", folder, "--to", 2 * spec.steps))
    return commands


def peak_memory(device: torch.device) -> float:
    """Return the most memory that was used so far, in GiB: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
