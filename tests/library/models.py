"""A small model with every kind of parameter that `plan` has to tell apart."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = {"*.attn.qkv.weight": 3}


class Attention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(d), Attention(d)
        self.norm2, self.up, self.down = nn.RMSNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class TinyLM(nn.Module):
    def __init__(self, d: int = 16, vocabulary: int = 20, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d)
        self.layers = nn.ModuleList([Block(d) for _ in range(layers)])
        self.norm = nn.RMSNorm(d)
        self.lm_head = nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def tiny_lm(dtype: torch.dtype = torch.float32, d: int = 16) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(d).to(dtype)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    """Return the loss of predicting a fixed permutation of each token.

    The model can learn it, but a few steps do not bring the loss to zero.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (8, 12), generator=generator)
    targets = (7 * tokens + 3) % 20
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
