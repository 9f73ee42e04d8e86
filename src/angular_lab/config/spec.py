"""A run as a frozen dataclass: the only place with defaults.

A variant is `dataclasses.replace`; the command line sets `key=value` with dotted keys
(`overrides.py`). The comment after a field is its help text.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from math import inf
from typing import Any

from angular_lab.errors import UserError
from angular_lab.records import from_json

Window = int | float  # 549 and 0.1 stay what they are: the names of losses contain them


def average_loss(window: Window, form: str = "") -> str:
    """Return the name in metrics.jsonl of the loss of an average, in one of its further forms."""
    return f"val_loss_averaged_{window}_{form}" if form else f"val_loss_averaged_{window}"


@dataclass(frozen=True)
class ModelSpec:
    kind: str = "dense"  # dense, qwen2, moe, gpt_speedrun
    vocabulary: int = 50_280  # GPT-NeoX's 50,277 entries, rounded up
    sequence: int = 1024  # tokens per sequence
    layers: int = 12  # transformer blocks
    width: int = 768  # of the residual stream
    heads: int = 12  # attention heads
    kv_heads: int | None = None  # heads of keys and values; none: as many as heads
    mlp: int | None = None  # inner width; none: the model's own ratio to the width
    tied: bool = True  # the output layer shares the embedding's weights
    norm_eps: float = 1e-6  # epsilon of RMSNorm
    rope_base: float = 10_000.0  # base of the rotary embedding's frequencies
    init_std: float = 0.02  # standard deviation of the initial weights
    soft_cap: float | None = None  # bound on the logits; none: no bound
    experts: int = 0  # of a mixture
    experts_per_token: int = 0  # that each token is sent to
    expert_mlp: int = 0  # inner width of an expert
    shared_mlp: int = 0  # inner width of the expert that every token passes
    dense_layers: int = 0  # leading layers of a mixture without experts
    balance_rate: float = 1e-3  # how fast the router's bias moves towards equal load


@dataclass(frozen=True)
class OptimSpec:
    name: str = "angular_muown"  # adamw or one of training.build.OPTIMIZERS
    lr: float = 0.02  # of the matrices
    aux_lr: float | None = None  # embeddings, heads, norms; none: as lr
    radius_lr: float | None = None  # row lengths; none: as lr
    weight_decay: float = 0.0  # of the matrices
    aux_weight_decay: float = 0.0  # of embeddings, heads, norms
    angles: tuple[str, ...] = ()  # pattern=factor: the lr of some matrices, relative to lr
    equal_rows: bool = False  # orthogonalize the tangent gradient without the factor of row lengths
    momentum: float = 0.95  # of the matrices
    nesterov: bool = True  # look ahead: step along T + momentum M, not along M
    momentum_start: float | None = None  # where it starts and ends; none: it stays constant
    momentum_ramp: int = 300  # steps from momentum_start to momentum, and back at the end
    slow_share: float = 0.0  # weight of a slow average in the gradient, at the full lr; 0: none
    slow_decay: float = 0.98  # decay rate of that average
    soap: tuple[str, ...] = ()  # patterns of matrices whose gradients SOAP equalizes first
    beta1: float = 0.9  # Adam's first decay rate
    beta2: float = 0.95  # Adam's second decay rate
    aux_beta2: float | None = None  # the same for embeddings, heads, norms; none: as beta2
    decay_scale: float = 1e-3  # kappa = (1 + decay_scale (t - warmup))^(-decay_degree)
    decay_degree: float = 1.0  # 0: kappa stays at 1
    scale: str | None = None  # of a step, by the matrix's shape; none: the optimizer's own
    orthogonalize: str = "polar_express"  # for every optimizer, as in the paper
    radius: str = "adam"  # how row lengths move
    split_blocks: bool = True  # step the blocks of fused matrices separately
    split_heads: bool = False  # step the heads of queries and keys separately
    tangent_steps: int = 1  # dual steps of orthogonalize=tangent
    row_beta: float | None = None  # of NorMuon's second moment; none: the optimizer's own
    state_dtype: str | None = None  # of the momentum: bfloat16, int8; none: float32
    retired: tuple[str, ...] = ()  # options of earlier versions; a run with any can only be read

    def with_all_rates(self) -> "OptimSpec":
        """Return the settings with learning rates that follow `lr` replaced by their values."""
        aux_lr = self.lr if self.aux_lr is None else self.aux_lr
        radius_lr = self.lr if self.radius_lr is None else self.radius_lr
        return replace(self, aux_lr=aux_lr, radius_lr=radius_lr)


@dataclass(frozen=True)
class ScheduleSpec:
    kind: str = "wsd"  # wsd, cosine, constant
    warmup: int = 100  # steps
    decay: float = 0.1  # share of the steps in the linear cooldown (wsd)
    decay_steps: int | None = None  # the same as a number of steps; none: by share
    fall: float = 0.0  # c of a further (1 + c (t - warmup))^(-1) on the matrices' learning rate


@dataclass(frozen=True)
class ExtrapolateSpec:
    """Evaluate gradients at, and step from, a point ahead of the weights."""

    strength: float = 0.0  # b, the move ahead in average steps, at the full learning rate; 0: off
    decay: float = 0.99  # of the average of past steps
    start: float = 0.1  # share of the steps before it starts
    end: float = 0.7  # share of the steps at which it stops


@dataclass(frozen=True)
class DashboardSpec:
    """Where W&B and trackio show a run. No loss depends on it, and a resumed run may change it."""

    project: str = "angular-lab"  # wandb and trackio
    entity: str | None = None  # wandb; none: your default
    group: str | None = None  # wandb and trackio
    tags: tuple[str, ...] = ()  # wandb


@dataclass(frozen=True)
class Spec:
    name: str = "custom"  # the named run that this one started from
    data: str = "stdlib"  # a folder of shards, or "stdlib": the running Python's own source code
    steps: int = 1000  # optimizer steps
    batch: int = 512  # sequences per step over all ranks
    micro_batch: int | None = None  # sequences per forward pass and rank; none: all at once
    seed: int = 0  # of the initial weights and the order of the data
    clip: float | None = 1.0  # bound on the global gradient norm; none: no bound
    eval_every: int | None = 250  # steps; none: never
    eval_tokens: int = 1_048_576  # validation tokens per evaluation
    save_every: int | None = 500  # steps; none: at the end and at pinned steps only
    keep: int = 2  # newest checkpoints that stay
    pins: tuple[int, ...] = ()  # steps whose checkpoints always stay: branch points
    log_every: int | None = 10  # steps; none: with evaluations and angles only
    angle_every: int | None = 50  # steps; none: never
    sample_every: int | None = None  # steps between samples of generated text; none: never
    average: tuple[Window, ...] = ()  # windows of averages to evaluate: steps, or below 1 a share
    average_forms: tuple[str, ...] = ()  # to evaluate too: sphere (rows keep length), half (blend)
    on_nan: str = "stop"  # stop, skip
    precision: str = "bf16"  # bf16 (autocast), bf16_weights (matrices are stored so, too), fp32
    compile: bool = True  # torch.compile
    deterministic: bool = True  # bit-equal repeats on one machine
    parallel: str = "ddp"  # with several ranks: ddp, fsdp
    tensor: int = 1  # ranks that divide the products of a layer (dense models)
    loggers: tuple[str, ...] = ()  # tensorboard, wandb, trackio
    parent: str | None = None  # set by `branch`: the run that this one continues
    parent_step: int = 0  # and the step
    model: ModelSpec = field(default_factory=ModelSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    extrapolate: ExtrapolateSpec = field(default_factory=ExtrapolateSpec)
    dashboard: DashboardSpec = field(default_factory=DashboardSpec)

    def __post_init__(self) -> None:
        choices = {
            "on_nan": (self.on_nan, ("stop", "skip")),
            "precision": (self.precision, ("bf16", "bf16_weights", "fp32")),
            "parallel": (self.parallel, ("ddp", "fsdp")),
            "schedule.kind": (self.schedule.kind, ("wsd", "cosine", "constant")),
        }
        for key, (value, valid) in choices.items():
            if value not in valid:
                raise UserError(f"{key}={value}: it must be one of {', '.join(valid)}")
        least = {"steps": 1, "batch": 1, "micro_batch": 1, "keep": 1, "seed": 0, "log_every": 1,
                 "eval_every": 1, "save_every": 1, "angle_every": 1, "eval_tokens": 1,
                 "sample_every": 1, "tensor": 1}  # fmt: skip
        for key, low in least.items():
            value = getattr(self, key)
            if value is not None and value < low:
                off = ", or none" if getattr(Spec, key, None) is None or "every" in key else ""
                raise UserError(f"{key}={value}: it must be at least {low}{off}")
        for window in self.average:
            if not (0 < window < 1 or (1 < window < inf and window == int(window))):
                raise UserError(
                    f"average={_text(self.average)}: give windows of at least 2 steps, or shares "
                    "of the steps between 0 and 1; a window of 1 would be the weights themselves"
                )
        if self.schedule.fall < 0:
            raise UserError(f"schedule.fall={self.schedule.fall:g}: it must be at least 0")

    def check(self) -> None:
        """Raise UserError if the settings cannot make a run. Construction does not check this: the
        spec of an existing run can be read whatever it holds."""
        s = self.schedule
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip={self.clip:g}: it must be above 0, or none")
        for key, value in (("schedule.warmup", s.warmup), ("schedule.decay_steps", s.decay_steps)):
            if value is not None and not value >= 0:
                raise UserError(f"{key}={value:g}: it must be at least 0")
        if not 0 <= s.decay <= 1:
            raise UserError(f"schedule.decay={s.decay:g}: it must be between 0 and 1")
        if s.warmup > self.steps:
            raise UserError(
                f"schedule.warmup={s.warmup}: the run has {self.steps} steps and would end during "
                "its warmup; lower schedule.warmup or raise steps"
            )
        if s.kind == "wsd" and self.decay_steps > self.steps:
            raise UserError(
                f"schedule.decay_steps={s.decay_steps}: the run has {self.steps} steps; lower it"
            )
        self._check_trials()

    def _check_trials(self) -> None:
        """Check the extrapolation and what changes the momentum."""
        part, start, ramp = self.extrapolate, self.optim.momentum_start, self.optim.momentum_ramp
        slow, slow_decay = self.optim.slow_share, self.optim.slow_decay
        bounds = {
            "extrapolate.strength": (part.strength, 0 <= part.strength < 1, "from 0 to below 1"),
            "extrapolate.decay": (part.decay, 0 < part.decay < 1, "between 0 and 1"),
            "extrapolate.start": (
                part.start, 0 <= part.start <= part.end, "from 0 to extrapolate.end",
            ),
            "extrapolate.end": (part.end, part.end <= 1, "at most 1"),
            "optim.momentum_start": (start, start is None or 0 <= start < 1, "from 0 to below 1"),
            "optim.momentum_ramp": (ramp, ramp >= 1, "at least 1"),
            "optim.slow_share": (slow, 0 <= slow < 1, "from 0 to below 1"),
            "optim.slow_decay": (slow_decay, 0 < slow_decay < 1, "between 0 and 1"),
        }  # fmt: skip
        for key, (value, valid, expected) in bounds.items():
            if not valid:
                raise UserError(f"{key}={value:g}: it must be {expected}")
        self._check_forms()
        self._check_soap()
        if start is not None and 2 * ramp > self.steps:
            raise UserError(
                f"optim.momentum_ramp={ramp}: the run has {self.steps} steps, and the momentum "
                "would fall before it has risen; lower it to at most half of the steps"
            )
        self._check_length()
        if part.strength and self.precision == "bf16_weights":
            raise UserError(
                f"extrapolate.strength={part.strength:g} with precision=bf16_weights: moves as "
                "short as that are lost in 16 bits; set precision=bf16"
            )

    def _check_forms(self) -> None:
        """Check the forms of averages."""
        forms = ",".join(self.average_forms)
        if forms not in ("", "sphere", "half", "sphere,half", "half,sphere"):
            raise UserError(f"average_forms={forms}: it must be sphere, half or both")
        if forms and not self.average:
            raise UserError(
                f"average_forms={forms} without averages: set average, for example average=0.1"
            )
        if "sphere" in self.average_forms and self.tensor > 1:
            raise UserError(
                f"average_forms={forms} with tensor={self.tensor}: sphere needs whole rows; set "
                "tensor=1"
            )

    def _check_soap(self) -> None:
        if self.optim.soap and (self.parallel != "ddp" or self.tensor > 1):
            raise UserError(
                f"optim.soap={','.join(self.optim.soap)} with parallel={self.parallel} and "
                f"tensor={self.tensor}: it needs whole matrices; set parallel=ddp and tensor=1"
            )

    def _check_length(self) -> None:
        """Reject settings that depend on the number of steps for a run that others branch off, or
        that may be extended."""
        used = {
            "extrapolate.strength": self.extrapolate.strength > 0,
            "optim.momentum_start": self.optim.momentum_start is not None,
        }
        for key in (key for key, is_used in used.items() if is_used):
            if self.parent or self.full_rate_until == self.steps:
                raise UserError(
                    f"{key}={get(self, key):g} depends on the number of steps, which trunks, their "
                    "branches and runs without a cooldown may change: train a run from its start, "
                    "with a cooldown"
                )

    @property
    def decay_steps(self) -> int:
        """Steps of the cooldown, if the schedule is wsd."""
        given = self.schedule.decay_steps
        return round(self.schedule.decay * self.steps) if given is None else given

    @property
    def full_rate_until(self) -> int:
        """The last step before the learning rate falls; 0 if it falls all the time."""
        last = {"constant": self.steps, "wsd": self.steps - self.decay_steps}
        return last.get(self.schedule.kind, 0)

    @property
    def constant_phase(self) -> range:
        """Steps, counted from 1, between the warmup and the fall of the learning rate."""
        return range(self.schedule.warmup + 1, self.full_rate_until + 1)

    @property
    def pinned(self) -> tuple[int, ...]:
        """Steps whose checkpoints stay; the start of the cooldown is always one of them."""
        start = self.full_rate_until
        has_cooldown = self.schedule.kind == "wsd" and self.parent_step < start < self.steps
        return (*self.pins, start) if has_cooldown and start > 0 else self.pins

    @property
    def averages(self) -> dict[float, str]:
        """Windows of the averages, and the names of their losses in metrics.jsonl."""
        return {window: average_loss(window) for window in self.average}

    @property
    def evaluations(self) -> int:
        """How many models an evaluation evaluates: the weights, and averages in all their forms."""
        return 1 + len(self.average) * (1 + len(self.average_forms))

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.model.sequence

    @property
    def has_kappa(self) -> bool:
        """True if the optimizer has a kappa, and it falls."""
        o = self.optim
        return o.name == "angular_muown" and o.decay_scale > 0 and o.decay_degree > 0

    def kappa(self, step: int) -> float | None:
        """Return kappa at a logged step as it is computed: the optimizer's steps count from 0, the
        log's from 1. None for an optimizer without kappa, unless its learning rate falls alike."""
        o, s = self.optim, self.schedule
        past = max(step - 1 - s.warmup, 0)
        if o.name == "angular_muown":
            return (1.0 + o.decay_scale * past) ** -o.decay_degree
        return 1.0 / (1.0 + s.fall * past) if s.fall else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Spec":
        return from_json(Spec, values)

    # -- identity ------------------------------------------------------------------------------

    def identity(self, data: str) -> dict[str, Any]:
        """Everything that the losses depend on; `data` is the fingerprint of the tokens.

        A cooldown that leaves a trunk has the identity of the straight run: apart from rounding
        it takes the same steps. Only a trunk's identity includes its pins: they are what other
        runs need it for.
        """
        return self._effective().as_stated(data)

    def as_stated(self, data: str) -> dict[str, Any]:
        """The same by the settings as they were given."""
        schedule: dict[str, Any] = {"steps": self.steps, "kind": self.schedule.kind}
        if self.schedule.kind == "wsd":
            schedule["decay_steps"] = self.decay_steps
        elif self.schedule.kind == "constant":
            schedule["pins"] = self.pins
        settings = {key: get(self, key) for key in keys(self) if key not in IRRELEVANT}
        return settings | schedule | {"data": data}

    def _effective(self) -> "Spec":
        """Return the spec with settings that change nothing at their defaults, and with every
        learning rate."""
        o, part = self.optim.with_all_rates(), self.extrapolate
        start = None if o.momentum_start == o.momentum else o.momentum_start
        values = {
            "aux_beta2": None if o.aux_beta2 == o.beta2 else o.aux_beta2,
            "momentum_start": start,
            "momentum_ramp": OptimSpec.momentum_ramp if start is None else o.momentum_ramp,
            "slow_decay": o.slow_decay if o.slow_share else OptimSpec.slow_decay,
        }
        part = part if part.strength else ExtrapolateSpec()
        return replace(self, extrapolate=part, optim=replace(o, **values))

    def folder_name(self, data: str) -> str:
        """Return the name of the run's folder in the store: `<label>-<digest>`.

        The digest leaves out settings at their defaults, so that a setting added later renames no
        existing run.
        """
        usual = Spec().as_stated("")
        content = {
            key: value
            for key, value in self.identity(data).items()
            if key not in usual or value != usual[key] or key in ("steps", "data")
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
        trunk = "-trunk" if self.schedule.kind == "constant" and self.pins else ""
        o = self.optim
        return f"{self.name}-{o.name}-lr{o.lr:g}-seed{self.seed}{trunk}-{digest}"


# How a run is run. No loss depends on these settings, apart from rounding, and `resume` may change
# them. Every run that is resumed may change its dashboard.
DASHBOARD = frozenset({
    "loggers", "dashboard.project", "dashboard.entity", "dashboard.group", "dashboard.tags",
})  # fmt: skip
CHANGEABLE = DASHBOARD | {
    "micro_batch", "eval_every", "save_every", "keep", "pins", "log_every", "angle_every",
    "sample_every", "compile", "deterministic", "parallel", "tensor",
}  # fmt: skip
LENGTH = frozenset({"steps", "pins"})  # of a trunk: it may grow, and keeps its folder
# What the identity leaves out: these, and the schedule, which it states by its effect. A new
# setting counts unless it is added here.
IRRELEVANT = CHANGEABLE | {
    "name", "data", "steps", "parent", "parent_step", "schedule.kind", "schedule.decay",
    "schedule.decay_steps",
}  # fmt: skip


def keys(spec: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of all settings."""
    names: list[str] = []
    for f in fields(spec):
        value = getattr(spec, f.name)
        names += keys(value, f"{prefix}{f.name}.") if is_dataclass(value) else [f"{prefix}{f.name}"]
    return names


def get(spec: Any, key: str) -> Any:
    """Return a setting by its dotted name."""
    for part in key.split("."):
        spec = getattr(spec, part)
    return spec


def _text(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)
