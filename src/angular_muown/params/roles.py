"""Find a parameter's role (embedding, head, router, hidden matrix) from the module that owns it.

Modules of other libraries are recognised by class names and by what they declare about their
weights, without importing those libraries.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import Tensor, nn

V = TypeVar("V")


class Patterns:
    """Match glob patterns against parameter names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def matching(self, argument: str, pattern: str) -> list[str]:
        matches = [name for name in self.names if fnmatchcase(name, pattern)]
        if not matches:
            near = get_close_matches(pattern, self.names, n=3, cutoff=0.3) or self.names[:3]
            raise ValueError(
                f"{argument}: pattern '{pattern}' matches no trainable parameter; "
                f"the names look like {', '.join(near)}"
            )
        return matches

    def lookup(self, argument: str, rules: Iterable[tuple[str, V]]) -> dict[str, V]:
        """Return name -> value; every pattern must match, and no name may match twice."""
        values: dict[str, V] = {}
        matched_by: dict[str, str] = {}
        for pattern, value in rules:
            for name in self.matching(argument, pattern):
                if name in matched_by:
                    raise ValueError(
                        f"{argument}: '{name}' is matched by '{matched_by[name]}' and by "
                        f"'{pattern}'; make the patterns disjoint"
                    )
                matched_by[name], values[name] = pattern, value
        return values


CONV1D = "transformers.pytorch_utils.Conv1D"  # GPT-2's linear layer: in x out
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
# Flags by which transformers' expert modules declare their layout, which differs between models.
EXPERT_LAYOUT = ("has_gate", "is_transposed", "is_concatenated")


