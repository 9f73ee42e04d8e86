"""Checkpoints by torch.distributed.checkpoint: any number of ranks saves, any other number loads.

Atomic: written to a temporary folder, forced to disk, renamed. A kill at any moment leaves the last
good one. Loading executes no code: only tensors and plain values are unpickled.
"""

import copy
import os
import pickle
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from angular_lab.average import Averages
from angular_lab.ranks import Ranks
from angular_lab.rundir import PREFIX

# What the index of a checkpoint consists of, and nothing else.
INDEX_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)
INDEX_CLASSES = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "_StorageInfo"),
)
PLAIN = (
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),
)


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"{PREFIX}{step:08d}"


def steps(folder: Path) -> list[int]:
    """Steps with a finished checkpoint, oldest first; none where there is no folder."""
    return sorted(int(path.name.removeprefix(PREFIX)) for path in folder.glob(f"{PREFIX}*"))


def save(
    folder: Path,
    counters: dict[str, int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    averages: Averages,
) -> None:
    """`counters` holds at least "step"."""
    step = counters["step"]
    target = step_folder(folder, step)
    temporary = folder / f".saving-{target.name}"
    if ranks.first:
        clean(folder)
        temporary.mkdir(parents=True)
    ranks.barrier()
    content = _content(counters, model, optimizer, averages)
    try:
        with warnings.catch_warnings():
            # torch tells that one process saves alone: we know
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(content, checkpoint_id=temporary, no_dist=ranks.world == 1)
    except (Exception, dcp.api.CheckpointException) as error:  # the latter is no Exception
        shutil.rmtree(temporary, ignore_errors=True)
        cause = _cause(error)
        if isinstance(cause, KeyboardInterrupt):  # torch wraps it like an error
            raise cause from None
        raise OSError(
            f"checkpoint of step {step} could not be written to {folder}: {cause}; the "
            f"last good one is step {max(steps(folder), default='none')}"
        ) from None
    if ranks.first:
        _sync(temporary)
        if target.exists():  # saved before a crash that lost only its log: the new one is as good
            shutil.rmtree(temporary)
        else:
            os.rename(temporary, target)
        _sync(folder)
    ranks.barrier()


def _content(
    counters: dict[str, int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averages: Averages,
) -> dict[str, Any]:
    gradients = [(p, p.grad) for p in model.parameters()]
    if not optimizer.state:
        # No step was taken yet, and torch makes the state that it saves by one for show; but not
        # where there are gradients, and recorded passes keep theirs.
        for p, _ in gradients:
            p.grad = None
    weights, state = get_state_dict(model, optimizer)
    for p, gradient in gradients:
        p.grad = gradient
    parts = {"model": weights, "optimizer": state, "average": averages.state()}
    return {**parts, "counters": counters}


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ranks: Ranks,
    averages: Averages | None = None,
) -> dict[str, int]:
    """Into model and, where given, optimizer and averages; returns the counters."""
    optimizers = [] if optimizer is None else [optimizer]
    weights, state = get_state_dict(model, optimizers)
    content: dict[str, Any] = {"model": weights, "counters": {"step": 0, "skipped": 0}}
    if optimizer is not None:
        content["optimizer"] = state
    reader, planner = SafeReader(path), SafePlanner()
    try:
        saved = reader.read_metadata().state_dict_metadata
        if optimizer is not None:
            _leave_out_new_settings(state, saved)
        if averages is not None:
            content["average"] = _averages_in(saved, averages)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(content, storage_reader=reader, planner=planner, no_dist=ranks.world == 1)
    except (Exception, dcp.api.CheckpointException) as error:
        raise ValueError(f"checkpoint {path} cannot be loaded: {_cause(error)}") from None
    set_state_dict(
        model,
        optimizers,
        model_state_dict=content["model"],
        optim_state_dict=content.get("optimizer", {}),
    )
    if averages is not None:
        averages.load(content["average"])
    return content["counters"]


def _leave_out_new_settings(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Settings of groups that a checkpoint of an earlier version does not have: torch would ask for
    them, and without them they stay the constructor's."""
    for i, group in enumerate(state["param_groups"]):
        for key in [*group]:
            name = f"optimizer.param_groups.{i}.{key}"
            if not any(known == name or known.startswith(f"{name}.") for known in saved):
                del group[key]


def _averages_in(saved: Mapping[str, Any], averages: Averages) -> dict[str, Any]:
    """Those that the checkpoint has. Where a branch asks for others than its parent, they begin."""
    windows = averages.state().items()
    return {window: part for window, part in windows if f"average.{window}.count" in saved}


Point = dict[str, Any]


def to_memory(
    counters: dict[str, int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averages: Averages,
) -> Point:
    """What `save` writes, as a copy that a later run of this process can start from."""
    return copy.deepcopy(_content(counters, model, optimizer, averages))


def from_memory(
    point: Point, model: nn.Module, optimizer: torch.optim.Optimizer, averages: Averages
) -> dict[str, int]:
    content = copy.deepcopy(point)  # an optimizer may keep the tensors it is given
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    averages.load(content["average"])
    return content["counters"]


def _cause(error: BaseException) -> object:
    """What went wrong on the first rank where something did."""
    failures = getattr(error, "failures", {})
    return next(iter(failures.values()))[0] if failures else error


def prune(folder: Path, keep: int, pinned: tuple[int, ...]) -> None:
    """Keep the newest `keep` and the pinned ones."""
    loose = [step for step in steps(folder) if step not in pinned]
    for step in loose[: max(0, len(loose) - keep)]:
        shutil.rmtree(step_folder(folder, step))


def clean(folder: Path) -> None:
    """What an interrupted save left."""
    for path in folder.glob(".saving-*"):
        shutil.rmtree(path)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class SafePlanner(dcp.DefaultLoadPlanner):
    """Plain values through torch's weights-only unpickler; torch's own planner takes any pickle."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        key = read_item.dest_index.fqn
        loaded = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            from torch.distributed.checkpoint._nested_dict import set_element

            set_element(self.original_state_dict, self.mappings[key], loaded)
        else:
            self.state_dict[key] = loaded


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_index = module in INDEX_MODULES and name in INDEX_CLASSES
        if is_dtype or is_index or (module, name) in PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the checkpoint's index asks for {module}.{name}: refused")


class SafeReader(dcp.FileSystemReader):
    """Reads the folder's index with an unpickler that knows checkpoint classes only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _IndexUnpickler(file).load()
        if getattr(metadata, "storage_meta", None) is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata
