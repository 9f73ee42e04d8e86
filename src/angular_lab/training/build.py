"""From a spec to a model, its optimizer and its learning rate."""

import gc
import inspect
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils import deterministic

import angular_muown as library
from angular_lab.config.spec import OptimSpec, Spec
from angular_lab.models import LanguageModel, build_model, tensor_parallel
from angular_lab.training.ranks import Ranks
from angular_muown import cosine, inverse_polynomial, plan, wsd

OPTIMIZERS = {
    "muon": library.Muon,
    "normuon": library.NorMuon,
    "muown": library.Muown,
    "normuown": library.NorMuown,
    "angular_muown": library.AngularMuown,
    "hyperball": library.Hyperball,
    "magnitude_direction": library.MagnitudeDirection,
}
OPTIMIZER_NAMES = ("adamw", *OPTIMIZERS)
SPECIAL = (
    *("radius", "radius_lr", "row_beta", "tangent_momentum", "tangent_steps", "exact_angle"),
    "column_gains",
)


def make_model(spec: Spec, ranks: Ranks) -> LanguageModel:
    """Initialised on the CPU, so that every device starts from the same weights."""
    model = build_model(spec.model)
    model.init_weights(spec.seed)
    return model.to(ranks.device)


def tensor_ranks(spec: Spec, ranks: Ranks) -> Ranks:
    """Ranks that know how many of them divide a layer: none where there is only one."""
    if ranks.world == 1 or spec.tensor == 1:
        return ranks
    if ranks.world % spec.tensor:
        raise ValueError(f"tensor={spec.tensor} does not divide the number of ranks, {ranks.world}")
    if spec.parallel == "ddp" and ranks.world > spec.tensor:
        raise ValueError(
            f"parallel=ddp with tensor={spec.tensor} on {ranks.world} ranks: DDP takes whole "
            "weights; set parallel=fsdp"
        )
    tensor_parallel.check(spec.model, spec.tensor)
    return replace(ranks, tensor=spec.tensor)


def parallelize(model: LanguageModel, spec: Spec, ranks: Ranks) -> nn.Module:
    """What the loop calls: the model, spread over the ranks and compiled as the spec says."""
    spread: nn.Module = model
    mesh = None
    if ranks.tensor > 1:
        sizes, names = (ranks.data_world, ranks.tensor), ("data", "tensor")
        both = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=names)
        mesh = both["data"]
        tensor_parallel.divide(model.layers, both["tensor"])
    if ranks.data_world > 1:
        if spec.parallel == "ddp":
            spread = nn.parallel.DistributedDataParallel(model)
        else:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
    if spec.compile:
        spread.compile()  # in place: names of parameters stay as they are
    return spread


class Models:
    """The model of a process that makes run after run: one of the same shape is taken again, its
    weights initialised in place, so that nothing is compiled anew."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._kept: tuple[LanguageModel, nn.Module] | None = None
        self.points: dict[Path, Any] = {}  # branch points of the last trunk, by their folders

    def fits(self, spec: Spec) -> bool:
        """Whether the kept model is of this run's shape."""
        return self._key[:3] == (spec.model, spec.compile, spec.precision)

    def take(self, spec: Spec, ranks: Ranks) -> tuple[LanguageModel, nn.Module]:
        """A model as `make_model` makes it, and what the loop calls."""
        key = (spec.model, spec.compile, spec.precision, ranks.device)
        if ranks.world > 1 or self._kept is None or key != self._key:
            if self._kept is not None and spec.compile:
                # Past its limit of shapes torch compiles no more, with a warning that nobody reads.
                torch.compiler.reset()
            if self._kept is not None:
                self._kept = None
                gc.collect()  # torch's state dicts leave cycles; the next one needs the memory
            model = make_model(spec, ranks)
            self._key, self._kept = key, (model, parallelize(model, spec, ranks))
            return self._kept
        model, _ = self._kept
        gc.collect()  # the last run's recorded passes, which would lie beside the next one's
        model.init_weights(spec.seed)
        model.zero_grad(set_to_none=True)
        model.train()
        return self._kept


