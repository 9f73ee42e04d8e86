"""Fused layouts: how common model classes store several matrices in one weight.

A table maps "ParentClass.attribute" (the class of the module that owns the fused layer or weight,
and the attribute's name) to the group values that cut the weight into its matrices. Classes are
known by name, so that no other library is imported; subclasses inherit the entry. `plan(model,
layouts={"MyAttention.wqkv": {"blocks": 3}})` adds entries or replaces them.

The values are those of a param group: `blocks` cuts the rows into contiguous blocks. With
`interleaved=k` the rows come in k units, each of which holds 1/k of every block in order: for k
heads of q, k and v rows, block 0 is all of q. `transposed` and `view` are as in params/layout.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from angular_muown.params.layout import Layout, block_sizes
from angular_muown.params.wrappers import unwrap

Values = Mapping[str, Any]
Entry = Values | Callable[[Any], Values]
Layouts = Mapping[str, Entry]

CUT_KEYS = ("blocks", "interleaved", "column_blocks")
LAYOUT_KEYS = (*CUT_KEYS, "transposed", "view")


def _rows(layer: nn.Module) -> int:
    return unwrap(layer).get_parameter("weight").shape[0]


def _nanogpt(attention: Any) -> Values:
    """Return the cut of c_attn if it has the rows that nanoGPT's attention splits."""
    fused = _rows(attention.c_attn) == 3 * attention.n_embd
    return {"blocks": 3} if fused else {}


def _gpt_neox(attention: Any) -> Values:
    return {"blocks": 3, "interleaved": attention.config.num_attention_heads}


def _per_head(attention: Any) -> Values:
    return {"blocks": 3, "interleaved": attention.num_heads}


def _falcon(attention: Any) -> Values:
    if not attention.new_decoder_architecture and not attention.multi_query:
        return _per_head(attention)
    key_heads = attention.num_kv_heads
    query = attention.num_heads * attention.head_dim
    key = key_heads * attention.head_dim
    blocks = {"blocks": (query, key, key)}
    return {**blocks, "interleaved": key_heads} if key_heads > 1 else blocks


def _bigcode(attention: Any) -> Values:
    if not attention.multi_query:
        return _per_head(attention)
    return {"blocks": (attention.embed_dim, attention.kv_dim, attention.kv_dim)}


def _phi3(attention: Any) -> Values:
    key = attention.num_key_value_heads * attention.head_dim
    return {"blocks": (key * attention.num_key_value_groups, key, key)}


def _latent_and_rope(attention: Any) -> Values:
    """Return the cut of multi-head latent attention's down projection."""
    return {"blocks": (attention.kv_lora_rank, attention.qk_rope_head_dim)}


def _key_and_value(attribute: str) -> Callable[[Any], Values]:
    """Return the cut of its up projection: per head, the key's rows without rope, then v's."""

    def values(attention: Any) -> Values:
        key, value = attention.qk_nope_head_dim, attention.v_head_dim
        heads = _rows(getattr(attention, attribute)) // (key + value)
        return {"blocks": (heads * key, heads * value), "interleaved": heads}

    return values


def _mamba2(mixer: Any) -> Values:
    """Return the cut of Mamba-2's input projection: gate, x, B, C and time steps."""
    inner, state = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
    return {"blocks": (inner, inner, state, state, mixer.num_heads)}


def _mamba_states(mixer: Any) -> Values:
    """Return the cut of Mamba's second projection: time steps, B and C."""
    return {"blocks": (mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size)}


def _torchtitan(projection: Any) -> Values:
    """Return the cut of torchtitan's FusedQKVLinear: per key head, its query heads, k and v."""
    size = projection.head_dim
    key_heads = _rows(projection.wqkv) // (projection.r_dim * size)
    key = key_heads * size
    return {"blocks": (key * projection.heads_per_kv, key, key), "interleaved": key_heads}


