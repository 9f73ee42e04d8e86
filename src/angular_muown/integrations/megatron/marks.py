"""What a Megatron weight is: Megatron's marks, its name, and the module that owns it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

# Components of a path. Megatron marks its word embedding and output layer, but neither position nor
# token type embeddings, which stand beside the former under `embedding`.
TABLES = frozenset(("embedding", "position_embeddings", "tokentype_embeddings"))
ROUTERS = frozenset(("router", "gate_weight"))  # gate_weight: that of shared experts


def is_matrix(p: Tensor, name: str) -> bool:
    """Whether AngularMuown is meant for it: embeddings, routers and the gate of shared experts
    only look like hidden matrices."""
    marks = ("is_embedding_or_output_parameter", "is_table")
    marked = any(getattr(p, mark, False) for mark in marks)
    return p.ndim == 2 and not marked and (TABLES | ROUTERS).isdisjoint(name.split("."))


def mark(model_chunks: Iterable[nn.Module]) -> None:
    """What a weight is, as attributes that Megatron copies to its float32 copies: Megatron's own
    marks for its Muon, which later versions set themselves. `is_table` is ours: Megatron's own
    mark of embeddings would change which learning rate they have."""
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
    """Megatron's factories leave out what takes no gradient."""
    held = [p for p in params if p.requires_grad]
    for p in held:
        p.requires_grad = False
    try:
        yield
    finally:
        for p in held:
            p.requires_grad = True
