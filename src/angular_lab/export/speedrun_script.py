"""Train AngularMuown on the optimization track of modded-nanogpt.

    torchrun --standalone --nproc_per_node=8 FILE.py        on 1 to 8 GPUs; or: python FILE.py

The model is that of the lab's named run `speedrun`. The constants below are the settings of the
entry, and examples/speedrun/README.md gives their reasons. The rest follows the track's
records/track_3_optimization/train_gpt_simple.py (commit 04447b4): the training data in order, the
validation set, one forward and backward pass per step, the source at the start of the log.
"""

import argparse
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from angular_lab.config.named_runs import speedrun
from angular_lab.config.spec import ModelSpec, ScheduleSpec
from angular_lab.errors import UserError
from angular_lab.models.gpt_speedrun import GPTSpeedrun
from angular_muown import AngularMuown, inverse_polynomial, plan, ramp, wsd

RUN = replace(speedrun(), steps=3000, schedule=ScheduleSpec(warmup=60, decay=0.5))
LR = 0.03  # angle of a step, in radians
DECAY_SCALE = 1e-3  # c of kappa, per step
EMBEDDING_LR, HEAD_LR, VECTOR_LR = 0.6, 0.009375, 0.03  # AdamW; vectors are gains and biases
AUX_BETAS, AUX_EPS = (0.8, 0.95), 1e-10  # AdamW
MOMENTUM_RAMP = 300  # steps from --momentum-start to the momentum, and back at the end
VAL_TOKENS = 20 * 524_288  # this and the next line: the track's
VAL_EVERY = 125  # steps
LATE_VAL_EVERY = 25  # in the last tenth, so that the first step that passes is known
LATE = 0.9
MAGIC, VERSION = 20240520, 1  # of a shard: 256 int32 (magic, version, number of tokens, zeros)
HEADER = 512  # length of that header in 16-bit tokens


