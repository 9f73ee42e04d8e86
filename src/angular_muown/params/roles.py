"""Find a parameter's role (embedding, head, router, hidden matrix) from the module that owns it.

Modules of other libraries are recognised by class names and by what they declare about their
weights, without importing those libraries.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from angular_muown.params.fused_layouts import FUSED_LAYOUTS, Layouts, Values, find_layout
from angular_muown.params.layout import Layout
from angular_muown.params.wrappers import bare_modules, bare_parameters, is_a, unwrap
from angular_muown.warn import warn

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
TITAN_EXPERTS = "torchtitan.models.common.moe.GroupedExperts"
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
# Flags by which transformers' expert modules declare their layout, which differs between models.
EXPERT_LAYOUT = ("has_gate", "is_transposed", "is_concatenated")


def structure_of(
    module: nn.Module, attribute: str, p: Tensor, parent: nn.Module | None
) -> dict[str, Any]:
    """Return the group values of a weight of a known third-party module; {} for other modules."""
    if is_a(module, CONV1D):
        size = getattr(parent, "split_size", None)  # the attention splits its outputs by it
        fused = isinstance(size, int) and module is getattr(parent, "c_attn", None)
        return {"transposed": True} | ({"blocks": p.shape[1] // size} if fused else {})
    if p.ndim == 3 and is_a(module, TITAN_EXPERTS):
        return {"view": "stack"}
    if p.ndim == 3 and is_experts(module):
        values: dict[str, Any] = {"view": "stack"}
        if module.is_transposed:
            values["transposed"] = True
        if attribute == "gate_up_proj" and module.has_gate:
            values["blocks"] = 2
            if not module.is_concatenated:  # gate and up rows alternate
                values["interleaved"] = p.shape[-1 if module.is_transposed else -2] // 2
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
STEM_LAYERS = frozenset(("WhisperEncoder.conv1", "WhisperEncoder.conv2"))  # "ParentClass.attribute"
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
    layouts: Layouts | None = None,
) -> dict[str, Role]:
    """Return name -> role for all names, or raise an error that lists the undecided parameters.

    Args:
        model: the model; wrappers in it are skipped.
        named: its trainable parameters with their bare names.
        patterns: of the bare names.
        declared: name -> the role that the caller declares.
        head: pattern(s) of the output head, "auto" or None.
        layouts: "ParentClass.attribute" -> group values, in addition to the known fused layouts.
    """
    model = unwrap(model)
    _check_layouts(model, layouts or {})
    table = {**FUSED_LAYOUTS, **(layouts or {})}
    owners = _owners(model)
    # "auto" also finds a frozen head. The caller's patterns must match trainable parameters.
    candidates = bare_parameters(model) if head == "auto" else named
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
            structure = _structure(p, owners[p][0], table)
            if role.values.get("view", structure.get("view")) != structure.get("view"):
                structure = {}  # the caller declares another view
            role = Role("matrix", role.reason, {**structure, **role.values})
        if role is None and name in heads:
            role = Role("adamw", _head_or_tied(owners[p]))
        if role is None:
            role = _infer_role(name, p, owners[p], table)
        if role is None:
            unknown.append(f"'{name}' {tuple(p.shape)} in {type(owners[p][0].module).__name__}")
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
    model = unwrap(model)
    named = bare_parameters(model)
    owners = _owners(model)
    heads = _find_heads(model, named, owners, Patterns(name for name, _ in named), "auto")
    unknown = Role("matrix", "unknown", {})
    matrices = {}
    for name, p in named:
        role = _infer_role(name, p, owners[p], FUSED_LAYOUTS) or unknown
        if name not in heads and role.algorithm == "matrix":
            stack = {"view": "stack"} if role is unknown and p.ndim > 2 else {}
            matrices[name] = {**role.values, **stack}
    return matrices


class Owner(NamedTuple):
    """A module that holds a parameter, and where it is in the bare model."""

    path: str
    module: nn.Module
    attribute: str  # of the parameter
    parent: nn.Module | None


def _owners(model: nn.Module) -> dict[Tensor, list[Owner]]:
    """Return all owners of each parameter: tied weights have several."""
    owners: dict[Tensor, list[Owner]] = {}
    for path, module, parent in bare_modules(model):
        for attribute, p in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(p, []).append(Owner(path, module, attribute, parent))
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
        or any(HEAD_NAMES.intersection(owner.path.split(".")) for owner in owners[p])
        or any(owner.path in TOP_LEVEL_HEADS for owner in owners[p])
        or (len(owners[p]) > 1 and any(isinstance(o.module, nn.Embedding) for o in owners[p]))
    }


def _head_or_tied(owners: list[Owner]) -> str:
    embeds = {isinstance(owner.module, nn.Embedding) for owner in owners}
    return "tied head" if len(embeds) > 1 else "embedding" if embeds == {True} else "head"


def _infer_role(name: str, p: Tensor, owners: list[Owner], layouts: Layouts) -> Role | None:
    """Return a parameter's role; None if it must be declared."""
    if any(isinstance(owner.module, nn.Embedding | nn.EmbeddingBag) for owner in owners):
        return Role("adamw", "embedding")
    if EMBEDDING_NAMES.intersection(name.split(".")):
        return Role("adamw", "embedding")
    if p.ndim < 2:
        return Role("adamw", "vector" if p.ndim else "scalar")
    reason = _reason_for_adamw(owners[0], p)
    if reason is not None:
        return Role("adamw", reason)
    module = owners[0].module
    fused = _fused_layout(p, owners[0], layouts)
    if fused is not None:
        return Role("matrix", fused[0].partition(".")[0], fused[1])
    if isinstance(module, nn.Linear):
        return Role("matrix", "hidden")
    structure = _structure(p, owners[0], layouts)
    if structure or isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return Role("matrix", type(module).__name__, structure)
    return None