def is_a(module: nn.Module, name: str) -> bool:
    """True if the module is an instance of the class with this full name."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == name for kind in type(module).__mro__)


def structure_of(
    module: nn.Module, attribute: str, p: Tensor, parent: nn.Module | None
) -> dict[str, Any]:
    """Return the group values of a weight of a known third-party module; {} for other modules."""
    if is_a(module, CONV1D):
        size = getattr(parent, "split_size", None)  # the attention splits its outputs by it
        fused = isinstance(size, int) and module is getattr(parent, "c_attn", None)
        return {"transposed": True} | ({"blocks": p.shape[1] // size} if fused else {})
    if p.ndim == 3 and is_experts(module):
        values: dict[str, Any] = {"view": "stack"}
        if module.is_transposed:
            values["transposed"] = True
        # Interleaved gate and up rows are not blocks: they stay one matrix.
        if attribute == "gate_up_proj" and module.has_gate and module.is_concatenated:
            values["blocks"] = 2
        return values
    return {}


def is_experts(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, key, None), bool) for key in EXPERT_LAYOUT)


def flattened_by(p: Tensor) -> str | None:
    """Return the framework that flattened a parameter, if it left a mark."""
    if getattr(p, "_is_flat_param", False):
        return "FSDP1"
    return "DeepSpeed" if hasattr(p, "ds_id") else None


# Usual names of output heads and of embeddings that are not an nn.Embedding, as path components.
HEAD_NAMES = frozenset(
    ("lm_head", "head", "classifier", "score", "unembed", "unembedding", "embed_out",
     "output_projection", "qa_outputs", "seq_relationship")
)  # fmt: skip
EMBEDDING_NAMES = frozenset(
    ("patch_embed", "patch_embedding", "patch_embeddings", "pos_embed", "pos_embedding",
     "position_embedding", "position_embeddings", "cls_token", "mask_token", "register_tokens",
     "lora_embedding_A", "lora_embedding_B")
)  # fmt: skip
# A ConvNet's embedding: every convolution under these, and under a top-level conv1, which is a
# layer in torchvision's ResNet and a Sequential in timm's with a deep stem.
STEM_NAMES = frozenset(("stem", "conv_stem", "embedder"))
TOP_LEVEL_STEMS = frozenset(("conv1",))
TOP_LEVEL_HEADS = frozenset(("fc",))  # ResNet's head at the top level, a hidden layer below it
ROUTER_NAMES = frozenset(("router",))
# A router if its parent also has experts, otherwise a GLU's gate.
GATE_NAMES = frozenset(("gate", "wg", "shared_expert_gate"))
STATE_SPACE_NAMES = frozenset(("A_log",))  # Mamba's decay rates: a table, not a linear map
RNN_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Role:
    algorithm: str
    reason: str
    values: Mapping[str, Any] = field(default_factory=dict)


def find_roles(
    model: nn.Module,
    named: list[tuple[str, nn.Parameter]],
    patterns: Patterns,
    declared: Mapping[str, Role],
    head: str | Iterable[str] | None,
) -> dict[str, Role]:
    """Return name -> role for all names, or raise an error that lists the undecided parameters."""
    owners = _owners(model)
    # "auto" also finds a frozen head. The caller's patterns must match trainable parameters.
    candidates = list(model.named_parameters()) if head == "auto" else named
    heads = _find_heads(model, candidates, owners, patterns, head)
    roles: dict[str, Role] = {}
    unknown: list[str] = []
    for name, p in named:
        role = declared.get(name)
        if role is not None and head not in (None, "auto") and name in heads:
            raise ValueError(
                f"'{name}' is named by head= and declared as {role.algorithm}: remove one of them"
            )
        if role is not None and role.algorithm == "matrix":
            structure = _structure(p, owners[p][0], model)
            if role.values.get("view", structure.get("view")) != structure.get("view"):
                structure = {}  # the caller declares another view
            role = Role("matrix", role.reason, {**structure, **role.values})
        if role is None and name in heads:
            role = Role("adamw", _head_or_tied(owners[p]))
        if role is None:
            role = _infer_role(name, p, owners[p], model)
        if role is None:
            unknown.append(f"'{name}' {tuple(p.shape)} in {type(owners[p][0][1]).__name__}")
        else:
            roles[name] = role
    if unknown:
        raise ValueError(
            f"plan cannot tell the role of {', '.join(unknown)}: declare each with matrix=[...] (a "
            "hidden matrix, out x in), transposed=[...] (in x out), stacks=[...] (experts) or "
            "adamw=[...]"
        )
    if head == "auto" and not heads:
        raise ValueError(
            f"plan finds no output head in {type(model).__name__}: name its parameters, such as "
            "head='fc.*', or pass head=None if it has none or shares the embedding's weight"
        )
    return roles


def hidden_matrices(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return name -> group values of what looks like a hidden matrix, for reports.

    A parameter whose role is unknown counts as one.
    """
    named = list(model.named_parameters())
    owners = _owners(model)
    heads = _find_heads(model, named, owners, Patterns(name for name, _ in named), "auto")
    unknown = Role("matrix", "unknown", {})
    matrices = {}
    for name, p in named:
        role = _infer_role(name, p, owners[p], model) or unknown
        if name not in heads and role.algorithm == "matrix":
            stack = {"view": "stack"} if role is unknown and p.ndim > 2 else {}
            matrices[name] = {**role.values, **stack}
    return matrices


Owner = tuple[str, nn.Module, str]  # the module's path, the module, the parameter's attribute