class Ranks:
    """The processes of a run, from torchrun's environment; one without it."""

    def __init__(self, device: str) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        if self.world > 1:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")

    def sum(self, t: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(t)
        return t

    def now(self) -> float:
        """Return the time once all ranks have finished their work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.world > 1:
            dist.barrier()
        return time.perf_counter()


def read_shard(path: Path) -> Tensor:
    """Return the tokens of a file as a memory map."""
    size = path.stat().st_size // 2
    if size < HEADER:
        raise UserError(f"{path} is not a token shard: it is shorter than a header")
    words = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint16)
    magic, version, count = words[:HEADER].view(torch.int32)[:3].tolist()
    if (magic, version, count) != (MAGIC, VERSION, size - HEADER):
        raise UserError(
            f"{path} is not a complete token shard: its header has magic {magic}, version "
            f"{version} and {count} tokens; expected {MAGIC}, {VERSION} and {size - HEADER}"
        )
    return words[HEADER:]


def batches(folder: Path, split: str, tokens: int, sequence: int, ranks: Ranks) -> Iterator[Tensor]:
    """Yield this rank's windows of sequence + 1 tokens, batch by batch in the order of the files.

    A batch never spans two files: the end of a file that does not fill a batch is skipped.
    """
    paths = sorted(folder.glob(f"*{split}_*.bin"))  # fineweb_train_000001.bin, or the lab's shards
    share = tokens // ranks.world
    for path in paths:
        shard = read_shard(path)
        for start in range(0, len(shard) - tokens, tokens):
            first = start + ranks.rank * share
            ids = shard[first : first + share + 1].to(torch.int64)
            yield ids.unfold(0, sequence + 1, sequence).to(ranks.device)
    raise UserError(
        f"{folder} has {len(paths)} files *{split}_*.bin, too few for another {tokens} "
        f"{split} tokens: set the folder with --data, or ask for fewer"
    )


class Norm(nn.RMSNorm):
    """RMSNorm whose gain takes the dtype of its input, as the track's does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.type_as(x), self.eps)


class TrackModel(GPTSpeedrun):
    """The track's network with its residual stream in `dtype`: the track's is bfloat16."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__(spec)
        self.dtype = dtype
        for parent in list(self.modules()):
            for name, module in parent.named_children():
                if isinstance(module, nn.RMSNorm):
                    setattr(parent, name, Norm(spec.width, eps=module.eps))

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens).to(self.dtype)


def make_optimizer(model: GPTSpeedrun, options: argparse.Namespace) -> AngularMuown:
    """AngularMuown for hidden matrices (q, k and v separately), AdamW for all other parameters."""
    rates = {"embedding.weight": options.embedding_lr, "lm_head.weight": options.head_lr}
    for name, p in model.named_parameters():
        if p.ndim < 2:
            rates[name] = options.vector_lr
    fused = next(model.parameters()).is_cuda
    aux = {"betas": (AUX_BETAS[0], options.aux_beta2), "eps": AUX_EPS, "fused": fused}
    overrides = {name: {**aux, "lr": lr} for name, lr in rates.items()}
    groups = plan(model, blocks=model.blocks(), radius_lr=options.radius_lr, overrides=overrides)
    return AngularMuown(
        groups, options.lr, warmup_steps=options.warmup, decay_scale=options.decay_scale
    )


def kappa(step: int, options: argparse.Namespace) -> float:
    return inverse_polynomial(step, options.warmup, options.decay_scale, 1.0)


def schedule(step: int, options: argparse.Namespace) -> float:
    """Return the factor of all learning rates."""
    decay_steps = round(options.cooldown * options.steps)
    return wsd(step, options.steps, options.warmup, decay_steps)


def momentum(step: int, highest: float, options: argparse.Namespace) -> float:
    """Return the momentum of the matrices at a step."""
    start = options.momentum_start
    if start is None:
        return highest
    return ramp(step, options.steps, MOMENTUM_RAMP, start, highest)


def total_angle(options: argparse.Namespace) -> float:
    """Return how far a row turns in all steps, in radians."""
    steps = range(options.steps)
    return options.lr * sum(schedule(step, options) * kappa(step, options) for step in steps)


class Training:
    """A model and its optimizer; `main` calls `step` and `validate`."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        names = ("vocabulary", "sequence", "layers", "width", "heads", "mlp")
        sizes = {name: getattr(options, name) for name in names}
        on_gpu = ranks.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self.model = TrackModel(replace(RUN.model, **sizes), dtype)
        self.model.init_weights(options.seed)  # drawn on the CPU: the same on every rank
        self.model.to(ranks.device)
        if on_gpu:
            self.model.compile()
        self.autocast = torch.autocast(ranks.device.type, torch.bfloat16, enabled=on_gpu)
        self.optimizer = make_optimizer(self.model, options)
        self.lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.highest_momentum = self.optimizer.defaults["momentum"]

    def losses(self, windows: Tensor) -> Iterator[Tensor]:
        """Yield the loss of each micro-batch; summed over all ranks, they give the mean."""
        for part in windows.split(self.options.micro_batch):
            with self.autocast:
                loss = self.model(part[:, :-1].contiguous(), part[:, 1:].contiguous())
            yield loss * (len(part) / len(windows) / self.ranks.world)

    def step(self, index: int, windows: Tensor) -> float:
        """Take a step on this rank's windows; return the mean loss over all ranks."""
        total = torch.zeros((), device=self.ranks.device)
        for loss in self.losses(windows):
            total += loss.detach()
            loss.backward()
        for p in self.model.parameters():
            if p.grad is not None:
                self.ranks.sum(p.grad)
        if RUN.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), RUN.clip)
        factor = schedule(index, self.options)
        for group, lr in zip(self.optimizer.param_groups, self.lrs, strict=True):
            group["lr"] = lr * factor
            if group["algorithm"] == "matrix":
                group["momentum"] = momentum(index, self.highest_momentum, self.options)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.ranks.sum(total).item()

    @torch.no_grad()
    def validate(self, windows: Tensor) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for loss in self.losses(windows):
            total += loss.double()
        return self.ranks.sum(total).item()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train AngularMuown on the optimization track; smaller sizes are for tests."
    )
    data = os.environ.get("DATA_PATH", "data/fineweb10B")
    parser.add_argument("--data", type=Path, default=Path(data), help="default: $DATA_PATH")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    model = RUN.model
    sizes = {"steps": RUN.steps, "batch": RUN.batch, "micro-batch": RUN.micro_batch,
             "seed": RUN.seed, "warmup": RUN.schedule.warmup, "vocabulary": model.vocabulary,
             "sequence": model.sequence, "layers": model.layers, "width": model.width,
             "heads": model.heads, "mlp": model.mlp, "val-tokens": VAL_TOKENS,
             "val-every": VAL_EVERY}  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value:,}")
    settings = {"lr": LR, "decay-scale": DECAY_SCALE, "cooldown": RUN.schedule.decay,
                "embedding-lr": EMBEDDING_LR, "head-lr": HEAD_LR, "vector-lr": VECTOR_LR,
                "aux-beta2": AUX_BETAS[1]}  # fmt: skip
    for name, value in settings.items():
        parser.add_argument(f"--{name}", type=float, default=value, help=f"default: {value:g}")
    parser.add_argument("--radius-lr", type=float, help="of the row lengths; default: --lr")
    text = f"first and last momentum, {MOMENTUM_RAMP} steps from the usual; default: constant"
    parser.add_argument("--momentum-start", type=float, help=text)
    text = "stop after this many steps of the same schedule; default: --steps"
    parser.add_argument("--stop-after", type=int, help=text)
    options = parser.parse_args(arguments)
    if options.stop_after is None:
        options.stop_after = options.steps
    return options


