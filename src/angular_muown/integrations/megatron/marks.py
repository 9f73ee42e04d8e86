"""Classify Megatron's weights by their attributes, their names and the modules that own them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

# Path components. Megatron marks its word embedding and output layer, but not the position and
# token type embeddings, which are next to the former under `embedding`.
TABLES = frozenset(("embedding", "position_embeddings", "tokentype_embeddings"))
ROUTERS = frozenset(("router", "gate_weight"))  # gate_weight belongs to shared experts


def is_matrix(p: Tensor, name: str) -> bool:
    """True if p is a hidden matrix, not an embedding, a router or the gate of shared experts."""
    marks = ("is_embedding_or_output_parameter", "is_table")
    marked = any(getattr(p, mark, False) for mark in marks)
    return p.ndim == 2 and not marked and (TABLES | ROUTERS).isdisjoint(name.split("."))


def mark(model_chunks: Iterable[nn.Module]) -> None:
    """Set attributes that classify weights. Megatron copies them to its float32 copies.

    `expert_tp` and `is_qkv` are Megatron's, for its Muon; later versions set them. `is_table` is
    ours, because Megatron's attribute for embeddings would also change their learning rate.
    """
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    for chunk in model_chunks:
        for name, p in chunk.named_parameters():
            path = name.split(".")
            if "experts" in path:
                p.expert_tp = True  # pyrefly: ignore[missing-attribute]
            if "linear_qkv" in path and p.ndim == 2:
                p.is_qkv = True  # pyrefly: ignore[missing-attribute]
        for module in chunk.modules():
            if isinstance(module, nn.Embedding | VocabParallelEmbedding):
                module.weight.is_table = True  # pyrefly: ignore[missing-attribute]


@contextmanager
def frozen(params: Iterable[Tensor]) -> Iterator[None]:
    """Disable gradients, so that Megatron's factories skip these parameters."""
    frozen_params = [p for p in params if p.requires_grad]
    for p in frozen_params:
        p.requires_grad = False
    try:
        yield
    finally:
        for p in frozen_params:
            p.requires_grad = True