def _owners(model: nn.Module) -> dict[Tensor, list[Owner]]:
    """Return all owners of each parameter: tied weights have several."""
    owners: dict[Tensor, list[Owner]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, p in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(p, []).append((path, module, attribute))
    return owners


def _find_heads(
    model: nn.Module,
    named: list[tuple[str, nn.Parameter]],
    owners: Mapping[Tensor, list[Owner]],
    patterns: Patterns,
    head: str | Iterable[str] | None,
) -> set[str]:
    if head is None:
        return set()
    if head != "auto":
        globs = [head] if isinstance(head, str) else list(head)
        return {name for pattern in globs for name in patterns.matching("head", pattern)}
    reported = getattr(model, "get_output_embeddings", lambda: None)()
    weights = set(reported.parameters()) if isinstance(reported, nn.Module) else set()
    return {
        name
        for name, p in named
        if p in weights
        or any(HEAD_NAMES.intersection(path.split(".")) for path, _, _ in owners[p])
        or any(path in TOP_LEVEL_HEADS for path, _, _ in owners[p])
        or (len(owners[p]) > 1 and any(isinstance(m, nn.Embedding) for _, m, _ in owners[p]))
    }


def _head_or_tied(owners: list[Owner]) -> str:
    embeds = {isinstance(module, nn.Embedding) for _, module, _ in owners}
    return "tied head" if len(embeds) > 1 else "embedding" if embeds == {True} else "head"


def _infer_role(name: str, p: Tensor, owners: list[Owner], model: nn.Module) -> Role | None:
    """Return a parameter's role; None if it must be declared."""
    if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for _, module, _ in owners):
        return Role("adamw", "embedding")
    if EMBEDDING_NAMES.intersection(name.split(".")):
        return Role("adamw", "embedding")
    if p.ndim < 2:
        return Role("adamw", "vector" if p.ndim else "scalar")
    path, module, attribute = owners[0]
    reason = _reason_for_adamw(path, module, attribute, p, model)
    if reason is not None:
        return Role("adamw", reason)
    if isinstance(module, nn.Linear):
        return Role("matrix", "hidden")
    structure = _structure(p, owners[0], model)
    if structure or isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return Role("matrix", type(module).__name__, structure)
    return None


def _reason_for_adamw(
    path: str, module: nn.Module, attribute: str, p: Tensor, model: nn.Module
) -> str | None:
    """Return why a parameter with two or more dimensions is not a hidden matrix, or None."""
    if isinstance(module, NORMS):
        return "norm"
    if attribute in ("bias_k", "bias_v"):
        return "bias"
    if is_experts(module) and p.ndim == 2:
        return "vectors of experts"
    if _is_router(path, model):
        return "router"
    if attribute in STATE_SPACE_NAMES:
        return "state space"
    if isinstance(module, CONVOLUTIONS):
        if 1 < module.groups == module.in_channels:
            return "depthwise"
        names = path.split(".")
        if STEM_NAMES.intersection(names) or names[0] in TOP_LEVEL_STEMS:
            return "input convolution"
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return "transposed convolution"  # its rows are not its outputs
    return None


def _structure(p: Tensor, owner: Owner, model: nn.Module) -> dict[str, Any]:
    """Return the group values of a parameter that is not one plain out x in matrix; else {}."""
    path, module, attribute = owner
    if isinstance(module, CONVOLUTIONS):
        return {"view": "conv"} | ({"blocks": module.groups} if module.groups > 1 else {})
    if isinstance(module, nn.MultiheadAttention) and attribute == "in_proj_weight":
        return {"blocks": 3}
    if isinstance(module, nn.RNNBase) and not attribute.startswith("weight_hr"):  # the projection
        return {"blocks": RNN_GATES[module.mode]}
    return structure_of(module, attribute, p, _parent(path, model))


def _parent(path: str, model: nn.Module) -> nn.Module | None:
    return model.get_submodule(path.rpartition(".")[0]) if path else None


def _is_router(path: str, model: nn.Module) -> bool:
    if ROUTER_NAMES.intersection(path.split(".")):
        return True
    parent = _parent(path, model) if path.rpartition(".")[2] in GATE_NAMES else None
    return parent is not None and any("expert" in name for name, _ in parent.named_children())


# Usual names of nn.Embedding layers, to recognise them where only the names are known.
TOKEN_NAMES = frozenset(
    ("embed_tokens", "wte", "wpe", "tok_embeddings", "word_embeddings", "token_embedding",
     "embedding", "embeddings", "embed")
)  # fmt: skip


def is_embedding_or_head(name: str) -> bool:
    """True if a parameter's name is that of an embedding or of an output head."""
    return bool((HEAD_NAMES | EMBEDDING_NAMES | TOKEN_NAMES).intersection(name.split(".")))
