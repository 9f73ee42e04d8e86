"""From a spec to a model, its optimizer and its learning rate."""

import fnmatch
import gc
import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils import deterministic

import angular_muown as library
from angular_lab.config.overrides import as_typed
from angular_lab.config.spec import OptimSpec, Spec
from angular_lab.errors import UserError
from angular_lab.models import LanguageModel, build_model, tensor_parallel
from angular_lab.training.ranks import Ranks
from angular_muown import Plan, cosine, inverse_polynomial, plan, wsd

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
# not every optimizer has these
SPECIAL = ("radius", "radius_lr", "row_beta", "tangent_steps", "state_dtype", "nesterov")
# of hidden matrices, which AdamW does not tell from other parameters
OF_MATRICES = ("momentum_start", "slow_share", "soap", "split_heads")


def make_model(spec: Spec, ranks: Ranks) -> LanguageModel:
    """Build the model with weights initialized on the CPU, the same for every device."""
    model = build_model(spec.model)
    _store_weights(model, spec, ranks)
    model.init_weights(spec.seed)
    return model.to(ranks.device)


def _store_weights(model: LanguageModel, spec: Spec, ranks: Ranks | None = None) -> None:
    """Make the hidden matrices bf16 if the spec asks for that."""
    if spec.precision == "bf16_weights":
        if spec.optim.name == "adamw":
            raise UserError(
                "precision=bf16_weights with optim.name=adamw: torch's AdamW rounds to nearest and "
                "loses small steps, so the comparison would not be fair; set precision=bf16"
            )
        if ranks and ranks.world > 1 and spec.parallel == "fsdp":
            raise UserError(
                "precision=bf16_weights with parallel=fsdp: FSDP shards parameters of one dtype "
                "together, and norms stay in float32; set parallel=ddp"
            )
        for group in _plan(model, spec.optim):
            for _, p in group["params"] if group["algorithm"] == "matrix" else ():
                p.data = p.data.bfloat16()


def tensor_ranks(spec: Spec, ranks: Ranks) -> Ranks:
    """Return the ranks with the number of them that divide a layer."""
    if ranks.world == 1 or spec.tensor == 1:
        return ranks
    if ranks.world % spec.tensor:
        raise UserError(f"tensor={spec.tensor} does not divide the number of ranks, {ranks.world}")
    if spec.parallel == "ddp" and ranks.world > spec.tensor:
        raise UserError(
            f"parallel=ddp with tensor={spec.tensor} on {ranks.world} ranks: DDP takes whole "
            "weights; set parallel=fsdp"
        )
    tensor_parallel.check(spec.model, spec.tensor)
    return replace(ranks, tensor=spec.tensor)


def parallelize(model: LanguageModel, spec: Spec, ranks: Ranks) -> nn.Module:
    """Return what the loop calls: the model, sharded across ranks and compiled as specified."""
    parallel: nn.Module = model
    mesh = None
    if ranks.tensor > 1:
        sizes, names = (ranks.data_world, ranks.tensor), ("data", "tensor")
        both = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=names)
        mesh = both["data"]
        tensor_parallel.divide(model.layers, both["tensor"])
    if ranks.data_world > 1:
        if spec.parallel == "ddp":
            parallel = nn.parallel.DistributedDataParallel(model)
        else:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
    if spec.compile:
        parallel.compile()  # in place: names of parameters stay as they are
    return parallel


class Models:
    """The model of a process that trains run after run. A model of the same shape is reused, its
    weights initialized in place, so that nothing is compiled again."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._cached: tuple[LanguageModel, nn.Module] | None = None
        self.points: dict[Path, Any] = {}  # branch points of the last trunk, by their folders

    def fits(self, spec: Spec) -> bool:
        """True if the cached model has this run's shape."""
        return self._key[:3] == (spec.model, spec.compile, spec.precision)

    def take(self, spec: Spec, ranks: Ranks) -> tuple[LanguageModel, nn.Module]:
        """Return a model as `make_model` does, and what the loop calls."""
        key = (spec.model, spec.compile, spec.precision, ranks.device)
        if ranks.world > 1 or self._cached is None or key != self._key:
            if self._cached is not None and spec.compile:
                # Past its limit of shapes torch silently stops compiling.
                torch.compiler.reset()
            if self._cached is not None:
                self._cached = None
                gc.collect()  # torch's state dicts leave cycles; the next one needs the memory
            model = make_model(spec, ranks)
            self._key, self._cached = key, (model, parallelize(model, spec, ranks))
            return self._cached
        model, _ = self._cached
        gc.collect()  # the last run's recorded passes, or memory holds both
        model.init_weights(spec.seed)
        model.zero_grad(set_to_none=True)
        model.train()
        return self._cached


