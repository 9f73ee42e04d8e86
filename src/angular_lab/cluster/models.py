"""The parameter shapes of large models. Without torch, for the command's --help."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shapes:
    """A decoder with gated MLPs and untied embeddings."""

    vocabulary: int
    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_size: int
    # Latent attention (arXiv 2405.04434), unless 0: the widths of the latent q and of k and v
    # together, and the extra dimensions of q's heads and of the shared k for rotary positions.
    latent_q: int = 0
    latent_kv: int = 0
    rotary: int = 0
    # Mixture of experts, unless 0.
    experts: int = 0
    expert_mlp: int = 0
    shared_mlp: int = 0
    dense_layers: int = 0  # leading layers without experts


MODELS = {
    # Llama 3 (arXiv 2407.21783, table 3)
    "llama-8b": Shapes(128_256, 32, 4096, 14_336, 32, 8, 128),
    "llama-70b": Shapes(128_256, 80, 8192, 28_672, 64, 8, 128),
    # Kimi K2 (arXiv 2507.20534): 1.03T parameters, of which 1.01T are in experts
    "moe-1t": Shapes(
        163_840, 61, 7168, 18_432, 64, 64, 128, latent_q=1536, latent_kv=512, rotary=64,
        experts=384, expert_mlp=2048, shared_mlp=2048, dense_layers=1,
    ),
}  # fmt: skip
