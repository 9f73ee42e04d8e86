"""One trial of finetune.py: a base, a method with its settings, a seed; all weights or LoRA."""

import gc
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.lr_scheduler import LambdaLR

from angular_lab.data.batches import Batches, Tokens, prefetch
from angular_lab.models import LanguageModel
from angular_lab.run_folder import RunFolder
from angular_lab.sample import load_run
from angular_lab.training.build import make_deterministic
from angular_lab.training.evaluate import evaluate
from angular_lab.training.ranks import Ranks, choose_device
from angular_lab.training.recorded_passes import Passes, can_record
from angular_lab.training.start import data_place
from angular_muown import AngularMuown, Muon, plan, wsd

RANK, SCALE = 16, 2.0  # of the adapters: W + SCALE B A
BETAS, CLIP, WARMUP = (0.9, 0.95), 1.0, 0.1
KAPPA_FALL = 5.0  # decay_scale times steps: kappa ends at 1/6

Settings = dict[str, float]
Trial = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """An optimizer with the settings that are tuned: where each search starts, and its factor."""

    name: str
    start: Settings
    factors: Settings
    lora: bool = False
    kappa: bool = False  # WSD with kappa instead of the linear fall

    @property
    def axes(self) -> list[str]:
        return [*self.factors, "lr"] if len(self.factors) > 1 else [*self.factors]


METHODS = {
    "AdamW, full": Method("AdamW", {"lr": 8e-4, "aux_ratio": 1.0}, {"lr": 2, "aux_ratio": 3}),
    "AngularMuown, full": Method(
        "AngularMuown",
        {"lr": 4e-3, "aux_lr": 1e-3, "radius_lr": 1e-3},
        {"lr": 2, "aux_lr": 3, "radius_lr": 3},
    ),
    "AngularMuown, full, WSD with kappa": Method(
        "AngularMuown",
        {"lr": 4e-3, "aux_lr": 1e-3, "radius_lr": 1e-3},
        {"lr": 2, "aux_lr": 3, "radius_lr": 3},
        kappa=True,
    ),
    "Muon, full": Method("Muon", {"lr": 1e-3, "aux_lr": 1e-3}, {"lr": 2, "aux_lr": 3}),
    "AdamW, LoRA": Method(
        "AdamW", {"lr": 4e-3, "b_ratio": 1.0}, {"lr": 2, "b_ratio": 3}, lora=True
    ),
    "AngularMuown, LoRA": Method(
        "AngularMuown", {"lr": 1e-2, "radius_lr": 4e-3}, {"lr": 2, "radius_lr": 3}, lora=True
    ),
}


# -- LoRA ------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """W + SCALE B A as a parametrization of W: the model computes with the sum."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Linear(columns, rank, bias=False)
        self.lora_B = nn.Linear(rank, rows, bias=False)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + SCALE * (self.lora_B.weight @ self.lora_A.weight)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Start as peft does: A uniform, B zero."""
        A = torch.empty(self.lora_A.weight.shape)
        bound = 1 / math.sqrt(A.shape[1])
        self.lora_A.weight.copy_(A.uniform_(-bound, bound, generator=generator))
        self.lora_B.weight.zero_()


def adapt(model: LanguageModel, rank: int = RANK) -> list[Adapter]:
    """Freeze the model and add an adapter to every linear layer of its blocks."""
    model.requires_grad_(False)
    linears = [m for m in model.layers.modules() if isinstance(m, nn.Linear)]
    adapters = []
    for linear in linears:
        adapter = Adapter(linear.out_features, linear.in_features, rank).to(linear.weight.device)
        parametrize.register_parametrization(linear, "weight", adapter)
        adapters.append(adapter)
    return adapters


# -- one trial -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a trial depends on, apart from its settings."""

    base: str
    text: str
    method: str
    seed: int
    epochs: int
    batch: int
    eval_tokens: int
    device: str
    steps: int | None = None  # None: by epochs
    rank: int = RANK


