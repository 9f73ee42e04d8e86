"""Three optimizers train one small transformer on bytes, from the same weights and batches.

    python examples/train_text.py --out demo

The text is the source of the running Python's standard library: nothing is downloaded. A table is
printed; the folder gets loss.png and metrics.jsonl. How the library is used stands in
`make_optimizer` and `train`; the rest is model, text and report.
"""

import json
import sys
import sysconfig
import time
from argparse import ArgumentParser, Namespace
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from math import degrees, log
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from angular_muown import AngleMonitor, AngularMuown, Muon, plan, wsd

VOCABULARY, WIDTH, LAYERS, HEADS, MLP_WIDTH = 256, 128, 3, 4, 352
CONTEXT, BATCH = 128, 16  # bytes in a window, windows in a batch
WARMUP, COOLDOWN = 0.05, 0.4  # shares of the run
EVALUATE_EVERY, MEASURE_EVERY = 25, 5  # steps between two validations, two angles

# The hidden matrices' rate and that of all else, the best of those tried (validation loss, seed 0):
#   AdamW         0.002 1.501   0.004 1.481   0.008 1.510
#   Muon          0.01  1.459   0.02  1.393   0.04  1.396
#   AngularMuown  0.03  1.455   0.06  1.399   0.12  1.415
# and for the second rate each of 0.008, 0.016 and 0.032. Other seeds move a loss by 0.02: Muon and
# AngularMuown are level here. To repeat one:
#   python examples/train_text.py --optimizers Muon --lr-muon 0.04 --aux-lr 0.016
RATES = {"AdamW": (4e-3, 0.032), "Muon": (0.02, 0.016), "AngularMuown": (0.06, 0.016)}
COLORS = {"AdamW": "#777777", "Muon": "#0072b2", "AngularMuown": "#d55e00"}


@dataclass
class Run:
    """What one optimizer did, by step."""

    name: str
    lr: float
    aux_lr: float
    losses: dict[int, float] = field(default_factory=dict)  # validation, nats per byte
    angles: dict[int, float] = field(default_factory=dict)  # mean over all rows, degrees
    optimizer_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0


def make_optimizer(run: Run, model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """Hidden matrices learn at lr; embedding, head and norms, always AdamW's, at aux_lr."""
    # plan() sorts the parameters. It cannot see that a fused weight is three matrices (q, k, v) or
    # two (gate, up) on top of each other, so we say it.
    cuts = {"*.qkv.weight": 3, "*.gate_up.weight": 2}
    sort = partial(plan, model, blocks=cuts, aux_lr=run.aux_lr)
    if run.name == "AdamW":
        return torch.optim.AdamW(sort(), lr=run.lr, betas=(0.9, 0.95), weight_decay=0.1)
    if run.name == "Muon":
        return Muon(sort(), lr=run.lr)
    groups = sort(radius_lr=run.aux_lr)  # Adam moves the lengths of the rows, so at Adam's rate
    print(f"\n{groups}\n")  # a line for each parameter: what it is, and which rule trains it
    # kappa's default decay is made for thousands of steps: this one ends near 1/4 in any number.
    warmup, decay = round(WARMUP * args.steps), 3 / args.steps
    return AngularMuown(groups, lr=run.lr, warmup_steps=warmup, decay_scale=decay)


def train(run: Run, model: nn.Module, texts: tuple[Tensor, Tensor], args: Namespace) -> None:
    (training, held_out), steps = texts, args.steps
    warmup, cooldown = round(WARMUP * steps), round(COOLDOWN * steps)
    optimizer = make_optimizer(run, model, args)
    factor = partial(wsd, total_steps=steps, warmup_steps=warmup, decay_steps=cooldown)
    scheduler = LambdaLR(optimizer, factor)
    monitor = AngleMonitor(model, optimizer, every=MEASURE_EVERY)
    draw = torch.Generator().manual_seed(args.seed)  # the same batches for every optimizer
    start = time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(training) - CONTEXT, (BATCH,), generator=draw)
        loss = model(*windows(training, starts))
        optimizer.zero_grad()
        loss.backward()
        before = time.perf_counter()
        optimizer.step()
        run.optimizer_ms.append(1e3 * (time.perf_counter() - before))
        scheduler.step()
        if values := monitor.read():  # empty after a step that was not measured
            run.angles[step] = degrees(values["angle_mean"])
        if step % EVALUATE_EVERY == 0 or step == steps:
            run.losses[step] = evaluate(model, held_out)
        show_progress(run, step, steps, loss.item())
    run.seconds = time.perf_counter() - start


