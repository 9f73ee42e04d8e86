"""Run the kernels on the CPU, in Triton's interpreter."""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter

from angular_muown import engine
from angular_muown.distributed import copies, session
from angular_muown.kernels import coverage, launch

ROW_ELEMENTS = 16384  # the interpreter pays per program; still several programs per matrix


def interpret(shares: bool = True) -> None:
    """Make the kernels of this rank step tensors on the CPU; copies share their work or not."""
    speed_up()
    launch.ROW_ELEMENTS = ROW_ELEMENTS
    coverage.runs_on = engine.runs_on = session.runs_on = lambda device: True
    copies.LATENCY = -1e9 if shares else 1e9


@cache
def speed_up() -> None:
    """Leave out work of the interpreter that has no effect and takes half of the time."""
    # It computes whether integers overflow, but asserts it in debug mode only.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    # Each function that a kernel calls searches triton.language for functions to replace, although
    # the kernel has replaced them. Those of a package are replaced and restored together.
    interpreter._patch_builtin = _patch_builtins


def _patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    names = _names_of_builtins(package)
    if names and is_builtin(getattr(package, names[0])):
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), builder, scope)


@cache
def _names_of_builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]