class Session:
    """A model on this process's device, compiled once and reset for every trial."""

    def __init__(self, job: Job, lora: bool) -> None:
        spec = RunFolder(Path(job.base)).read_spec()
        device = choose_device(job.device)
        make_deterministic(spec)
        self.ranks = Ranks(0, 1, device)
        self.model = load_run(Path(job.base), str(device))
        self.weights = [(p, p.detach().clone()) for p in self.model.parameters()]
        self.adapters = adapt(self.model, job.rank) if lora else []
        if spec.compile:
            self.model.compile()
        self.autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=spec.precision == "bf16"
        )
        self.passes = Passes(self.model, self.autocast, can_record(spec, self.model, self.ranks))
        sizes = spec.model.sequence, spec.model.vocabulary
        self.train = Tokens(Path(job.text), "train", *sizes)
        self.held_out = Tokens(Path(job.text), "val", *sizes)
        self.prose = Tokens(data_place(spec), "val", *sizes)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def reset(self, job: Job) -> None:
        """Restore the base's weights; the adapters start anew, by the job's seed."""
        for p, values in self.weights:
            p.copy_(values)
        generator = torch.Generator().manual_seed(job.seed)
        for adapter in self.adapters:
            adapter.reset(generator)
        if any(p.grad is not None for p in self.trained):
            self.passes.clear()
        gc.collect()  # the last trial's optimizer

    def loss(self, tokens: Tokens, job: Job) -> float:
        count = min(job.eval_tokens // tokens.sequence, len(tokens))
        count -= count % job.batch  # a batch of another size would be compiled anew
        values = evaluate(self.model, tokens, count, job.batch, self.ranks, self.autocast)
        return values["val_loss"]

    def batch(self, batches: Batches, step: int) -> tuple[Tensor, Tensor]:
        windows = torch.from_numpy(batches.batch(step))
        if self.ranks.device.type == "cuda":
            windows = windows.pin_memory().to(self.ranks.device, non_blocking=True)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def step(self, tokens: Tensor, targets: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        loss = self.passes.forward(tokens, targets, 1.0).clone()
        self.passes.backward()
        nn.utils.clip_grad_norm_(self.trained, CLIP)
        optimizer.step()
        self.passes.clear()
        return loss


SESSIONS: dict[bool, Session] = {}  # of this process: all weights, LoRA


def session_of(job: Job) -> Session:
    """Return this process's session, reset to the base and the job's seed."""
    lora = METHODS[job.method].lora
    session = SESSIONS.get(lora) or SESSIONS.setdefault(lora, Session(job, lora))
    session.reset(job)
    return session


def steps_of(job: Job, windows: int) -> int:
    return job.steps or max(1, job.epochs * windows // job.batch)


def make_optimizer(
    model: LanguageModel, method: Method, settings: Settings, steps: int
) -> torch.optim.Optimizer:
    blocks = {} if method.lora else model.blocks()
    lr, fused = settings["lr"], next(model.parameters()).is_cuda
    if method.name == "AdamW":
        groups = plan(model, blocks=blocks)
        ratio = settings.get("aux_ratio", 1.0)
        own = [
            {"params": [p], "lr": lr * _ratio(name, group, ratio, settings.get("b_ratio", 1.0))}
            for group in groups
            for name, p in group["params"]
        ]
        return torch.optim.AdamW(own, lr=lr, betas=BETAS, weight_decay=0.0, fused=fused)
    aux_lr, radius_lr = settings.get("aux_lr"), settings.get("radius_lr")
    groups = plan(model, blocks=blocks, aux_lr=aux_lr, radius_lr=radius_lr)
    if method.name == "Muon":
        return Muon(groups, lr=lr, betas=BETAS, weight_decay=0.0)
    return AngularMuown(
        groups,
        lr=lr,
        betas=BETAS,
        warmup_steps=_warmup(steps),
        decay_scale=KAPPA_FALL / steps,
        decay_degree=1.0 if method.kappa else 0.0,
    )


def _ratio(name: str, group: dict[str, Any], aux: float, b: float) -> float:
    if group["algorithm"] == "adamw":
        return aux
    return b if "lora_B" in name else 1.0


def _warmup(steps: int) -> int:
    return max(1, round(WARMUP * steps))


def schedule(method: Method, steps: int) -> Callable[[int], float]:
    warmup = _warmup(steps)
    falling = round(0.2 * steps) if method.kappa else steps - warmup
    return lambda step: wsd(step, steps, warmup, falling)


def run_trial(job: Job, settings: Settings) -> Trial:
    """Fine-tune once. A loss that is not finite is None in the file."""
    began, session, method = time.perf_counter(), session_of(job), METHODS[job.method]
    steps = steps_of(job, len(session.train))
    optimizer = make_optimizer(session.model, method, settings, steps)
    scheduler = LambdaLR(optimizer, schedule(method, steps))
    batches = Batches(session.train, job.batch, job.seed)
    losses = []
    with closing(prefetch(lambda step: session.batch(batches, step), 0, steps)) as stream:
        for tokens, targets in stream:
            losses.append(session.step(tokens, targets, optimizer))
            scheduler.step()
    last = torch.stack(losses)[-max(1, steps // 10) :].double().mean().item()
    values = {
        "loss": session.loss(session.held_out, job),
        "prose_loss": session.loss(session.prose, job),
        "training_loss": last,
    }
    return {
        "method": job.method,
        "seed": job.seed,
        "settings": settings,
        "steps": steps,
        "trained_parameters": sum(p.numel() for p in session.trained),
        **{key: value if math.isfinite(value) else None for key, value in values.items()},
        "seconds": time.perf_counter() - began,
    }


def describe_base(job: Job) -> dict[str, Any]:
    """Return the base's settings, and its losses before fine-tuning."""
    session = session_of(job)
    return {
        "run": Path(job.base).name,
        "spec": RunFolder(Path(job.base)).read_spec().to_dict(),
        "loss": session.loss(session.held_out, job),
        "prose_loss": session.loss(session.prose, job),
        "windows": {"train": len(session.train), "held out": len(session.held_out)},
    }
