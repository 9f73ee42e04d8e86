"""What a parameter is, as the module that owns it shows: embedding, head, router, hidden matrix.

Modules of other libraries are known by the names of their classes and by what they declare of their
own weights. Nothing of them is imported: what is not loaded cannot be in a model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import Tensor, nn

V = TypeVar("V")


class Patterns:
    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def matching(self, argument: str, pattern: str) -> list[str]:
        found = [name for name in self.names if fnmatchcase(name, pattern)]
        if not found:
            near = get_close_matches(pattern, self.names, n=3, cutoff=0.3) or self.names[:3]
            raise ValueError(
                f"{argument}: pattern '{pattern}' matches no trainable parameter; "
                f"names here look like {', '.join(near)}"
            )
        return found

    def lookup(self, argument: str, rules: Iterable[tuple[str, V]]) -> dict[str, V]:
        """name -> value; every pattern has to match, and no name may match twice."""
        found: dict[str, V] = {}
        owner: dict[str, str] = {}
        for pattern, value in rules:
            for name in self.matching(argument, pattern):
                if name in owner:
                    raise ValueError(
                        f"{argument}: '{name}' is matched by '{owner[name]}' and by '{pattern}'; "
                        "make the patterns disjoint"
                    )
                owner[name], found[name] = pattern, value
        return found


CONV1D = "transformers.pytorch_utils.Conv1D"  # GPT-2's linear layer: in x out
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
# What transformers' expert modules say of themselves, since their layouts differ.
EXPERT_LAYOUT = ("has_gate", "is_transposed", "is_concatenated")


def is_a(module: nn.Module, wanted: str) -> bool:
    """isinstance, by the class's full name."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == wanted for kind in type(module).__mro__)


def structure_of(
    module: nn.Module, own: str, p: Tensor, parent: nn.Module | None
) -> dict[str, Any]:
    """Group values of a weight that a library's module documents; {} where there is nothing."""
    if is_a(module, CONV1D):
        size = getattr(parent, "split_size", None)  # by which the attention splits its outputs
        fused = isinstance(size, int) and module is getattr(parent, "c_attn", None)
        return {"transposed": True} | ({"blocks": p.shape[1] // size} if fused else {})
    if p.ndim == 3 and is_experts(module):
        values: dict[str, Any] = {"view": "stack"}
        if module.is_transposed:
            values["transposed"] = True
        # interleaved gate and up rows are no blocks: they stay one matrix
        if own == "gate_up_proj" and module.has_gate and module.is_concatenated:
            values["blocks"] = 2
        return values
    return {}


def is_experts(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, key, None), bool) for key in EXPERT_LAYOUT)


def flattened_by(p: Tensor) -> str | None:
    """Who made a flat piece of a parameter, where that shows: there are no matrices in it."""
    if getattr(p, "_is_flat_param", False):
        return "FSDP1"
    return "DeepSpeed" if hasattr(p, "ds_id") else None


# Usual names of output heads and of embeddings that are no nn.Embedding, as path components.
HEAD_NAMES = frozenset(
    ("lm_head", "head", "classifier", "score", "unembed", "unembedding", "embed_out",
     "output_projection", "qa_outputs", "seq_relationship")
)  # fmt: skip
EMBEDDING_NAMES = frozenset(
    ("patch_embed", "patch_embedding", "patch_embeddings", "pos_embed", "pos_embedding",
     "position_embedding", "position_embeddings", "cls_token", "mask_token", "register_tokens",
     "lora_embedding_A", "lora_embedding_B")
)  # fmt: skip
# A ConvNet's embedding: every convolution under these, and under conv1 on top, which is a layer in
# torchvision's ResNet and a Sequential in timm's with a deep stem.
STEM_NAMES = frozenset(("stem", "conv_stem", "embedder"))
TOP_LEVEL_STEMS = frozenset(("conv1",))
TOP_LEVEL_HEADS = frozenset(("fc",))  # a hidden layer's name further down, ResNet's head on top
ROUTER_NAMES = frozenset(("router",))
# A router where experts stand beside it, else a GLU's gate
GATE_NAMES = frozenset(("gate", "wg", "shared_expert_gate"))
STATE_SPACE_NAMES = frozenset(("A_log",))  # Mamba's decay rates: a table, no linear map
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
    """name -> role for all names, or an error that lists what could not be judged."""
    owners = _owners(model)
    # all parameters, because a head that is frozen is one too; a pattern of the caller's has to
    # match what is trained
    sought = list(model.named_parameters()) if head == "auto" else named
    heads = _find_heads(model, sought, owners, patterns, head)
    roles: dict[str, Role] = {}
    unknown: list[str] = []
    for name, p in named:
        role = declared.get(name)
        if role is not None and head not in (None, "auto") and name in heads:
            raise ValueError(
                f"'{name}' is named by head= and declared as {role.algorithm}: say it once"
            )
        if role is not None and role.algorithm == "matrix":
            structure = _structure(p, owners[p][0], model)
            if role.values.get("view", structure.get("view")) != structure.get("view"):
                structure = {}  # the caller sees something else in it
            role = Role("matrix", role.reason, {**structure, **role.values})
        if role is None and name in heads:
            role = Role("adamw", _head_or_tied(owners[p]))
        if role is None:
            role = _judge(name, p, owners[p], model)
        if role is None:
            unknown.append(f"'{name}' {tuple(p.shape)} in {type(owners[p][0][1]).__name__}")
        else:
            roles[name] = role
    if unknown:
        raise ValueError(
            f"plan cannot judge {', '.join(unknown)}: declare each with matrix=[...] (a hidden "
            "matrix, out x in), transposed=[...] (in x out), stacks=[...] (experts) or adamw=[...]"
        )
    if head == "auto" and not heads:
        raise ValueError(
            f"plan finds no output head in {type(model).__name__}: name its parameters, such as "
            "head='fc.*', or pass head=None if it has none or shares the embedding's weight"
        )
    return roles


