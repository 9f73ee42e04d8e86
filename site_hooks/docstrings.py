"""A Griffe extension: docstrings and signatures as they are at run time.

The members of the family share arguments, whose descriptions are merged into each class when it is
created. Griffe reads source code and would not see them.
"""

from importlib import import_module
from inspect import Parameter as RuntimeParameter
from inspect import getdoc, signature
from typing import Any

import griffe


class RuntimeDocstrings(griffe.Extension):
    """Replace the docstring and the parameters of a class if they differ at run time."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        runtime: Any = getattr(import_module(cls.module.path), cls.name, None)
        if runtime is None or not cls.path.startswith("angular_muown.optimizers."):
            return
        cls.docstring = griffe.Docstring(getdoc(runtime) or "", parent=cls)
        init = cls.members.get("__init__")
        if isinstance(init, griffe.Function):
            init.parameters = griffe.Parameters(*_parameters(runtime.__init__, init))


def _parameters(runtime: Any, static: griffe.Function) -> list[griffe.Parameter]:
    """Return the parameters that `runtime` shows, with the annotations of the source."""
    known = {p.name: p for p in static.parameters}
    return [
        known.get(p.name)
        or griffe.Parameter(
            p.name,
            kind=griffe.ParameterKind.keyword_only,
            annotation=_annotation(p),
            default=repr(p.default),
        )
        for p in signature(runtime).parameters.values()
    ]


def _annotation(parameter: RuntimeParameter) -> str:
    kind = parameter.annotation
    text = kind.__name__ if isinstance(kind, type) else str(kind)
    return text.replace("typing.", "").replace("torch.distributed.distributed_c10d.", "")
