"""A check before a run costs money: settings, data, disk, schedule, and one real step.

All but the real step takes seconds at most, and every new run of `train` and `trunk` starts with
it: what cannot work is refused, what is probably not meant is a warning.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from angular_lab.config.spec import Spec
from angular_lab.data.passes import corpus_tokens, describe_passes, passes
from angular_lab.data.shards import Manifest, read_header
from angular_lab.errors import UserError
from angular_lab.models import LanguageModel
from angular_lab.run_folder import RunFolder, shared_device
from angular_lab.status.clock import evaluations_left, saves_left
from angular_lab.status.device_use import device_use
from angular_lab.text import counted, measured_time, short_bytes, short_number
from angular_lab.training import build
from angular_lab.training.evaluate import evaluate
from angular_lab.training.loggers import check_loggers
from angular_lab.training.nonfinite import NotFinite
from angular_lab.training.progress import peak_memory, schedule
from angular_lab.training.ranks import Ranks, choose_device, start_ranks
from angular_lab.training.recorded_passes import WARM_UP
from angular_lab.training.start import prepared_data
from angular_lab.training.trainer import Trainer

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
# Nats: the standard deviation of the losses of single tokens, as after 60 steps of nano. Neighbours
# are correlated, so what follows from it is a lower bound.
TOKEN_DEVIATION = 2.0
NOISE = 0.005  # nats; the reports judge by differences of this size
HARDLY = 0.9  # a kappa above this at the end was as good as constant
FULL = 0.95  # share of the memory
ENOUGH = 10.0  # seconds of timed steps
MICRO_BATCHES = 2  # that are timed; the others take as long
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """One thing that was checked. `advice` says what to do about a warning or an error."""

    part: str
    status: str  # ok, note, warning or error
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Plan:
    """A run that does not exist yet."""

    spec: Spec
    folder: Path
    data: Path
    device: torch.device
    model: LanguageModel  # without memory: shapes alone
    optimizer: torch.optim.Optimizer

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def checkpoint_bytes(self) -> int:
        return build.checkpoint_bytes(self.spec, self.model, self.optimizer)


def check(spec: Spec, folder: Path, device: str = "") -> list[Finding]:
    """Check a run and take one real step of it. Nothing stays on the disk."""
    findings = quick_check(spec, folder, device)
    if any(finding.status == ERROR for finding in findings):
        return [*findings, Finding("step", NOTE, "not taken: the errors come first")]
    return [*findings, *_real_step(spec, device)]


def quick_check(spec: Spec, folder: Path, device: str = "") -> list[Finding]:
    """Check all that needs no step."""
    try:
        plan = _plan(spec, folder, device)
    except UserError as error:
        return [Finding("settings", ERROR, str(error))]
    if not corpus_tokens(plan.data):
        text = f"data={spec.data}: no training tokens"
        return [Finding("data", ERROR, text, "make them with angular-lab prepare")]
    counts = f"{short_number(plan.parameters)} parameters, {type(plan.optimizer).__name__}"
    findings = [Finding("settings", OK, f"{counts}, on {plan.device.type}")]
    for part in PARTS:
        findings += part(plan)
    return findings


def refuse(spec: Spec, folder: Path, device: str = "") -> None:
    """Raise UserError if a new run cannot work, and log what is probably not meant."""
    findings = quick_check(spec, folder, device)
    for finding in sorted(findings, key=lambda finding: finding.status != ERROR):
        text = f"{finding.text}; {finding.advice}" if finding.advice else finding.text
        if finding.status == ERROR:
            raise UserError(text)
        if finding.status == WARNING:
            log.warning("warning: %s", text)


def _plan(spec: Spec, folder: Path, device: str) -> Plan:
    spec.check()
    parts = build.without_memory(spec)
    return Plan(spec, folder, prepared_data(spec), choose_device(device), *parts)


# -- what needs no step ------------------------------------------------------------------------


def _loggers(plan: Plan) -> Iterator[Finding]:
    if not plan.spec.loggers:
        return
    try:
        check_loggers(plan.spec)
    except UserError as error:
        yield Finding("loggers", ERROR, str(error))
    else:
        yield Finding("loggers", OK, ", ".join(plan.spec.loggers))


def _vocabulary(plan: Plan) -> Iterator[Finding]:
    manifest, known = Manifest.load(plan.data), plan.spec.model.vocabulary
    if manifest is None:
        text = f"{plan.data} has no manifest: its tokens are not compared with the model's"
        yield Finding("vocabulary", NOTE, text)
    elif manifest.vocabulary > known:
        text = f"{plan.data} has {manifest.vocabulary:,} entries, but model.vocabulary={known}"
        yield Finding("vocabulary", ERROR, text, f"set model.vocabulary={manifest.vocabulary}")
    elif manifest.vocabulary < known / 2:
        unused = known - manifest.vocabulary
        text = f"{unused:,} of the model's {known:,} entries never occur in {plan.data}"
        advice = f"set model.vocabulary={manifest.vocabulary}, or prepare the data for this model"
        yield Finding("vocabulary", WARNING, text, advice)
    else:
        text = f"{manifest.vocabulary:,} entries in the data, {known:,} in the model"
        yield Finding("vocabulary", OK, text)


def _passes(plan: Plan) -> Iterator[Finding]:
    text = describe_passes(plan.spec, plan.data)
    if passes(plan.spec, plan.data) > 1:
        yield Finding("passes", WARNING, f"{text}: it trains on the same text again",
                      "prepare more text, or lower steps or batch")  # fmt: skip
    else:
        yield Finding("passes", OK, text)


def _validation(plan: Plan) -> Iterator[Finding]:
    spec, available = plan.spec, validation_tokens(plan.data)
    if not spec.eval_every:
        yield Finding("validation", WARNING, "eval_every=none: the run has no validation loss",
                      "set eval_every")  # fmt: skip
        return
    if available <= spec.model.sequence:
        text = f"the validation split has {available:,} tokens, not one sequence of "
        yield Finding("validation", ERROR, f"{text}{spec.model.sequence:,}",
                      "prepare the data with a larger --val-fraction")  # fmt: skip
        return
    used = min(available, spec.eval_tokens)
    noise = TOKEN_DEVIATION / sqrt(used)
    error = f"; a loss over them is uncertain by at least {noise:.1g}" if noise > NOISE else ""
    needed = f"{NOISE} takes at least {(TOKEN_DEVIATION / NOISE) ** 2:,.0f} tokens"
    if available < spec.eval_tokens:
        text = f"the validation split has {available:,} tokens, fewer than eval_tokens="
        advice = f"; {needed}" if error else ""
        yield Finding("validation", WARNING, f"{text}{spec.eval_tokens}{error}",
                      f"prepare the data with a larger --val-fraction{advice}")  # fmt: skip
    else:
        text = f"{used:,} of {available:,} tokens{error}"
        yield Finding("validation", NOTE if error else OK, text, needed if error else "")


def validation_tokens(data: Path) -> int:
    """Return the validation tokens of a prepared folder, or of shards without a manifest."""
    if manifest := Manifest.load(data):
        return manifest.splits["val"].tokens
    return sum(read_header(path)[0] for path in data.glob("*val*.bin"))


def _schedule(plan: Plan) -> Iterator[Finding]:
    spec, s = plan.spec, plan.spec.schedule
    yield Finding("schedule", OK, f"{counted(spec.steps, 'step')}: {schedule(spec)}")
    if spec.eval_every and spec.eval_every > spec.steps:
        text = (
            f"eval_every={spec.eval_every} and {counted(spec.steps, 'step')}: only the last one is "
            "evaluated"
        )
        yield Finding("schedule", WARNING, text, f"lower eval_every to {max(1, spec.steps // 10)}")
    if s.kind == "wsd" and not spec.decay_steps:
        text = f"a cooldown over {s.decay:g} of {spec.steps} steps has none"
        yield Finding("schedule", WARNING, text,
                      "raise schedule.decay, or set schedule.kind=constant")  # fmt: skip
    if s.kind == "wsd" and s.warmup > spec.full_rate_until:
        text = (
            f"the cooldown starts at step {spec.full_rate_until}, during the warmup of {s.warmup}"
        )
        yield Finding("schedule", WARNING, text, "lower schedule.warmup or schedule.decay")
    last = spec.kappa(spec.steps) if spec.has_kappa and s.kind == "wsd" else None
    is_short = s.decay_steps is None and 0 < 2 * spec.decay_steps < spec.steps
    if last is not None and last > HARDLY and is_short:
        text = f"in {spec.steps} steps kappa falls only to {last:.2f}, and the cooldown is short"
        advice = "schedule.decay=0.5 lowers the angle instead"
        yield Finding("schedule", WARNING, text, advice)


def _disk(plan: Plan) -> Iterator[Finding]:
    spec, size = plan.spec, plan.checkpoint_bytes
    # while one is written, the older ones are still there
    count = min(saves_left(spec, spec.parent_step), spec.keep + len(set(spec.pinned)) + 1)
    free, needed = free_disk(plan.folder), count * size
    take = "takes" if count == 1 else "take"
    text = f"{counted(count, 'checkpoint')} of {short_bytes(size)} {take} {short_bytes(needed)}"
    if free >= needed:
        yield Finding("disk", OK, f"{text} of {short_bytes(free)}")
    else:
        text += f", and the disk of {plan.folder} has {short_bytes(free)}"
        advice = f"free {short_bytes(needed - free)} more, or lower keep"
        yield Finding("disk", ERROR, text, advice)


def free_disk(folder: Path) -> int:
    """Return the free bytes where a folder is, or would be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _state(plan: Plan) -> Iterator[Finding]:
    """Refuse what cannot fit, whatever the activations take."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and plan.spec.parallel == "fsdp":
        return  # each rank has a share
    needed = build.training_bytes(plan.spec, plan.model, plan.optimizer)
    available = device_memory(plan.device)
    text = f"{short_bytes(needed)} for weights, gradients and the optimizer's state"
    if available is not None and needed > available:
        text += f", but {plan.device.type} has {short_bytes(available)}"
        yield Finding(
            "state", ERROR, text, "use a smaller model, or several GPUs and parallel=fsdp"
        )
    else:
        yield Finding("state", OK, f"{text}; activations on top")


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU, or those that the machine can still give; None: unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in rows else None


PARTS: tuple[Callable[[Plan], Iterator[Finding]], ...] = (
    _loggers, _vocabulary, _passes, _validation, _schedule, _disk, _state,
)  # fmt: skip


# -- one real step -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Seconds and bytes of a real step."""

    compiling: float
    step: float
    evaluation: float
    memory: float
    reserved: float
    total: float | None


