"""Checkpoints by torch.distributed.checkpoint: any number of ranks saves, any other number loads.

Atomic: written to a temporary folder, forced to disk, renamed. A kill at any moment leaves the last
good one. hashes.json holds a hash of every file, which loading checks. Loading executes no code:
only tensors and plain values are unpickled.
"""

import copy
import json
import logging
import os
import pickle
import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils._pytree import tree_leaves

from angular_lab.errors import UserError
from angular_lab.run_folder import PREFIX, write_atomically
from angular_lab.text import short_bytes
from angular_lab.training.ranks import Ranks
from angular_muown.integrations.checkpoint import MomentumLoadPlanner

log = logging.getLogger(__name__)
HASHES = "hashes.json"
PIECE = 16 * 2**20  # bytes; threads hash the pieces of a file side by side
BLOCK = 2**20  # bytes that are read at a time: they stay in the processor's cache
THREADS = min(8, os.cpu_count() or 1)
# What the index of a checkpoint consists of, and nothing else.
INDEX_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)
INDEX_CLASSES = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "_StorageInfo"),
)
# Of a saved group: how far it is and how its state is stored. All else are settings of the run.
PROGRESS = {"params", "param_names", "lr", "step", "averaged", "state_dtype"}
PLAIN = (
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),
)


class SavedAverages(Protocol):
    """Averages by their names, each a dictionary with its tensors."""

    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"{PREFIX}{step:08d}"


def steps(folder: Path) -> list[int]:
    """Return the steps with a finished checkpoint, oldest first; none if the folder is missing."""
    return sorted(int(path.name.removeprefix(PREFIX)) for path in folder.glob(f"{PREFIX}*"))


def find(folder: Path, step: int | None = None) -> Path:
    """Return the checkpoint of a step, by default the newest."""
    saved = steps(folder)
    if not saved and step is None:
        raise UserError(f"{folder.parent} has no checkpoint yet")
    if step is not None and step not in saved:
        kept = ", ".join(map(str, saved)) or "none"
        raise UserError(f"{folder.parent} has no checkpoint at step {step}; it has {kept}")
    return step_folder(folder, saved[-1] if step is None else step)