def make_optimizer(model: LanguageModel, spec: Spec) -> torch.optim.Optimizer:
    """Build the optimizer; after `parallelize`, because sharding replaces the parameters."""
    o = spec.optim
    if o.name not in OPTIMIZER_NAMES:
        raise UserError(f"optim.name={o.name}: it must be one of {', '.join(OPTIMIZER_NAMES)}")
    fused = next(model.parameters()).is_cuda
    _check_meaning(o)
    if spec.schedule.fall and o.name == "adamw":
        raise UserError(
            f"schedule.fall={spec.schedule.fall:g} is for the learning rate of matrices, and "
            "optim.name=adamw has one for all: leave it at 0"
        )
    groups = _plan(model, o)
    for group in groups:
        if group["algorithm"] == "adamw":
            group["fused"] = fused
    with _rejected_values():
        if o.name == "adamw":
            return torch.optim.AdamW(
                [_plain(group, o.weight_decay) for group in groups],
                lr=o.lr, betas=(o.beta1, o.beta2), fused=fused,
            )  # fmt: skip
        optimizer = OPTIMIZERS[o.name](groups, **_arguments(OPTIMIZERS[o.name], spec))
    chosen_matrices(model, optimizer, o.soap)  # raises for a pattern without matrices
    return optimizer


@contextmanager
def _rejected_values() -> Iterator[None]:
    """Turn the error for a value of the spec that the library rejects into a UserError."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"optim: {error}") from error


# --- sizes, without memory ---

PER_TENSOR = 4096  # bytes of a checkpoint's index and headers
STATES = 4  # tensors that are saved for a parameter, at most: itself and its state


def without_memory(spec: Spec) -> tuple[LanguageModel, torch.optim.Optimizer]:
    """Return a run's model and optimizer, shapes and dtypes alone."""
    with torch.device("meta"):
        model = build_model(spec.model)
        _store_weights(model, spec)
        return model, make_optimizer(model, spec)


def weight_bytes(model: LanguageModel) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state after a step."""
    if isinstance(optimizer, torch.optim.AdamW):
        groups = optimizer.param_groups
        return sum(2 * p.numel() * p.element_size() for g in groups for p in g["params"])
    sizes = cast(Any, optimizer).plan.state_bytes
    return sum(sizes.values())


def checkpoint_bytes(spec: Spec, model: LanguageModel, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of one checkpoint, computed; a few percent above what is written."""
    saved = model.state_dict()  # with both names of a tied weight
    weights = sum(x.numel() * x.element_size() for x in saved.values())
    index = PER_TENSOR * STATES * len(saved)
    averages = average_bytes(spec, model, optimizer)
    return int(1.05 * (weights + state_bytes(optimizer) + averages)) + index


