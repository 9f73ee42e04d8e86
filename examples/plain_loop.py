"""Train a tiny GPT on text of this machine in a plain loop: the AdamW line, and what replaces it.

    python examples/plain_loop.py
    python examples/plain_loop.py --steps 1000

It needs torch only. The text is the source code of Python's standard library, as bytes.
"""

import argparse
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from angular_muown import AngleMonitor, AngularMuown, wsd_schedule

VOCABULARY, CONTEXT, BATCH = 256, 64, 16


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # q, k and v in one matrix
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting the targets."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), targets.flatten())


@cache
def python_source(size: int = 2**20) -> Tensor:
    """Return bytes of the standard library's modules, in the order of their names."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return torch.frombuffer(bytearray(text[:size]), dtype=torch.uint8).long()


def batch(text: Tensor, step: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the tokens and the targets of a step: windows at random places."""
    chance = torch.Generator().manual_seed(1_000_000 * seed + step)
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=chance)
    windows = torch.stack([text[i : i + CONTEXT + 1] for i in starts])
    return windows[:, :-1], windows[:, 1:]


def main(steps: int = 300, lr: float = 0.02) -> list[float]:
    torch.manual_seed(0)
    model, text = GPT(), python_source()

    # optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = AngularMuown.for_model(
        model,
        lr=lr,
        blocks={"*.qkv.weight": 3},  # q, k and v are three matrices
    )
    print(optimizer.plan)
    scheduler = wsd_schedule(optimizer, steps, warmup=0.1)
    monitor = AngleMonitor(model, optimizer, every=max(1, steps // 10))
    losses = []
    for step in range(steps):
        loss = model(*batch(text, step))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if values := monitor.read():
            angle, kappa = values["angle_mean"], values["kappa"]
            print(f"step {step:4d}  loss {loss.item():.3f}  angle {angle:.4f}  kappa {kappa:.2f}")
    print(f"mean loss of the last tenth: {sum(losses[-(steps // 10) :]) / (steps // 10):.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="at least 10")
    parser.add_argument("--lr", type=float, default=0.02)
    main(**vars(parser.parse_args()))