def _reason_for_adamw(owner: Owner, p: Tensor) -> str | None:
    """Return why a parameter with two or more dimensions is not a hidden matrix, or None."""
    module, attribute = owner.module, owner.attribute
    if isinstance(module, NORMS):
        return "norm"
    if attribute in ("bias_k", "bias_v"):
        return "bias"
    if p.ndim == 2 and (is_experts(module) or is_a(module, TITAN_EXPERTS)):
        return "vectors of experts"
    if _is_router(owner):
        return "router"
    if attribute in STATE_SPACE_NAMES:
        return "state space"
    if isinstance(module, CONVOLUTIONS):
        if 1 < module.groups == module.in_channels:
            return "depthwise"
        if _is_stem(owner):
            return "input convolution"
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return "transposed convolution"  # its rows are not its outputs
    return None


def _is_stem(owner: Owner) -> bool:
    names = owner.path.split(".")
    if STEM_NAMES.intersection(names) or names[0] in TOP_LEVEL_STEMS:
        return True
    classes = type(owner.parent).__mro__
    return any(f"{kind.__name__}.{names[-1]}" in STEM_LAYERS for kind in classes)


def _structure(p: Tensor, owner: Owner, layouts: Layouts) -> Values:
    """Return the group values of a parameter that is not one plain out x in matrix; else {}."""
    module = owner.module
    fused = _fused_layout(p, owner, layouts)
    if fused is not None:
        return fused[1]
    if isinstance(module, CONVOLUTIONS):
        return {"view": "conv"} | ({"blocks": module.groups} if module.groups > 1 else {})
    if isinstance(module, nn.MultiheadAttention) and owner.attribute == "in_proj_weight":
        return {"blocks": 3}
    # weight_hr is the output projection
    if isinstance(module, nn.RNNBase) and not owner.attribute.startswith("weight_hr"):
        return {"blocks": RNN_GATES[module.mode]}
    return structure_of(module, owner.attribute, p, owner.parent)


def _fused_layout(p: Tensor, owner: Owner, layouts: Layouts) -> tuple[str, Values] | None:
    """Return the table's entry for a parameter: of its module, or of a layer that owns only it."""
    entry = find_layout(owner.module, owner.attribute, p, layouts)
    if entry is None and owner.attribute == "weight" and owner.parent is not None:
        entry = find_layout(owner.parent, owner.path.rpartition(".")[2], p, layouts)
    return entry


def _is_router(owner: Owner) -> bool:
    names = owner.path.split(".")
    if ROUTER_NAMES.intersection(names):
        return True
    if names[-1] not in GATE_NAMES or owner.parent is None:
        return False
    return any("expert" in name for name, _ in owner.parent.named_children())