LATENT = {"kv_a_proj_with_mqa": _latent_and_rope, "kv_b_proj": _key_and_value("kv_b_proj")}
FUSED_LAYOUTS: dict[str, Entry] = {
    "CausalSelfAttention.c_attn": _nanogpt,
    # transformers; its experts describe themselves (params/roles.py)
    "GPTNeoXAttention.query_key_value": _gpt_neox,
    "BloomAttention.query_key_value": _per_head,
    "PersimmonAttention.query_key_value": _per_head,
    "FalconAttention.query_key_value": _falcon,
    "GPTBigCodeAttention.c_attn": _bigcode,
    "MptAttention.Wqkv": {"blocks": 3},
    "ModernBertAttention.Wqkv": {"blocks": 3},
    "ModernBertMLP.Wi": {"blocks": 2},
    "Phi3Attention.qkv_proj": _phi3,
    **{f"{kind}.gate_up_proj": {"blocks": 2} for kind in ("Phi3MLP", "GlmMLP", "Glm4MLP")},
    **{
        f"{kind}Attention.{attribute}": entry
        for kind in ("DeepseekV2", "DeepseekV3", "MiniCPM3")
        for attribute, entry in LATENT.items()
    },
    "MambaMixer.in_proj": {"blocks": 2},
    "MambaMixer.x_proj": _mamba_states,
    "Mamba2Mixer.in_proj": _mamba2,
    # torchtitan
    "FusedQKVLinear.wqkv": _torchtitan,
    "Attention.wkv_a": _latent_and_rope,
    "Attention.wkv_b": _key_and_value("wkv_b"),
    "GptOssGroupedExperts.mlp1_weight_EGD": lambda experts: {
        "view": "stack", "blocks": 2, "interleaved": experts.mlp1_weight_EGD.shape[1] // 2
    },
}  # fmt: skip


def find_layout(
    owner: nn.Module, attribute: str, p: Tensor, layouts: Layouts
) -> tuple[str, Values] | None:
    """Return the key and the values of the entry for a module's attribute, or None.

    The entry of a class comes before those of its base classes. An entry of the built-in table
    that does not fit the weight belongs to another class of the same name.
    """
    for kind in type(owner).__mro__:
        key = f"{kind.__name__}.{attribute}"
        if key in layouts:
            entry = layouts[key]
            built_in = entry is FUSED_LAYOUTS.get(key)
            values = _evaluate(key, entry, owner, built_in)
            return (key, values) if values and (not built_in or _fits(values, p)) else None
    return None


def _evaluate(key: str, entry: Entry, owner: nn.Module, built_in: bool) -> Values:
    try:
        values = entry(owner) if callable(entry) else entry
    except AttributeError:
        if not built_in:
            raise
        return {}
    unknown = set(values).difference(LAYOUT_KEYS)
    if unknown:
        raise ValueError(
            f"layouts['{key}'] sets {', '.join(sorted(unknown))}: only {', '.join(LAYOUT_KEYS)} "
            "describe a layout"
        )
    return values


def _fits(values: Values, p: Tensor) -> bool:
    """True if the weight has the rows that the values cut."""
    view = values.get("view", "matrix")
    if p.ndim != 2 and view == "matrix":
        return False
    rows, _ = Layout(view, values.get("transposed", False)).sides(p.shape)
    try:
        sizes = block_sizes(rows, values.get("blocks", 1))
    except ValueError:
        return False
    return not any(size % values.get("interleaved", 1) for size in sizes)


def declare_cuts(known: Values, declared: Values) -> dict[str, Any]:
    """Return the known values with the cuts that the caller declares for a parameter.

    Declared blocks replace the known cut of the rows, including its interleaving unless they are
    the same blocks.
    """
    kept = dict(known)
    if "blocks" in declared and declared["blocks"] != kept.get("blocks"):
        kept.pop("interleaved", None)
    # One block is the whole matrix: no cut, as in state dicts that were saved without one.
    return {key: x for key, x in {**kept, **declared}.items() if key not in CUT_KEYS or x != 1}