def check_options(options: argparse.Namespace, world: int) -> None:
    if not 1 <= options.stop_after <= options.steps:
        raise UserError(
            f"--stop-after {options.stop_after} must be from 1 to --steps, {options.steps}"
        )
    if not 0 <= options.cooldown <= 1:
        raise UserError(f"--cooldown {options.cooldown:g} is a share of the steps, from 0 to 1")
    start = options.momentum_start
    if start is not None and (not 0 <= start < 1 or options.steps < 2 * MOMENTUM_RAMP):
        raise UserError(
            f"--momentum-start {start:g} must be from 0 to below 1, in a run of at least "
            f"{2 * MOMENTUM_RAMP} steps; --steps is {options.steps}"
        )
    usual = signature(AngularMuown).parameters["momentum"].default
    if start is not None and start > usual:
        raise UserError(
            f"--momentum-start {start:g} must be at most the usual momentum, {usual:g}: it rises "
            "from there"
        )
    if not 0 <= options.aux_beta2 < 1:
        raise UserError(f"--aux-beta2 {options.aux_beta2:g} must be from 0 to below 1")
    if options.batch % world:
        raise UserError(f"--batch {options.batch} must be divisible by the {world} ranks")
    if options.val_tokens % (options.sequence * world) or options.val_tokens < 1:
        raise UserError(
            f"--val-tokens {options.val_tokens} must be a multiple of {options.sequence * world}: "
            f"complete sequences of {options.sequence} tokens on each of the {world} ranks"
        )


def is_validated(step: int, options: argparse.Namespace) -> bool:
    """True if the loss is measured before this step; never by a loss, as the track's rules ask."""
    every = options.val_every
    if step >= LATE * options.steps:
        every = min(every, LATE_VAL_EVERY)
    return step == options.stop_after or step % every == 0


def main(arguments: Sequence[str] | None = None) -> None:
    source = Path(__file__).read_text(encoding="utf-8")  # now: the file may change during the run
    options = parse(arguments)
    ranks = Ranks(options.device)
    check_options(options, ranks.world)
    path = Path("logs") / f"{uuid.uuid4()}.txt"

    def log(text: str, console: bool = True) -> None:
        if ranks.rank == 0:
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                print(text, file=file)
            if console:
                print(text, flush=True)

    log(source + "=" * 100, console=False)
    log(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {ranks.world} ranks; log: {path}")
    log(" ".join(f"{key}={value}" for key, value in vars(options).items()))
    last = kappa(options.steps - 1, options)
    log(f"a row turns by {total_angle(options):.1f} radians in all; kappa ends at {last:.2f}")
    training, sequence = Training(options, ranks), options.sequence
    validation = next(batches(options.data, "val", options.val_tokens, sequence, ranks))
    train = batches(options.data, "train", options.batch * sequence, sequence, ranks)
    seconds, start = 0.0, ranks.now()  # of training: the clock stops during validation
    for step in range(options.stop_after + 1):
        if is_validated(step, options):
            seconds += ranks.now() - start
            loss = training.validate(validation)
            log(f"step:{step}/{options.steps} val_loss:{loss:.5f} train_time:{seconds:.3f}s")
            start = ranks.now()
        if step < options.stop_after:
            loss = training.step(step, next(train))
            elapsed = seconds + time.perf_counter() - start
            log(f"step:{step + 1}/{options.steps} train_loss:{loss:.5f} train_time:{elapsed:.3f}s")
    if ranks.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