def hidden_matrices(model: nn.Module) -> dict[str, dict[str, Any]]:
    """name -> group values of what looks like a hidden matrix, for reports: nothing is refused."""
    named = list(model.named_parameters())
    owners = _owners(model)
    heads = _find_heads(model, named, owners, Patterns(name for name, _ in named), "auto")
    unknown = Role("matrix", "unknown", {})
    found = {}
    for name, p in named:
        role = _judge(name, p, owners[p], model) or unknown
        if name not in heads and role.algorithm == "matrix":
            stack = {"view": "stack"} if role is unknown and p.ndim > 2 else {}
            found[name] = {**role.values, **stack}
    return found


Owner = tuple[str, nn.Module, str]  # the module's path, the module, the parameter's own name


def _owners(model: nn.Module) -> dict[Tensor, list[Owner]]:
    """Every place where a parameter is used: tied weights have several."""
    owners: dict[Tensor, list[Owner]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own, p in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(p, []).append((path, module, own))
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
        wanted = [head] if isinstance(head, str) else list(head)
        return {name for pattern in wanted for name in patterns.matching("head", pattern)}
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


def _judge(name: str, p: Tensor, owners: list[Owner], model: nn.Module) -> Role | None:
    if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for _, module, _ in owners):
        return Role("adamw", "embedding")
    if EMBEDDING_NAMES.intersection(name.split(".")):
        return Role("adamw", "embedding")
    if p.ndim < 2:
        return Role("adamw", "vector" if p.ndim else "scalar")
    path, module, own = owners[0]
    exception = _exception(path, module, own, p, model)
    if exception is not None:
        return Role("adamw", exception)
    if isinstance(module, nn.Linear):
        return Role("matrix", "hidden")
    structure = _structure(p, owners[0], model)
    if structure or isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return Role("matrix", type(module).__name__, structure)
    return None


def _exception(path: str, module: nn.Module, own: str, p: Tensor, model: nn.Module) -> str | None:
    """Why a parameter with two or more dimensions is no hidden matrix all the same."""
    if isinstance(module, NORMS):
        return "norm"
    if own in ("bias_k", "bias_v"):
        return "bias"
    if is_experts(module) and p.ndim == 2:
        return "vectors of experts"
    if _is_router(path, model):
        return "router"
    if own in STATE_SPACE_NAMES:
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
    """How modules store more than one plain matrix, or another orientation, in a parameter."""
    path, module, own = owner
    if isinstance(module, CONVOLUTIONS):
        return {"view": "conv"} | ({"blocks": module.groups} if module.groups > 1 else {})
    if isinstance(module, nn.MultiheadAttention) and own == "in_proj_weight":
        return {"blocks": 3}
    if isinstance(module, nn.RNNBase) and not own.startswith("weight_hr"):  # hr: the projection
        return {"blocks": RNN_GATES[module.mode]}
    return structure_of(module, own, p, _parent(path, model))


def _parent(path: str, model: nn.Module) -> nn.Module | None:
    return model.get_submodule(path.rpartition(".")[0]) if path else None


def _is_router(path: str, model: nn.Module) -> bool:
    if ROUTER_NAMES.intersection(path.split(".")):
        return True
    parent = _parent(path, model) if path.rpartition(".")[2] in GATE_NAMES else None
    return parent is not None and any("expert" in name for name, _ in parent.named_children())
