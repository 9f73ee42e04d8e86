"""Apply `key=value` from the command line to a frozen spec, by the types of its fields."""

import inspect
import re
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from math import isfinite
from types import NoneType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from angular_lab.config.spec import get, keys
from angular_lab.errors import UserError

S = TypeVar("S")

WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
# What other programs call a setting.
ALIASES = {
    "learning_rate": "optim.lr", "max_lr": "optim.lr", "peak_lr": "optim.lr",
    "optimizer": "optim.name", "wd": "optim.weight_decay", "betas": "optim.beta1",
    "adam_beta1": "optim.beta1", "adam_beta2": "optim.beta2",
    "n_layer": "model.layers", "n_layers": "model.layers", "num_layers": "model.layers",
    "num_hidden_layers": "model.layers", "depth": "model.layers",
    "n_embd": "model.width", "d_model": "model.width", "hidden_size": "model.width",
    "n_head": "model.heads", "n_heads": "model.heads", "num_heads": "model.heads",
    "num_attention_heads": "model.heads", "num_key_value_heads": "model.kv_heads",
    "d_ff": "model.mlp", "intermediate_size": "model.mlp", "vocab_size": "model.vocabulary",
    "seq_len": "model.sequence", "sequence_length": "model.sequence",
    "block_size": "model.sequence", "context_length": "model.sequence",
    "max_position_embeddings": "model.sequence", "tie_word_embeddings": "model.tied",
    "batch_size": "batch", "global_batch_size": "batch", "micro_batch_size": "micro_batch",
    "per_device_train_batch_size": "micro_batch", "max_steps": "steps", "iterations": "steps",
    "num_train_steps": "steps", "max_iters": "steps", "warmup_steps": "schedule.warmup",
    "warmup_iters": "schedule.warmup", "lr_schedule": "schedule.kind",
    "lr_scheduler_type": "schedule.kind", "grad_clip": "clip", "max_grad_norm": "clip",
    "dataset": "data", "eval_interval": "eval_every", "eval_steps": "eval_every",
    "log_interval": "log_every", "logging_steps": "log_every", "save_interval": "save_every",
    "save_steps": "save_every", "dtype": "precision", "report_to": "loggers",
}  # fmt: skip
KINDS = {bool: "true or false", int: "an integer", float: "a number", NoneType: "none"}


def override(spec: S, assignments: Iterable[str]) -> S:
    """Return a copy of the spec with every `key=value` set; dotted keys reach into its parts."""
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"'{assignment}' is not an override: write key=value")
        if key not in keys(spec):
            raise UserError(_unknown(spec, key))
        spec = _set(spec, key.split("."), text, key)
    return spec


def _unknown(spec: Any, key: str) -> str:
    valid = keys(spec)
    if parts := [name for name in valid if name.startswith(f"{key}.")]:
        return f"'{key}' has parts: set one of {', '.join(parts[:4])}, ..."
    nearest = _nearest(valid, key)
    hint = f"did you mean {nearest}?" if nearest else "`angular-lab train --help` lists all keys"
    return f"unknown key '{key}'; {hint}"


def _nearest(valid: list[str], key: str) -> str | None:
    """Return the key that was probably meant: the same name in another section, what other
    programs call it, or a similar name in the same section."""
    section, _, last = key.rpartition(".")
    same = [name for name in valid if name.rpartition(".")[2] == last]
    if same or last in ALIASES:
        return same[0] if same else ALIASES[last]
    names = {name.rpartition(".")[2]: name for name in reversed(valid)}
    if section:
        names = {k: name for k, name in names.items() if name.rpartition(".")[0] == section}
    near = get_close_matches(last, names, n=1)
    if not near and sorted(last) in (letters := {k: sorted(k) for k in names}).values():
        near = [k for k in names if letters[k] == sorted(last)]  # rl for lr
    return names[near[0]] if near else None


def _set(spec: Any, path: list[str], text: str, key: str) -> Any:
    name, *rest = path
    if rest:
        value = _set(getattr(spec, name), rest, text, key)
    else:
        value = _parse(get_type_hints(type(spec))[name], text, key)
    return replace(spec, **{name: value})


def _parse(hint: Any, text: str, key: str) -> Any:
    """Return the value that the text stands for; `none` where the field may be None, a list
    separated by commas where it is a tuple."""
    if get_origin(hint) is tuple:
        kind = get_args(hint)[0]
        return tuple(_parse(kind, part.strip(), key) for part in text.split(",") if part.strip())
    is_union = get_origin(hint) in (Union, types.UnionType)
    # none first: every text is a str
    choices = sorted(get_args(hint), key=lambda kind: kind is not NoneType) if is_union else [hint]
    for choice in choices:
        with suppress(ValueError, KeyError, OverflowError):
            return PARSERS.get(choice, choice)(text)
    expected = " or ".join(KINDS[choice] for choice in choices)
    raise UserError(f"{key}={text}: {key} must be {expected}")


def count(text: str) -> int:
    """Parse an integer, also as 3B, 2.5M or 100k."""
    if text.lstrip("-").isdigit():
        return int(text)
    units = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    unit = units.get(text[-1:].lower())
    number = float(text[:-1]) * unit if unit else float(text.replace("_", ""))
    if not isfinite(number) or number != int(number):
        raise ValueError(f"{text} is not an integer")
    return int(number)


PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: lambda text: WORDS[text.lower()],
    int: count,
    NoneType: lambda text: {"none": None}[text.lower()],
}


def help_text(spec: Any, prefix: str = "") -> str:
    """List every key with its default and the comment on its field."""
    comments = dict(re.findall(r"^    (\w+): [^#\n]*# (.+)$", inspect.getsource(type(spec)), re.M))
    rows = []
    for f in fields(spec):
        value = getattr(spec, f.name)
        if is_dataclass(value):
            rows.append(help_text(value, f"{prefix}{f.name}."))
        else:
            setting = f"{prefix}{f.name}={as_typed(value)}"
            rows.append(f"  {setting:32}  {comments.get(f.name, '')}".rstrip())
    return "\n".join(rows)


def differences(a: Any, b: Any) -> list[str]:
    """Return the keys at which two specs differ."""
    return [key for key in keys(a) if get(a, key) != get(b, key)]


def as_typed(value: Any) -> str:
    """Return a setting's value as the command line takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
