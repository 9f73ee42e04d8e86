"""The training loop: batch, step, evaluate, log, save."""

import logging
import time
from collections.abc import Generator
from contextlib import closing
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Any

import torch

from angular_lab.config.spec import Spec
from angular_lab.data.batches import Batches, Tokens, prefetch
from angular_lab.errors import UserError
from angular_lab.models.tensor_parallel import clip_gradients
from angular_lab.run_folder import RunFolder
from angular_lab.status.clock import EVALUATING, SAMPLING, SAVING
from angular_lab.status.screen import Shown
from angular_lab.text import command
from angular_lab.training import build, checkpoint
from angular_lab.training.averages import Averages
from angular_lab.training.evaluate import Samples, autocast_of, evaluate
from angular_lab.training.nonfinite import NotFinite, OnHost, culprit, weights_are_finite
from angular_lab.training.progress import Progress
from angular_lab.training.ranks import Ranks
from angular_lab.training.recorded_passes import WARM_UP, Passes, can_record
from angular_lab.training.signals import Preempted, Sigterm
from angular_lab.training.step_changes import (
    Extrapolation,
    SlowMomentum,
    Soap,
    equalize_rows,
    momentum_at,
)
from angular_muown import AngleMonitor

log = logging.getLogger(__name__)


class Trainer:
    """A run in progress. The state of training is the weights, the optimizer's state and `step`."""

    def __init__(
        self,
        spec: Spec,
        run: RunFolder,
        ranks: Ranks,
        data: Path,
        until: float = inf,  # on the monotonic clock: save and leave
        models: build.Models | None = None,
        shown: Shown = "steps",
    ) -> None:
        build.make_deterministic(spec)
        self.spec, self.run, self.ranks, self.step, self.until = spec, run, ranks, 0, until
        sequence, vocabulary = spec.model.sequence, spec.model.vocabulary
        self.batches = Batches(Tokens(data, "train", sequence, vocabulary), spec.batch, spec.seed)
        self.validation = Tokens(data, "val", sequence, vocabulary)
        if not len(self.validation):
            raise UserError(
                f"the validation split of {data} is shorter than one sequence of {sequence} tokens"
            )
        self.models = models
        compiles = spec.compile and not (models and models.fits(spec))
        self.model, self.parallel = (models or build.Models()).take(spec, ranks)
        self.optimizer = build.make_optimizer(self.model, spec)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.autocast = autocast_of(spec, ranks.device)
        recorded = can_record(spec, self.model, ranks)
        self.passes = Passes(self.parallel, self.autocast, recorded)
        micro = spec.micro_batch or spec.batch
        passes = WARM_UP + 1 if recorded else 1
        self.warm_up_steps = ceil(passes * micro / spec.batch) if compiles or recorded else 0
        self.monitor = AngleMonitor(self.model, self.optimizer, spec.angle_every or 1)
        if not spec.angle_every:
            self.monitor.close()
        rows = build.matrices(self.optimizer) if "sphere" in spec.average_forms else []
        self.averages = Averages(self.model, spec.average, spec.average_forms, rows)
        self.extrapolation = Extrapolation(self.model, spec)
        self.slow_momentum = SlowMomentum(self.model, self.optimizer, spec)
        self.soap = Soap(self.model, self.optimizer, spec)
        self.saved_averages = (self.averages, self.extrapolation, self.slow_momentum, self.soap)
        self.progress = Progress(spec, run, ranks, self.model, data, shown)
        self.samples = Samples(self.validation, ranks.device) if spec.sample_every else None
        self.skipped = 0
        self.host_norm = OnHost(torch.zeros(()))

    def restore(self, source: Path) -> None:
        known = self.models.points.get(source.resolve()) if self.models else None
        if known is None:
            counters = checkpoint.load(
                source, self.model, self.optimizer, self.ranks, self.saved_averages
            )
        else:
            counters = checkpoint.from_memory(
                known, self.model, self.optimizer, self.saved_averages
            )
        self.step, self.skipped = counters["step"], counters["skipped"]
        self.monitor.read()  # loading takes a dummy step, which it measured

    def train(self) -> None:
        """Take the remaining steps."""
        self.progress.start(self.step)
        # Optimizer and monitor refer to each other until it is closed; then all memory is freed.
        with self.progress, closing(self.monitor):
            with Sigterm() as sigterm, self.prefetch() as batches:
                if self.ranks.any(sigterm.received):
                    raise Preempted(f"before step {self.step + 1}; {self.again}")
                for taken, (tokens, targets) in enumerate(batches):
                    with self.progress.compiling(taken < self.warm_up_steps):
                        loss = self.take_step(tokens, targets)
                    self.progress.tick(self.step, self.host_loss.value())
                    metrics = self.measure(loss)
                    if metrics:
                        self.progress.log(self.step, metrics)
                    if self.samples and self.due(self.spec.sample_every):
                        self.sample(self.samples)
                    if self.due(self.spec.save_every) or self.step in self.spec.pinned:
                        self.save()
                    if self.ranks.any(sigterm.received or time.monotonic() >= self.until):
                        self.save_once()
                        raise Preempted(f"saved at step {self.step}; {self.again}")
                    if self.step < self.spec.steps:  # the last one ends with its checkpoint
                        self.progress.end_step()
            self.finish()

    def take_step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Take one step and return its loss. Nothing is measured, logged or saved."""
        self.extrapolation.move(self.step)
        loss = self.forward_backward(tokens, targets)
        if self.is_finite(tokens, targets):
            self.update()
        else:
            self.extrapolation.undo(self.step)
        self.step += 1
        return loss

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss of this rank's sequences; gradients are the mean over all ranks."""
        micro = self.spec.micro_batch or len(tokens)
        parts = list(zip(tokens.split(micro), targets.split(micro), strict=True))
        total = torch.zeros((), device=self.ranks.device)
        for i, (part, wanted) in enumerate(parts):
            build.synchronize_gradients(self.parallel, i == len(parts) - 1)
            total += self.passes.forward(part, wanted, len(part) / len(tokens))
            if i == len(parts) - 1:
                self.host_loss = OnHost(total)
            self.passes.backward()
        return total

    def update(self) -> None:
        self.monitor.steps = self.step + 1  # so that it measures the steps that are logged
        factor = build.lr_factor(self.spec, self.step)
        falling = build.matrix_factor(self.spec, self.step)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
            if group.get("algorithm") == "matrix":
                group["lr"] *= falling
                group["momentum"] = momentum_at(self.spec, self.step)
        self.slow_momentum.mix(self.step)
        self.soap.equalize(self.step)
        if self.spec.optim.equal_rows:
            equalize_rows(self.optimizer)
        self.optimizer.step()
        self.extrapolation.update(self.step)
        self.averages.update()
        self.passes.clear()
        build.balance_experts(self.model, self.ranks)

    def measure(self, loss: torch.Tensor) -> dict[str, Any]:
        """Return the values to log for this step; {} if none are due."""
        metrics: dict[str, Any] = {}
        measured = self.spec.angle_every and self.step % self.spec.angle_every == 0
        if measured and (angles := self.monitor.read()):
            metrics |= {key: value for key, value in angles.items() if "/" not in key}
            self.log_angles(angles)
        if self.due(self.spec.eval_every):
            with self.progress.phase(EVALUATING):
                metrics |= self.evaluate()
        if not metrics and not self.due(self.spec.log_every):
            return {}
        line = {
            "step": self.step,
            "tokens": self.step * self.spec.tokens_per_step,
            "loss": self.ranks.mean(loss).item(),
            "lr": self.spec.optim.lr * build.lr_factor(self.spec, self.step - 1),
            "grad_norm": self.host_norm.value(),
            **({"skipped": self.skipped} if self.skipped else {}),
            **metrics,
        }
        # JSON has no NaN: what is not finite is null
        return {key: value if isfinite(value) else None for key, value in line.items()}

    def log_angles(self, values: dict[str, float]) -> None:
        """Write the angle of each parameter, short enough for thousands of steps."""
        names = [name for name, _ in self.model.named_parameters()]
        named = {name: values[key] for name in names if (key := f"angle_mean/{name}") in values}
        angles = {name: float(f"{v:.4g}") if isfinite(v) else None for name, v in named.items()}
        if self.ranks.first:
            self.run.append(self.run.angles_path, {"step": self.step, "angles": angles})

    def sample(self, samples: Samples) -> None:
        """Write and show what the model makes of a few prompts. Training does not notice it."""
        with self.progress.phase(SAMPLING), self.autocast:
            written = samples.write(self.model)
        for pair in written if self.ranks.first else ():
            self.run.append(self.run.samples_path, {"step": self.step, **pair})
            log.info("step %d: %r -> %r", self.step, pair["prompt"], pair["text"])

    def validate(self) -> dict[str, float]:
        count = max(1, self.spec.eval_tokens // self.spec.model.sequence)
        batch = self.spec.micro_batch or max(1, self.spec.batch // self.ranks.data_world)
        return evaluate(self.parallel, self.validation, count, batch, self.ranks, self.autocast)

    def evaluate(self) -> dict[str, float]:
        metrics = self.validate()
        if not isfinite(metrics["val_loss"]):
            raise NotFinite(
                f"the validation loss after step {self.step} is not finite; {self.last}"
            )
        return metrics | self.averages.evaluate(self.validate)

    def is_finite(self, tokens: torch.Tensor, targets: torch.Tensor) -> bool:
        """Clip the gradients; True if loss and gradients may reach the weights."""
        # An infinite bound measures the norm and clips nothing.
        bound = inf if self.spec.clip is None else self.spec.clip
        norm = clip_gradients(list(self.model.parameters()), bound)
        before, self.host_norm = self.host_norm, OnHost(norm)
        value = self.host_loss.value()
        bad_loss = self.ranks.any(not isfinite(value))
        # This step's norm is known only at the end of the backward pass. To stop, the norm of the
        # step before is enough, and the host need not wait. To skip a batch, it has to.
        skipping = self.spec.on_nan == "skip"
        norm_value = (self.host_norm if skipping else before).value()
        if not bad_loss and isfinite(norm_value):  # the norm is the same on all ranks
            return True
        if skipping:
            self.skipped += 1
            self.passes.clear()
            for load in self.model.loads():
                load.zero_()
            return False
        what = f"loss of step {self.step + 1} is {value}"
        if not bad_loss:
            what = f"gradient of step {self.step} has the norm {norm_value}"
        with self.autocast:
            where = culprit(self.model, tokens, targets, self.spec.micro_batch or len(tokens))
        raise NotFinite(
            f"the {what}; first not finite on rank {self.ranks.rank}: {where}. {self.last}; lower "
            "optim.lr, or set on_nan=skip to skip such batches"
        )

    @property
    def last(self) -> str:
        saved = checkpoint.steps(self.run.checkpoints)
        return f"The newest checkpoint is step {max(saved)}" if saved else "There is no checkpoint"

    @property
    def again(self) -> str:
        return f"continue with {command('resume', self.run.path)}, or run trunk and sweep again"

    def save(self) -> None:
        with self.progress.phase(SAVING):
            self._save()

    def _save(self) -> None:
        if not weights_are_finite(self.model):
            raise NotFinite(
                f"weights are not finite after step {self.step}: not saved. {self.last}"
            )
        if self.ranks.first:
            self.run.sync_metrics()
        counters = {"step": self.step, "skipped": self.skipped}
        parts = self.model, self.optimizer
        checkpoint.save(self.run.checkpoints, counters, *parts, self.ranks, self.saved_averages)
        if self.models and self.ranks.world == 1 and self.step in self.spec.pinned:
            point = checkpoint.step_folder(self.run.checkpoints, self.step).resolve()
            last = {p: v for p, v in self.models.points.items() if p.parent == point.parent}
            state = checkpoint.to_memory(counters, *parts, self.saved_averages)
            self.models.points = {**last, point: state}  # of one trunk at a time
        if self.ranks.first:
            checkpoint.prune(self.run.checkpoints, self.spec.keep, self.spec.pinned)

    def save_once(self) -> None:
        if self.step not in checkpoint.steps(self.run.checkpoints):
            self.save()

    def finish(self) -> None:
        self.save_once()
        self.progress.end_step()
        if self.ranks.first:
            self.run.finish()

    def due(self, every: int | None) -> bool:
        return bool(every) and (self.step % every == 0 or self.step == self.spec.steps)

    def prefetch(self) -> closing[Generator[tuple[torch.Tensor, torch.Tensor], None, None]]:
        return closing(prefetch(self.batch, self.step, self.spec.steps))

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        windows = torch.from_numpy(
            self.batches.batch(step, self.ranks.data_rank, self.ranks.data_world)
        )
        if self.ranks.device.type == "cuda":
            windows = windows.pin_memory().to(self.ranks.device, non_blocking=True)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