def save(
    folder: Path,
    counters: dict[str, int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    averages: Sequence[SavedAverages],
) -> None:
    """Write a checkpoint; `counters` holds at least "step". Raises OSError if it cannot."""
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
            writer = dcp.FileSystemWriter(temporary, sync_files=False)  # _seal does
            dcp.save(content, storage_writer=writer, no_dist=ranks.world == 1)
        _seal(temporary, ranks)
    except (Exception, dcp.api.CheckpointException) as error:  # the latter is not an Exception
        shutil.rmtree(temporary, ignore_errors=True)
        cause = _cause(error)
        if isinstance(cause, KeyboardInterrupt):  # torch wraps it like an error
            raise cause from None
        raise OSError(
            f"checkpoint of step {step} could not be written to {folder}: {cause}"
            f"{_missing_space(folder, content)}; the "
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


def _missing_space(folder: Path, content: dict[str, Any]) -> str:
    """Return how much disk space a checkpoint lacks; "" if there is enough."""
    leaves = tree_leaves(content)
    needed = sum(x.numel() * x.element_size() for x in leaves if isinstance(x, torch.Tensor))
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return ""
    return (
        f". It takes {short_bytes(needed)} and the disk has {short_bytes(free)}: free "
        f"{short_bytes(needed - free)} more"
    )


def _content(
    counters: dict[str, int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averages: Sequence[SavedAverages],
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
    parts = {"model": weights, "optimizer": state, "average": _states(averages)}
    return {**parts, "counters": counters}


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ranks: Ranks,
    averages: Sequence[SavedAverages] = (),
) -> dict[str, int]:
    """Load into model and, where given, optimizer and averages, and return the counters. Raises
    DamagedError if a file does not match its hash."""
    _check(path, ranks)
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
        content["average"] = _averages_in(saved, averages)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(content, storage_reader=reader, planner=planner, no_dist=ranks.world == 1)
    except (Exception, dcp.api.CheckpointException) as error:
        cause = _cause(error)
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        raise UserError(f"checkpoint {path} cannot be loaded: {cause}") from None
    set_state_dict(
        model,
        optimizers,
        model_state_dict=content["model"],
        optim_state_dict=_with_settings(content.get("optimizer", {}), *optimizers),
    )
    for part in averages:
        part.load(content["average"])
    return content["counters"]


def _leave_out_new_settings(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Remove settings of groups that a checkpoint of an earlier version lacks: torch would require
    them; left out, they keep the constructor's values."""
    for i, group in enumerate(state["param_groups"]):
        for key in [*group]:
            name = f"optimizer.param_groups.{i}.{key}"
            if not any(known == name or known.startswith(f"{name}.") for known in saved):
                del group[key]


def _with_settings(state: dict[str, Any], *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's loaded state with the settings of its own groups: those of the run's
    spec, which a branch may change."""
    for optimizer in optimizers:
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
            for key in saved.keys() & group.keys() - PROGRESS:
                saved[key] = group[key]
    return state


def _states(averages: Sequence[SavedAverages]) -> dict[str, Any]:
    return {name: state for part in averages for name, state in part.state().items()}


def _averages_in(saved: Mapping[str, Any], averages: Sequence[SavedAverages]) -> dict[str, Any]:
    """Return the averages that the checkpoint has; other windows of a branch begin with it."""
    states = _states(averages).items()
    kept = {name.split(".weights.")[0] for name in saved if name.startswith("average.")}
    return {name: state for name, state in states if f"average.{name}" in kept}


Point = dict[str, Any]


def to_memory(
    counters: dict[str, int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averages: Sequence[SavedAverages],
) -> Point:
    """Copy what `save` writes, for a later run of this process to start from."""
    return copy.deepcopy(_content(counters, model, optimizer, averages))


def from_memory(
    point: Point,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averages: Sequence[SavedAverages],
) -> dict[str, int]:
    content = copy.deepcopy(point)  # an optimizer may keep the tensors it is given
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=_with_settings(content["optimizer"], optimizer),
    )
    for part in averages:
        part.load(content["average"])
    return content["counters"]


def _cause(error: BaseException) -> object:
    """Return the error of the first rank that failed."""
    failures = getattr(error, "failures", {})
    return next(iter(failures.values()))[0] if failures else error


class DamagedError(UserError):
    """A checkpoint has files that do not match their hashes."""

    def __init__(self, path: Path, damage: list[str], newest_good: int | None) -> None:
        self.newest_good = newest_good
        known = f"the newest good step is {newest_good}"
        if newest_good is None:
            known = f"no other checkpoint in {path.parent} has hashes that match"
        super().__init__(f"checkpoint {path} is damaged: {', '.join(damage)}; {known}")

    def advise(self, how: str) -> UserError:
        """Return the error with advice; `how` has a placeholder for the newest good step."""
        return UserError(
            str(self) if self.newest_good is None else f"{self}: {how.format(self.newest_good)}"
        )


def _check(path: Path, ranks: Ranks) -> None:
    if not (path / HASHES).exists():
        log.warning("checkpoint %s has no hashes: loaded without a check", path)
        return
    if not (damage := _damage(path, ranks)):
        return
    others = [step_folder(path.parent, step) for step in reversed(steps(path.parent))]
    hashed = [other for other in others if other != path and (other / HASHES).exists()]
    good = next((other for other in hashed if not _damage(other, ranks)), None)
    raise DamagedError(path, damage, int(good.name.removeprefix(PREFIX)) if good else None)


def _damage(path: Path, ranks: Ranks) -> list[str]:
    """Describe the files that do not match their hashes, the same on every rank; ranks share the
    reading."""
    damage: list[str] = []
    try:
        content = json.loads((path / HASHES).read_text())
        piece, files = content["piece"], sorted(content["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        damage, piece, files = [f"{HASHES} cannot be read ({error})"], 0, []
    for name, expected in files[ranks.rank :: ranks.world]:
        try:
            if not (path / name).is_file():
                damage.append(f"{name} is missing")
            elif digest(path / name, piece) != expected:
                damage.append(f"{name} does not match its hash")
        except OSError as error:
            damage.append(f"{name} cannot be read ({error})")
    return list(dict.fromkeys(text for part in ranks.gather(damage) for text in part))


def problems(path: Path) -> list[str]:
    """Describe what keeps a checkpoint from being loaded: damaged files, or a damaged index."""
    found = [] if (path / HASHES).exists() else [f"{HASHES} is missing"]
    found += _damage(path, Ranks(0, 1, torch.device("cpu"))) if not found else []
    try:
        saved = SafeReader(path).read_metadata().state_dict_metadata
    except (Exception, dcp.api.CheckpointException) as error:
        return [*found, f"its index cannot be read ({_cause(error)})"]
    if not any(name.startswith("model.") for name in saved):
        found.append("its index lists no weights")
    return found


def _seal(folder: Path, ranks: Ranks) -> None:
    """Force the files to disk and write their hashes. Raises OSError on all ranks if one cannot."""
    files: dict[str, str] = {}
    for part in ranks.gather(_seal_own_files(folder, ranks)):
        if isinstance(part, OSError):
            raise part
        files |= part
    if ranks.first:
        content = {"algorithm": "sha256 of the sha256 of pieces", "piece": PIECE, "files": files}
        write_atomically(folder / HASHES, json.dumps(content, indent=1) + "\n")


def _seal_own_files(folder: Path, ranks: Ranks) -> dict[str, str] | OSError:
    """Hash what this rank wrote while the disk is busy with it; the first one wrote the index."""
    own = [*folder.glob(f"__{ranks.rank}_*"), *([folder / ".metadata"] if ranks.first else [])]
    try:
        with ThreadPoolExecutor(1) as disk:
            synced = disk.map(_sync, own)
            hashes = {path.name: digest(path, PIECE) for path in own}
            list(synced)  # raises what a sync raised
        return hashes
    except OSError as error:
        return error


def digest(path: Path, piece: int) -> str:
    """Return the hash of the hashes of a file's pieces of `piece` bytes."""
    starts = range(0, path.stat().st_size, piece)
    with ThreadPoolExecutor(THREADS) as pool:
        return sha256(b"".join(pool.map(partial(_digest_piece, path, piece), starts))).hexdigest()


def _digest_piece(path: Path, piece: int, start: int) -> bytes:
    hashed, block = sha256(), memoryview(bytearray(min(piece, BLOCK)))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while piece > 0 and (size := file.readinto(block[:piece])):
            hashed.update(block[:size])
            piece -= size
    return hashed.digest()


def drop_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps: the run is about to take those steps again."""
    for later in (other for other in steps(folder) if other > step):
        _remove(step_folder(folder, later))


def prune(folder: Path, keep: int, pinned: tuple[int, ...]) -> None:
    """Keep the newest `keep` and the pinned ones."""
    loose = [step for step in steps(folder) if step not in pinned]
    for step in loose[: max(0, len(loose) - keep)]:
        _remove(step_folder(folder, step))


def _remove(path: Path) -> None:
    """Remove a checkpoint; renamed first, so that a kill never leaves a partial one."""
    aside = path.with_name(f".removing-{path.name}")
    os.rename(path, aside)
    shutil.rmtree(aside)


def clean(folder: Path) -> None:
    """Remove what an interrupted save or removal left."""
    for path in (*folder.glob(".saving-*"), *folder.glob(".removing-*")):
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    """Force a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class SafePlanner(MomentumLoadPlanner):
    """Loads plain values by torch's weights-only unpickler; torch's planner takes any pickle."""

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
