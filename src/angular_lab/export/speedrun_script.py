"""Training for the optimization track of modded-nanogpt: data, ranks, the loop and its log.

    torchrun --standalone --nproc_per_node=8 FILE.py        1 to 8 GPUs; or: python FILE.py

The numbers of the run are those of the recipe `speedrun` of angular_lab. What the track fixes is
from its records/track_3_optimization/train_gpt_simple.py (commit 04447b4): data in order, the
validation set and how often it is used, the source at the start of the log.
"""

import argparse
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from angular_lab.config.named_runs import speedrun
from angular_lab.config.spec import ModelSpec, OptimSpec, ScheduleSpec
from angular_lab.models.gpt_speedrun import GPTSpeedrun
from angular_muown import AngularMuown, plan, wsd

RECIPE = speedrun()
# The recipe's numbers; in the exported file they stand here as values.
STEPS = RECIPE.steps
BATCH = RECIPE.batch  # sequences per step over all ranks
MICRO_BATCH = RECIPE.micro_batch  # sequences per forward pass and rank
SEED = RECIPE.seed
CLIP = RECIPE.clip  # global gradient norm; 0: none
MODEL: ModelSpec = RECIPE.model
OPTIM: OptimSpec = RECIPE.optim
SCHEDULE: ScheduleSpec = RECIPE.schedule

# The track's own numbers.
VAL_TOKENS = 20 * 524_288
VAL_EVERY = 125
MAGIC, VERSION = 20240520, 1  # of a shard: 256 int32 (magic, version, number of tokens, zeros)
HEADER = 512  # the header's length in tokens of 16 bits


def runs_on(device: torch.device) -> bool:
    """The library's GPU kernels are not part of this file: every step is `update` of the engine,
    the same function in plain torch."""
    return False


def knows(recipe: object) -> bool:
    return False


def covers_shards(*_: object) -> bool:
    return False


def chain_for(*_: object) -> tuple[object, ...]:
    return ()


def modelled_microseconds(*_: object) -> float:
    return 0.0


def advance_shards(*_: object) -> None:
    raise RuntimeError("this file has no GPU kernels: install angular-muown for them")


class FusedGroups:
    """Stands for the kernels that this file leaves out; never made, because `runs_on` is False."""

    def __init__(self, size: int) -> None:
        raise RuntimeError("this file has no GPU kernels: install angular-muown for them")


class Place(NamedTuple):
    """This process among the ranks of the run."""

    rank: int
    world: int
    device: torch.device

    def sum(self, t: Tensor) -> Tensor:
        """In place, over the ranks."""
        if self.world > 1:
            dist.all_reduce(t)
        return t

    def now(self) -> float:
        """The time at which all ranks have done what they were told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.world > 1:
            dist.barrier()
        return time.perf_counter()


def find_place(kind: str) -> Place:
    """From torchrun's environment; without it, one rank."""
    world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Place(int(os.environ.get("RANK", 0)), world, device)


def read_shard(path: Path) -> Tensor:
    """The tokens of a file, mapped and not copied."""
    size = path.stat().st_size // 2
    if size < HEADER:
        raise ValueError(f"{path} is no token shard: it is shorter than a header")
    words = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint16)
    magic, version, count = words[:HEADER].view(torch.int32)[:3].tolist()
    if (magic, version, count) != (MAGIC, VERSION, size - HEADER):
        raise ValueError(
            f"{path} is no token shard, or truncated: magic {magic}, version {version}, {count} "
            f"tokens announced and {size - HEADER} there; wanted magic {MAGIC}, version {VERSION}"
        )
    return words[HEADER:]


def batches(folder: Path, split: str, tokens: int, sequence: int, place: Place) -> Iterator[Tensor]:
    """This rank's windows of sequence + 1 tokens, batch after batch in the order of the files.

    A batch lies inside one file: the rest of a file that does not fill one is left out.
    """
    paths = sorted(folder.glob(f"fineweb_{split}_*.bin"))
    share = tokens // place.world
    for path in paths:
        shard = read_shard(path)
        for start in range(place.rank * share, len(shard) - tokens + place.rank * share, tokens):
            tokens_here = shard[start : start + share + 1].to(torch.int64)
            yield tokens_here.unfold(0, sequence + 1, sequence).to(place.device)
    raise ValueError(
        f"{folder} has {len(paths)} files fineweb_{split}_*.bin, too few for another {tokens} "
        f"{split} tokens: give the folder with --data, or ask for fewer"
    )


