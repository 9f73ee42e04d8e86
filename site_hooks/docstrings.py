"""A Griffe extension: docstrings and signatures as they are at run time.

The members of the family share arguments, whose descriptions are merged into each class when it is
created. Griffe reads source code and would not see them.
"""

import re
from importlib import import_module
from inspect import Parameter as RuntimeParameter
from inspect import getdoc, signature
from typing import Any

import griffe

FAMILY = "angular_muown.optimizers"
# The one member whose for_model is listed: those of the others differ as their constructors do.
SHOWS_FOR_MODEL = "AngularMuown"
KINDS: dict[Any, griffe.ParameterKind] = {
    RuntimeParameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    RuntimeParameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
}


class RuntimeDocstrings(griffe.Extension):
    """Replace the docstring and the parameters of the family's classes by those at run time."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.module.path != FAMILY:
            return
        runtime: Any = getattr(import_module(FAMILY), cls.name)
        cls.docstring = _docstring(runtime, cls, cls)
        init = cls.members.get("__init__")
        if isinstance(init, griffe.Function):
            init.parameters = _parameters(runtime.__init__, init.parameters)
        if cls.name == SHOWS_FOR_MODEL:
            cls.set_member("for_model", _for_model(runtime, cls))


def _for_model(runtime: Any, cls: griffe.Class) -> griffe.Function:
    function = griffe.Function("for_model", parameters=_parameters(runtime.for_model), parent=cls)
    function.docstring = _docstring(runtime.for_model, function, cls)
    function.labels.add("classmethod")
    return function


def _docstring(
    runtime: Any, parent: griffe.Class | griffe.Function, like: griffe.Class
) -> griffe.Docstring:
    """Return the docstring at run time, with the parser and the options of another one."""
    known = like.docstring
    assert known is not None
    text = (getdoc(runtime) or "").replace("Example:\n", "Examples:\n")  # Griffe's section
    return griffe.Docstring(
        re.sub(r"<(?=\w)", "&lt;", text),  # <Q_i, U_i> is not HTML
        parent=parent,
        lineno=known.lineno,
        parser=known.parser,
        parser_options=known.parser_options,
    )


def _parameters(runtime: Any, known: griffe.Parameters | None = None) -> griffe.Parameters:
    """Return the parameters that `runtime` shows, with the annotations of the source if known."""
    static = {p.name: p for p in known or ()}
    return griffe.Parameters(
        *(static.get(p.name) or _parameter(p) for p in signature(runtime).parameters.values())
    )


def _parameter(p: RuntimeParameter) -> griffe.Parameter:
    default = None if p.default is RuntimeParameter.empty else repr(p.default)
    return griffe.Parameter(p.name, kind=KINDS[p.kind], annotation=_annotation(p), default=default)


def _annotation(parameter: RuntimeParameter) -> str:
    kind = parameter.annotation
    text = kind.__name__ if isinstance(kind, type) else str(kind)
    for prefix in ("typing.", "collections.abc.", "torch.distributed.distributed_c10d.", "torch."):
        text = text.replace(prefix, "")
    return text
