"""Signatures and docstrings that show all arguments of a member, the shared ones included."""

import re
from functools import wraps
from inspect import Parameter, Signature, cleandoc, signature
from typing import Any, TypeVar, cast

from torch import nn

from angular_muown.engine import Engine
from angular_muown.params.options import COMMON_DEFAULTS, CommonOptions
from angular_muown.params.plan import plan

Member = TypeVar("Member", bound=type[Engine])


def _entries(arguments: str) -> dict[str, str]:
    """Split the Args section of a docstring into name -> description."""
    entries = re.split(r"^ {4}(\w+): ", arguments, flags=re.MULTILINE)[1:]
    return dict(zip(entries[::2], map(str.rstrip, entries[1::2]), strict=True))


# Arguments that several members have, as they appear in their docstrings.
ARGUMENTS = _entries(
    """
    params: parameters, (name, parameter) pairs, or groups such as `plan(model)` returns.
    row_beta: decay of the second moment of Q's rows, in [0, 1).
    scale: s(m, n), which makes one lr fit every shape: "fan_ratio" sqrt(max(1, m/n)), "adam_rms"
        0.2 sqrt(max(m, n)), "rms" sqrt(max(m, n)), "aspect" sqrt(max(m/n, n/m)) or "none".
    orthogonalize: "polar_express", "newton_schulz", "gram" (Polar Express, in its Gram form above
        an aspect ratio of 2) or "svd".
    radius: rule for the row lengths: "adam", "log_adam" (multiplicative) or "fixed".
    radius_lr: learning rate of the row lengths at the initial lr; it follows lr's schedule. None:
        lr.
    weight_decay: decoupled decay, W <- (1 - lr weight_decay) W.
    """
)


def documented(cls: Member) -> Member:
    """Show the shared arguments, too, in the member's signature and docstring.

    `for_model` shows them after those of `plan`.
    """
    own = signature(cls.__init__)
    common = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=value, annotation=kind)
        for (name, value), kind in zip(
            COMMON_DEFAULTS.items(), CommonOptions.__annotations__.values(), strict=True
        )
    ]
    named = [p for p in own.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    cls.__init__.__signature__ = own.replace(parameters=[*named, *common])  # pyrefly: ignore
    args = ""
    if cls.__doc__ and CommonOptions.__doc__:  # python -OO drops them
        head, _, tail = cleandoc(cls.__doc__).partition("\nArgs:\n")
        arguments, _, paper = tail.partition("\n\n")
        described = {**ARGUMENTS, **_entries(arguments)}
        listed = [f"    {name}: {described[name]}" for name in own.parameters if name in described]
        shared = cleandoc(CommonOptions.__doc__).partition("\nArgs:\n")[2]
        args = "\n".join([*listed, shared])
        cls.__doc__ = "\n\n".join([head.rstrip(), f"Args:\n{args}", paper])
    _document_for_model(cls, named, common, args)
    return cls


def _document_for_model(
    cls: type[Engine], own: list[Parameter], common: list[Parameter], arguments: str
) -> None:
    """Give the member a `for_model` that lists the arguments of `plan` and of its constructor."""
    inherited = cast(Any, Engine.for_model).__func__

    @wraps(inherited)
    def for_model(kind: type[Engine], model: nn.Module, *args: Any, **options: Any) -> Engine:
        return inherited(kind, model, *args, **options)

    model, *for_plan = signature(plan).parameters.values()
    lr = next(p for p in own if p.name == "lr")
    # radius_lr is the member's own argument, if it has row lengths.
    planned = [p for p in for_plan if p.name != "radius_lr"]
    rest = [p for p in own if p.name not in ("self", "params", "lr")]
    parameters = [Parameter("cls", Parameter.POSITIONAL_OR_KEYWORD), model, lr, *planned]
    for_model.__signature__ = Signature([*parameters, *rest, *common])  # pyrefly: ignore
    if arguments and plan.__doc__:
        text = cleandoc(plan.__doc__).partition("\nArgs:\n")[2]
        entries = {**_entries(text), **_entries(arguments)}
        names = [p.name for p in (*parameters[1:], *rest, *common)]
        lines = "\n".join(f"    {name}: {entries[name]}" for name in names)
        for_model.__doc__ = (
            f"Sort the parameters of a model with `plan` and construct {cls.__name__}.\n\n"
            "`optimizer.plan` shows the result. All patterns are globs over parameter names.\n\n"
            f"Args:\n{lines}"
        )
    cls.for_model = classmethod(for_model)  # pyrefly: ignore