def _real_step(spec: Spec, device: str) -> Iterator[Finding]:
    ranks = start_ranks(device)
    before = device_memory(ranks.device)
    try:
        measured = measure(spec, ranks, before)
    except torch.OutOfMemoryError:
        micro = spec.micro_batch or spec.batch
        text = f"a step does not fit into {short_bytes(before or 0)}"
        advice = f"set micro_batch={micro // 2}" if micro > 1 else "use a smaller model"
        yield Finding("step", ERROR, text, advice)
        return
    except NotFinite as error:
        yield Finding("step", ERROR, str(error))
        return
    yield _memory_used(measured, ranks)
    yield _expected_time(spec, measured)
    use = device_use(torch.get_num_threads())
    if ranks.device.type == "cpu" and shared_device([use]):
        text = f"the machine is busy (load per core {use['load']:.2g}): the times are too long"
        yield Finding("time", NOTE, text)


def measure(spec: Spec, ranks: Ranks, total: float | None) -> Measured:
    """Take steps on a real batch and evaluate one batch. Micro-batches all take as long: some are
    timed."""
    with TemporaryDirectory() as folder:
        trainer = Trainer(spec, RunFolder(folder), ranks, prepared_data(spec))
        try:
            first, *later = _timed_steps(trainer)
            evaluation = _timed_evaluation(trainer)
        finally:
            trainer.monitor.close()
    step = median(later) if later else first
    cuda = ranks.device.type == "cuda"
    memory = peak_memory(ranks.device) * 2**30
    reserved = torch.cuda.max_memory_reserved() if cuda else memory
    return Measured(
        max(0.0, first - step) * spec.compile, step, evaluation, memory, reserved, total
    )