def training_bytes(spec: Spec, model: LanguageModel, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of weights, gradients, the optimizer's state and averages."""
    weights = 2 + bool(spec.extrapolate.strength)  # with gradients, and the weights before a move
    averages = average_bytes(spec, model, optimizer)
    return weights * weight_bytes(model) + state_bytes(optimizer) + averages


def average_bytes(spec: Spec, model: LanguageModel, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all averages of weights, displacements and gradients, and of SOAP's
    state: float32."""
    copies = len(spec.average) + bool(spec.extrapolate.strength)
    averages = copies * sum(p.numel() for p in model.parameters())
    if spec.optim.slow_share:
        averages += sum(p.numel() for p in matrices(optimizer))
    for p in chosen_matrices(model, optimizer, spec.optim.soap).values():
        long, short = max(p.shape[-2:]), min(p.shape[-2:])
        averages += (long + 2 * short) * (p.numel() // long)  # V, C and Q
    return 4 * averages


def _plan(model: LanguageModel, o: OptimSpec) -> Plan:
    """Return which parameters are hidden matrices, and how they are cut."""
    blocks, overrides = model.blocks(o.split_heads), _angles(o)
    with _rejected_values():
        return plan(
            model,
            blocks=blocks if o.split_blocks else dict.fromkeys(blocks, 1),
            stacks=model.stacks(),
            aux_lr=o.aux_lr,
            aux_weight_decay=o.aux_weight_decay,
            aux_betas=None if o.aux_beta2 is None else (o.beta1, o.aux_beta2),
            overrides=overrides,
        )


def matrices(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that the optimizer steps as matrices; none of AdamW's."""
    groups = (g for g in optimizer.param_groups if g.get("algorithm") == "matrix")
    return [p for group in groups for p in group["params"]]


def chosen_matrices(
    model: nn.Module, optimizer: torch.optim.Optimizer, patterns: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return by name the optimizer's matrices that match a pattern. Every pattern must match."""
    hidden = set(matrices(optimizer))
    known = {name: p for name, p in model.named_parameters() if p in hidden}
    chosen: dict[str, torch.Tensor] = {}
    for pattern in patterns:
        found = fnmatch.filter(known, pattern)
        if not found:
            raise UserError(
                f"optim.soap={pattern} matches none of the optimizer's matrices; one of them is "
                f"{next(iter(known))}"
            )
        chosen |= {name: known[name] for name in found}
    return chosen


def moves_row_lengths(name: str) -> bool:
    """True if the optimizer of this name moves row lengths by a rule of their own."""
    return name in OPTIMIZERS and "radius" in inspect.signature(OPTIMIZERS[name]).parameters


def _angles(o: OptimSpec) -> dict[str, dict[str, Any]]:
    """Return the learning rates of matrices that have their own; row lengths keep the common
    one."""
    rates: dict[str, dict[str, Any]] = {}
    known = inspect.signature(OPTIMIZERS.get(o.name, torch.optim.AdamW)).parameters
    common = {"radius_lr": o.with_all_rates().radius_lr} if "radius_lr" in known else {}
    for text in o.angles:
        pattern, _, factor = text.partition("=")
        try:
            rate = float(factor) * o.lr
        except ValueError:
            raise UserError(
                f"optim.angles={text}: give a pattern of names, = and a factor, for example "
                "*.down.weight=0.5"
            ) from None
        rates[pattern] = {"lr": rate, **common}
    return rates


def _check_meaning(o: OptimSpec) -> None:
    """Raise UserError if a setting has no meaning for this optimizer: the run would not be what its
    spec says."""
    if o.retired:
        raise UserError(
            f"optim.retired={','.join(o.retired)}: the library no longer has these options; a run "
            "with them can be read, not made"
        )
    known = inspect.signature(OPTIMIZERS.get(o.name, torch.optim.AdamW)).parameters
    for key in (*SPECIAL, *OF_MATRICES):
        value, usual = getattr(o, key), getattr(OptimSpec(), key)
        means_something = o.name != "adamw" if key in OF_MATRICES else key in known
        if not means_something and value != usual:
            leave = "out" if usual == () else f"at {as_typed(usual)}"
            raise UserError(
                f"optim.{key}={as_typed(value)} has no meaning for optim.name={o.name}: leave it "
                f"{leave}"
            )
    if o.split_heads and not o.split_blocks:
        raise UserError(
            "optim.split_heads=true with optim.split_blocks=false: heads are parts of blocks"
        )
    if o.equal_rows and o.name != "angular_muown":
        raise UserError(
            f"optim.equal_rows=true has no meaning for optim.name={o.name}: leave it at false"
        )
    if o.orthogonalize != "tangent" and o.tangent_steps != OptimSpec().tangent_steps:
        raise UserError(
            f"optim.tangent_steps={o.tangent_steps} has no meaning for optim.orthogonalize="
            f"{o.orthogonalize}: set optim.orthogonalize=tangent"
        )


def _plain(group: dict[str, Any], weight_decay: float) -> dict[str, Any]:
    """Return a group of the plan for AdamW: hidden matrices decay, the rest as planned."""
    known = ("params", "lr", "weight_decay", "betas")
    settings = {key: group[key] for key in known if key in group}
    return {"weight_decay": weight_decay, **settings}


def _arguments(kind: type, spec: Spec) -> dict[str, Any]:
    """Return the settings that this optimizer takes as arguments."""
    o = spec.optim
    wanted = {
        "lr": o.lr,
        "momentum": o.momentum,
        "nesterov": o.nesterov,
        "betas": (o.beta1, o.beta2),
        "weight_decay": o.weight_decay,
        "orthogonalize": o.orthogonalize,
        "radius": o.radius,
        "radius_lr": o.radius_lr,
        "warmup_steps": spec.schedule.warmup,
        "decay_scale": o.decay_scale,
        "decay_degree": o.decay_degree,
        "tangent_steps": o.tangent_steps,
        "state_dtype": o.state_dtype,
        **({} if o.row_beta is None else {"row_beta": o.row_beta}),
        **({} if o.scale is None else {"scale": o.scale}),
    }
    return {
        key: value for key, value in wanted.items() if key in inspect.signature(kind).parameters
    }


def lr_factor(spec: Spec, step: int) -> float:
    """Return the schedule's factor: a pure function of the step, so nothing to save or load."""
    s = spec.schedule
    if s.kind == "wsd":
        return wsd(step, spec.steps, s.warmup, spec.decay_steps)
    if s.kind == "cosine":
        return cosine(step, spec.steps, s.warmup)
    return wsd(step, spec.steps, s.warmup, 0)  # constant: the warmup alone


def matrix_factor(spec: Spec, step: int) -> float:
    """Return a further factor on the matrices' learning rate: kappa, for optimizers without one."""
    s = spec.schedule
    return inverse_polynomial(step, s.warmup, s.fall, 1.0)


def balance_experts(model: LanguageModel, ranks: Ranks) -> None:
    """Move the routers of a mixture towards equal load, counted over all ranks; after a step."""
    for load in model.loads():
        load.copy_(ranks.sum(load))
    model.balance()


def synchronize_gradients(parallel: nn.Module, last: bool) -> None:
    """Exchange gradients in the last micro-batch of a step only."""
    if isinstance(parallel, nn.parallel.DistributedDataParallel):
        parallel.require_backward_grad_sync = last
    elif isinstance(parallel, FSDPModule):
        parallel.set_requires_gradient_sync(last)


def make_deterministic(spec: Spec) -> None:
    """Make repeats bit-equal on one machine; filling uninitialized memory is not needed for it."""
    torch.use_deterministic_algorithms(spec.deterministic)
    deterministic.fill_uninitialized_memory = False  # pyrefly: ignore
    if spec.deterministic:  # cuBLAS reads it at its first call
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