def make_optimizer(model: LanguageModel, spec: Spec) -> torch.optim.Optimizer:
    """After `parallelize`: sharding swaps the parameters."""
    o = spec.optim
    if o.name not in OPTIMIZER_NAMES:
        raise ValueError(f"optim.name={o.name}: it must be one of {', '.join(OPTIMIZER_NAMES)}")
    groups = plan(
        model,
        blocks=model.blocks() if o.split_blocks else {},
        stacks=model.stacks(),
        aux_lr=o.aux_lr or None,
        aux_weight_decay=o.aux_weight_decay,
    )
    fused = next(model.parameters()).is_cuda
    _check_meaning(o)
    if spec.schedule.fall and o.name == "adamw":
        raise ValueError(
            f"schedule.fall={spec.schedule.fall:g} is for the matrices' rate, and optim.name=adamw "
            "has one rate for all: leave it at 0"
        )
    if o.name == "adamw":
        return torch.optim.AdamW(
            [_plain(group, o.weight_decay) for group in groups],
            lr=o.lr, betas=(o.beta1, o.beta2), fused=fused,
        )  # fmt: skip
    for group in groups:
        if group["algorithm"] == "adamw":
            group["fused"] = fused
    return OPTIMIZERS[o.name](groups, **_arguments(OPTIMIZERS[o.name], spec))


def _check_meaning(o: OptimSpec) -> None:
    """A setting that this optimizer has no use for would be a run other than it says."""
    known = inspect.signature(OPTIMIZERS.get(o.name, torch.optim.AdamW)).parameters
    for key in SPECIAL:
        value, usual = getattr(o, key), getattr(OptimSpec(), key)
        if key not in known and value != usual:
            raise ValueError(
                f"optim.{key}={value} means nothing for optim.name={o.name}: leave it at {usual}"
            )
    if o.orthogonalize != "tangent" and o.tangent_steps != OptimSpec().tangent_steps:
        raise ValueError(
            f"optim.tangent_steps={o.tangent_steps} means nothing for optim.orthogonalize="
            f"{o.orthogonalize}: set optim.orthogonalize=tangent"
        )


def _plain(group: dict[str, Any], weight_decay: float) -> dict[str, Any]:
    """A group of the plan for AdamW alone: hidden matrices decay, the rest as planned."""
    known = {key: group[key] for key in ("params", "lr", "weight_decay") if key in group}
    return {"weight_decay": weight_decay, **known}


def _arguments(kind: type, spec: Spec) -> dict[str, Any]:
    """What the spec says, as far as this optimizer has such an argument."""
    o = spec.optim
    wanted = {
        "lr": o.lr,
        "momentum": o.momentum,
        "betas": (o.beta1, o.beta2),
        "weight_decay": o.weight_decay,
        "orthogonalize": o.orthogonalize,
        "radius": o.radius,
        "radius_lr": o.radius_lr or None,
        "warmup_steps": spec.schedule.warmup,
        "decay_scale": o.decay_scale,
        "decay_degree": o.decay_degree,
        "tangent_steps": o.tangent_steps,
        **({"row_beta": o.row_beta} if o.row_beta else {}),
        **({"scale": o.scale} if o.scale else {}),
    }
    return {
        key: value for key, value in wanted.items() if key in inspect.signature(kind).parameters
    }


def lr_factor(spec: Spec, step: int) -> float:
    """The schedule as a pure function of the step: nothing to save, nothing to load."""
    s = spec.schedule
    if s.kind == "wsd":
        return wsd(step, spec.steps, s.warmup, spec.decay_steps)
    if s.kind == "cosine":
        return cosine(step, spec.steps, s.warmup)
    return wsd(step, spec.steps, s.warmup)  # constant: only the warm-up of it


def matrix_factor(spec: Spec, step: int) -> float:
    """What the matrices' rate has beside that: kappa's form, for optimizers without a kappa."""
    s = spec.schedule
    return inverse_polynomial(step, s.warmup, s.fall, 1.0)


def balance_experts(model: LanguageModel, ranks: Ranks) -> None:
    """After a step: the routers of a mixture move towards equal load, counted over all ranks."""
    for load in model.loads():
        load.copy_(ranks.sum(load))
    model.balance()


def synchronize_gradients(parallel: nn.Module, last: bool) -> None:
    """Gradients are exchanged in the last micro-batch of a step only."""
    if isinstance(parallel, nn.parallel.DistributedDataParallel):
        parallel.require_backward_grad_sync = last
    elif isinstance(parallel, FSDPModule):
        parallel.set_requires_gradient_sync(last)


def make_deterministic(spec: Spec) -> None:
    """Same spec, same machine: the same bits. Uninitialised memory need not be filled for that."""
    torch.use_deterministic_algorithms(spec.deterministic)
    deterministic.fill_uninitialized_memory = False  # pyrefly: ignore
    if spec.deterministic:  # cuBLAS reads it at its first call
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