def make_optimizer(model: GPTSpeedrun, warmup: int) -> AngularMuown:
    """Hidden matrices by AngularMuown, q, k and v each on its own; the rest by AdamW."""
    o = OPTIM
    scale: dict[str, Any] = {"scale": o.scale} if o.scale else {}  # "": the optimizer's own
    blocks = model.blocks() if o.split_blocks else {}
    aux = {"aux_lr": o.aux_lr or None, "aux_weight_decay": o.aux_weight_decay}
    groups = plan(model, blocks=blocks, **aux)
    for group in groups:
        if group["algorithm"] == "adamw":
            group["fused"] = next(model.parameters()).is_cuda
    return AngularMuown(
        groups, lr=o.lr, momentum=o.momentum, betas=(o.beta1, o.beta2),
        weight_decay=o.weight_decay, warmup_steps=warmup, decay_scale=o.decay_scale,
        decay_degree=o.decay_degree, orthogonalize=o.orthogonalize, radius=o.radius,
        radius_lr=o.radius_lr or None, **scale,
    )  # fmt: skip


class Run:
    """A model in training. `step` and `validate` are what the loop in `main` does."""

    def __init__(self, options: argparse.Namespace, place: Place) -> None:
        self.options, self.place = options, place
        names = ("vocabulary", "sequence", "layers", "width", "heads", "mlp")
        sizes = {name: getattr(options, name) for name in names}
        self.model = GPTSpeedrun(replace(MODEL, **sizes))
        self.model.init_weights(options.seed)  # drawn on the CPU: the same on every rank
        self.model.to(place.device)
        if on_gpu := place.device.type == "cuda":
            self.model.compile()
        self.autocast = torch.autocast(place.device.type, torch.bfloat16, enabled=on_gpu)
        self.optimizer = make_optimizer(self.model, options.warmup)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def loss(self, windows: Tensor) -> Tensor:
        with self.autocast:
            return self.model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    def step(self, index: int, windows: Tensor) -> float:
        """One step on this rank's windows; the mean loss over all ranks."""
        total = torch.zeros((), device=self.place.device)
        for part in windows.split(self.options.micro_batch):
            loss = self.loss(part) * (len(part) / len(windows) / self.place.world)
            total += loss.detach()
            loss.backward()
        for p in self.model.parameters():
            if p.grad is not None:
                self.place.sum(p.grad)
        if CLIP:
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        decay_steps = SCHEDULE.decay_steps or round(SCHEDULE.decay * self.options.steps)
        factor = wsd(index, self.options.steps, self.options.warmup, decay_steps)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.place.sum(total).item()

    @torch.no_grad()
    def validate(self, windows: Tensor) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self.place.device)
        for part in windows.split(self.options.micro_batch):
            total += self.loss(part).double() * (len(part) / len(windows) / self.place.world)
        return self.place.sum(total).item()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="AngularMuown on the track; smaller for a test.")
    data = os.environ.get("DATA_PATH", "data/fineweb10B")
    parser.add_argument("--data", type=Path, default=Path(data), help="default: $DATA_PATH")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"steps": STEPS, "batch": BATCH, "micro-batch": MICRO_BATCH, "seed": SEED,
             "warmup": SCHEDULE.warmup, "vocabulary": MODEL.vocabulary, "sequence": MODEL.sequence,
             "layers": MODEL.layers, "width": MODEL.width, "heads": MODEL.heads, "mlp": MODEL.mlp,
             "val-tokens": VAL_TOKENS, "val-every": VAL_EVERY}  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value:,}")
    return parser.parse_args(arguments)


def check_sizes(options: argparse.Namespace, world: int) -> None:
    if options.batch % world:
        raise ValueError(f"--batch {options.batch} must be divisible by the {world} ranks")
    if options.val_tokens % (options.sequence * world) or options.val_tokens < 1:
        raise ValueError(
            f"--val-tokens {options.val_tokens} must be whole sequences of {options.sequence} "
            f"tokens on each of the {world} ranks"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    source = Path(__file__).read_text(encoding="utf-8")  # now: the file may change during the run
    options = parse(arguments)
    place = find_place(options.device)
    check_sizes(options, place.world)
    path = Path("logs") / f"{uuid.uuid4()}.txt"

    def log(text: str, console: bool = True) -> None:
        if place.rank == 0:
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                print(text, file=file)
            if console:
                print(text, flush=True)

    log(source + "=" * 100, console=False)
    log(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {place.world} ranks; log: {path}")
    log(" ".join(f"{key}={value}" for key, value in vars(options).items()))
    run, sequence = Run(options, place), options.sequence
    held_out = next(batches(options.data, "val", options.val_tokens, sequence, place))
    train = batches(options.data, "train", options.batch * sequence, sequence, place)
    seconds, start = 0.0, place.now()  # of training: the clock stands still during validation
    for step in range(options.steps + 1):
        done = f"step:{step}/{options.steps}"
        if step == options.steps or step % options.val_every == 0:
            seconds += place.now() - start
            loss = run.validate(held_out)
            log(f"{done} val_loss:{loss:.5f} train_time:{seconds:.3f}s")
            start = place.now()
        if step < options.steps:
            loss = run.step(step, next(train))
            passed = seconds + time.perf_counter() - start
            log(f"step:{step + 1}/{options.steps} train_loss:{loss:.5f} train_time:{passed:.3f}s")
    if place.world > 1:
        dist.destroy_process_group()