def _timed_steps(trainer: Trainer) -> list[float]:
    """Return the seconds of steps, the first of which compiles."""
    spec = trainer.spec
    tokens, targets = trainer.batch(0)
    part = min(len(tokens), MICRO_BATCHES * (spec.micro_batch or len(tokens)))
    seconds: list[float] = []
    start = _now(trainer)
    while len(seconds) < WARM_UP + 3:
        began = _now(trainer)
        trainer.forward_backward(tokens[:part], targets[:part])
        passed = _now(trainer)
        if trainer.is_finite(tokens[:part], targets[:part]):
            trainer.update()
        trainer.step += 1
        seconds.append((passed - began) * len(tokens) / part + _now(trainer) - passed)
        if _now(trainer) - start > ENOUGH and len(seconds) > spec.compile:
            break
    return seconds


def _timed_evaluation(trainer: Trainer) -> float:
    """Return the seconds of an evaluation, from one batch of it."""
    spec, tokens = trainer.spec, trainer.validation
    batch = spec.micro_batch or spec.batch
    count = min(len(tokens), max(1, spec.eval_tokens // spec.model.sequence))
    seconds = []
    for _ in range(1 + spec.compile):  # the first one compiles
        began = _now(trainer)
        evaluate(trainer.parallel, tokens, batch, batch, trainer.ranks, trainer.autocast)
        seconds.append(_now(trainer) - began)
    return seconds[-1] * count / min(batch, len(tokens)) * spec.evaluations


def _now(trainer: Trainer) -> float:
    if trainer.ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _memory_used(measured: Measured, ranks: Ranks) -> Finding:
    total, is_cuda = measured.total, ranks.device.type == "cuda"
    peak = f"{short_bytes(measured.memory)} at most"
    text = f"{peak}, {short_bytes(measured.reserved)} reserved" if is_cuda else peak
    if total:
        text += f"; {'the GPU has' if is_cuda else 'available:'} {short_bytes(total)}"
    if total and measured.reserved > FULL * total:
        return Finding("memory", WARNING, f"{text}: nearly all", "lower micro_batch")
    return Finding("memory", OK, text)


def _expected_time(spec: Spec, measured: Measured) -> Finding:
    steps = spec.steps - spec.parent_step
    count = evaluations_left(spec, spec.parent_step)
    training, evaluating = steps * measured.step, count * measured.evaluation
    total = measured_time(training + evaluating + measured.compiling)
    rate = short_number(spec.tokens_per_step / measured.step)
    parts = [f"{counted(steps, 'step')} of {measured.step:.3g} s"]
    parts += [f"{counted(count, 'evaluation')} of {measured.evaluation:.3g} s"] if count else []
    parts += [f"compiling {measured_time(measured.compiling)}"] if measured.compiling else []
    text = f"about {total} without checkpoints: {', '.join(parts)}; {rate} tokens/s"
    return Finding("time", OK, text)


# -- as text -----------------------------------------------------------------------------------


def passed(findings: list[Finding]) -> bool:
    return all(finding.status != ERROR for finding in findings)


def to_json(folder: Path, findings: list[Finding]) -> str:
    content = {"folder": str(folder), "passed": passed(findings)}
    return json.dumps({**content, "findings": [asdict(f) for f in findings]}, indent=2)


def to_text(folder: Path, findings: list[Finding]) -> str:
    """Return the findings as aligned lines, each problem followed by what to do."""
    lines = [str(folder), ""]
    for finding in findings:
        shout = finding.status in (WARNING, ERROR)
        status = finding.status.upper() if shout else finding.status
        lines.append(f"{status:9}{finding.part:12}{finding.text}")
        if finding.advice:
            lines.append(f"{'':21}{'to do: ' * shout}{finding.advice}")
    counts = {name: sum(f.status == name for f in findings) for name in (ERROR, WARNING)}
    words = [counted(n, name) for name, n in counts.items() if n]
    return "\n".join([*lines, "", ", ".join(words) or "nothing speaks against it"])
