"""Wrappers: modules that stand around another module and add only a prefix to its names.

torch.compile, DistributedDataParallel, DataParallel and activation checkpointing wrap the whole
model or single layers. Names and roles are those of the bare model, so that patterns, heads and
checkpoints do not depend on the wrapping.
"""

from collections.abc import Iterator

from torch import nn

# Full class name -> the attribute that holds the wrapped module. By name, because importing
# torch._dynamo is slow.
WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
}


def is_a(module: nn.Module, name: str) -> bool:
    """True if the module is an instance of the class with this full name."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == name for kind in type(module).__mro__)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside all wrappers around it, in any order."""
    while (attribute := _wrapped_attribute(model)) is not None:
        model = getattr(model, attribute)
    return model


def bare_modules(
    model: nn.Module, path: str = "", parent: nn.Module | None = None
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield (bare name, module, parent) of all modules except wrappers.

    A module that is reachable by several names appears under each.
    """
    model = unwrap(model)
    yield path, model, parent
    for name, child in model._modules.items():
        if child is not None:
            yield from bare_modules(child, f"{path}.{name}" if path else name, model)


def bare_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return `model.named_parameters()` with bare names."""
    seen: set[nn.Parameter] = set()
    named: list[tuple[str, nn.Parameter]] = []
    for path, module, _ in bare_modules(model):
        for attribute, p in module._parameters.items():
            if p is not None and p not in seen:
                seen.add(p)
                named.append((f"{path}.{attribute}" if path else attribute, p))
    return named


def _wrapped_attribute(module: nn.Module) -> str | None:
    return next((attribute for name, attribute in WRAPPERS.items() if is_a(module, name)), None)