def show_progress(run: Run, step: int, steps: int, loss: float) -> None:
    """One line that is rewritten in a terminal; elsewhere a line for each validation."""
    line = f"{run.name:<12}  step {step:>4}/{steps}  training loss {loss:.3f}"
    line += "".join(f"  validation loss {run.losses[last]:.3f}" for last in list(run.losses)[-1:])
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if step == steps else "", flush=True)
    elif step in run.losses:
        print(line, flush=True)


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm and beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.gate_up = nn.Linear(WIDTH, 2 * MLP_WIDTH, bias=False)
        self.down = nn.Linear(MLP_WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k = rotate(heads[:, :, :2]).permute(2, 0, 3, 1, 4)
        v = heads[:, :, 2].transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: pairs along the last dimension turn with time, each at its own speed."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    speed = 10_000.0 ** -torch.linspace(0, 1, pairs.shape[-1])
    turn = torch.outer(torch.arange(x.shape[1]), speed)
    turn = torch.polar(torch.ones_like(turn), turn)[:, None, None, :]
    return torch.view_as_real(pairs * turn).flatten(-2)


class ByteTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats per byte."""
        logits = self.head(self.norm(self.blocks(self.embedding(inputs))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_texts() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and those of the last 5% of the files to validate on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [torch.tensor(list(file.read_bytes()), dtype=torch.uint8) for file in files]
    cut = len(files) - max(1, len(files) // 20)
    return torch.cat(texts[:cut]), torch.cat(texts[cut:])


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets: the bytes from each start on, and for each the byte that follows it."""
    chunk = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return chunk[:, :-1], chunk[:, 1:]


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    """Loss on windows spread evenly over the text, the same ones every time."""
    starts = torch.linspace(0, len(text) - CONTEXT - 1, 8 * BATCH).long()
    return model(*windows(text, starts)).item()


def print_table(runs: list[Run], plateau: int) -> None:
    """Angles are the last ones before cool-down and of the run; a step is the optimizer's alone."""
    print("\noptimizer       rate  val loss  bits/byte  plateau deg  end deg  seconds  step ms")
    for run in runs:
        *_, loss = run.losses.values()
        *_, at_plateau = (angle for step, angle in run.angles.items() if step <= plateau)
        *_, at_end = run.angles.values()
        print(
            f"{run.name:<12}{run.lr:>8g}{loss:>10.4f}{loss / log(2):>11.4f}{at_plateau:>13.3f}"
            f"{at_end:>9.3f}{run.seconds:>9.1f}{median(run.optimizer_ms):>9.1f}"
        )


def write_metrics(runs: list[Run], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for run in runs:
            for key, values in (("validation_loss", run.losses), ("angle_degrees", run.angles)):
                for step, value in values.items():
                    record = {"optimizer": run.name, "lr": run.lr, "step": step, key: value}
                    file.write(json.dumps(record) + "\n")


def plot(runs: list[Run], plateau: int, paths: list[Path]) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=150)
    losses, angles = figure.subplots(1, 2)
    steps = max(runs[0].losses)
    for run in runs:
        style = {"color": COLORS[run.name], "linewidth": 2}
        label = f"{run.name} {run.losses[max(run.losses)]:.3f}"
        losses.plot(list(run.losses), list(run.losses.values()), label=label, **style)
        angles.plot(list(run.angles), list(run.angles.values()), **style)
    losses.set(title="Validation loss (nats per byte)")
    angles.set(title="Mean angle of the rows per step (degrees)", yscale="log")
    angles.yaxis.set_major_formatter("{x:g}")
    losses.legend(frameon=False, title="final loss", alignment="left")
    for axes in (losses, angles):
        axes.set(xlabel="step (grey: cool-down)", xlim=(0, steps))
        axes.axvspan(plateau, steps, color="#f2f2f2", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--figure", type=Path, help="save the figure here too")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=min(4, torch.get_num_threads()))
    parser.add_argument("--optimizers", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--aux-lr", type=float, help="instead of each optimizer's own")
    for name, (lr, _) in RATES.items():
        parser.add_argument(f"--lr-{name.lower()}", dest=name, type=float, default=lr)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    model, texts = ByteTransformer(), read_texts()
    runs = [Run(name, vars(args)[name], args.aux_lr or RATES[name][1]) for name in args.optimizers]
    for run in runs:
        train(run, deepcopy(model), texts, args)
    plateau = args.steps - round(COOLDOWN * args.steps)
    print_table(runs, plateau)
    write_metrics(runs, args.out / "metrics.jsonl")
    plot(runs, plateau, [args.out / "loss.png", *([args.figure] if args.figure else [])])


if __name__ == "__main__":
    main()