def _check_layouts(model: nn.Module, layouts: Layouts) -> None:
    """Raise ValueError for an entry that matches nothing in the model."""
    attributes: set[str] = set()
    for _, module, _ in bare_modules(model):
        own = [*module._modules, *module._parameters]
        attributes.update(f"{kind.__name__}.{a}" for kind in type(module).__mro__ for a in own)
    for key in layouts:
        if key not in attributes:
            near = get_close_matches(key, sorted(attributes), n=3, cutoff=0.3)
            raise ValueError(
                f"layouts: '{key}' matches no layer or weight of {type(model).__name__}; keys are "
                f"'ParentClass.attribute', such as {', '.join(near) or 'MyAttention.wqkv'}"
            )


# Names of layers that usually fuse several matrices: q, k, v; gate and up; the projections of
# latent attention; Mamba's inputs.
FUSED_NAMES = re.compile(
    r"(\w+_)?w?qkvz?(_\w+)?|c_attn|query_key_value|gate_up(_proj)?|w12|w13|in_proj(_weight)?"
    r"|kv_a_proj\w*|kv_b_proj|to_kv",
    re.IGNORECASE,
)
Groups = Iterable[Mapping[str, Any]]


def warn_if_fused(groups: Groups, declared: Collection[str] = ()) -> None:
    """Warn about matrices that have the name of a fused layer and are not cut.

    Args:
        groups: param groups with (name, parameter) pairs, such as a Plan.
        declared: names of the parameters whose blocks the caller declared, even as 1.
    """
    whole = [
        name
        for name, _, group in _matrices(groups)
        if name not in declared and group.get("blocks") is None and is_usually_fused(name)
    ]
    if whole:
        example = {pattern: _usual_blocks(pattern) for pattern in collapse(whole)}
        warn(
            f"{', '.join(example)}: a layer of this name usually fuses several matrices (q, k, v; "
            "gate, up), but it is stepped as one. Declare its row blocks or their sizes, such as "
            f"blocks={example}, and interleaved= if their rows alternate. 1 keeps it whole",
        )


def warn_if_one_row(groups: Groups, declared: Collection[str] = ()) -> None:
    """Warn about matrices with one row, except those that the caller declared as matrices."""
    single = [
        name
        for name, p, group in _matrices(groups)
        if name not in declared and _rows(p, group) == 1
    ]
    if single:
        patterns = collapse(single)
        warn(
            f"{', '.join(patterns)}: has one row, so there is nothing to orthogonalize. Send it to "
            f"AdamW with adamw={patterns}, or keep it with matrix={patterns}",
        )


def is_usually_fused(name: str) -> bool:
    """True if a parameter has the name of a layer that usually fuses several matrices."""
    *path, last = name.split(".")
    return FUSED_NAMES.fullmatch(path[-1] if path and last == "weight" else last) is not None


def _usual_blocks(name: str) -> int:
    return 3 if re.search(r"qkv|c_attn|query_key_value", name, re.IGNORECASE) else 2


def collapse(names: Iterable[str]) -> list[str]:
    """Return patterns that match the names, with * in place of layer numbers."""
    paths = (name.split(".") for name in names)
    patterns = (".".join("*" if part.isdecimal() else part for part in path) for path in paths)
    return list(dict.fromkeys(patterns))


def _matrices(groups: Groups) -> Iterable[tuple[str, Tensor, Mapping[str, Any]]]:
    for group in groups:
        if group["algorithm"] == "matrix":
            yield from ((name, p, group) for name, p in group["params"])


def _rows(p: Tensor, group: Mapping[str, Any]) -> int:
    layout = Layout(group.get("view", "matrix"), group.get("transposed", False))
    return layout.sides(p.shape)[0]


# Usual names of nn.Embedding layers, to recognise them where only the names are known.
TOKEN_NAMES = frozenset(
    ("embed_tokens", "wte", "wpe", "tok_embeddings", "word_embeddings", "token_embedding",
     "embedding", "embeddings", "embed")
)  # fmt: skip


def is_embedding_or_head(name: str) -> bool:
    """True if a parameter's name is that of an embedding or of an output head."""
    return bool((HEAD_NAMES | EMBEDDING_NAMES | TOKEN_NAMES).intersection(name.split(".")))
