"""A run as a frozen dataclass: the only home of defaults.

A variant is `dataclasses.replace`; the command line sets `key=value` with dotted keys
(`overrides.py`). Everything here is plain: numbers, strings, booleans.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class ModelSpec:
    kind: str = "dense"  # dense, qwen2, moe, gpt_speedrun
    vocabulary: int = 50_280  # GPT-NeoX's 50,277 entries, rounded up
    sequence: int = 1024
    layers: int = 12
    width: int = 768
    heads: int = 12
    kv_heads: int = 0  # 0: as many as heads
    mlp: int = 0  # inner width; 0: 8/3 of the width, rounded up to 256
    tied: bool = True
    norm_eps: float = 1e-6
    rope_base: float = 10_000.0
    init_std: float = 0.02
    soft_cap: float = 0.0  # of the logits; 0: none
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp: int = 0
    shared_mlp: int = 0
    dense_layers: int = 0  # leading layers of a mixture without experts
    balance_rate: float = 1e-3  # how fast the router's bias moves towards equal load


@dataclass(frozen=True)
class OptimSpec:
    name: str = "angular_muown"  # adamw or one of build.OPTIMIZERS
    lr: float = 0.02
    aux_lr: float = 0.0  # embeddings, heads, norms; 0: as lr
    radius_lr: float = 0.0  # row lengths; 0: as lr
    weight_decay: float = 0.0
    aux_weight_decay: float = 0.0
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    decay_scale: float = 1e-3  # kappa = (1 + decay_scale (t - warmup))^(-decay_degree)
    decay_degree: float = 1.0
    scale: str = ""  # "": the optimizer's own
    orthogonalize: str = "polar_express"  # for every optimizer, as in the paper
    radius: str = "adam"
    split_blocks: bool = True  # fused matrices as their blocks
    tangent_steps: int = 1  # dual steps of orthogonalize=tangent
    row_beta: float = 0.0  # NorMuon's; 0: the optimizer's own
    # Options that the library had once: specs of runs with them are still read.
    tangent_momentum: bool = False
    exact_angle: bool = False
    column_gains: bool = False

    def spelled_out(self) -> "OptimSpec":
        """With rates that are "as lr" by their numbers."""
        return replace(self, aux_lr=self.aux_lr or self.lr, radius_lr=self.radius_lr or self.lr)


@dataclass(frozen=True)
class ScheduleSpec:
    kind: str = "wsd"  # wsd, cosine, constant
    warmup: int = 100
    decay: float = 0.1  # share of the steps in the linear cool-down (wsd)
    decay_steps: int = 0  # the same as a number of steps; 0: by share
    fall: float = 0.0  # c of a further (1 + c (t - warmup))^(-1) on the matrices' rate alone


@dataclass(frozen=True)
class DashboardSpec:
    """Where W&B and trackio show a run. No loss depends on it, and a resumed run may change it."""

    project: str = "angular-lab"
    entity: str = ""  # wandb; "": your default
    group: str = ""
    tags: str = ""  # wandb; comma-separated


def _window(text: str) -> float:
    """Steps as a whole number, which they have in names, else a share."""
    return int(text) if text.strip().isdecimal() else float(text)


def _is_window(text: str) -> bool:
    """As the library's `averaging` takes them; it would bring torch along."""
    try:
        window = _window(text)
    except ValueError:
        return False
    return window > 1 if isinstance(window, int) else 0 < window < 1


@dataclass(frozen=True)
class Spec:
    recipe: str = "custom"
    data: str = "stdlib"  # a folder of shards, or "stdlib": the running Python's own source text
    steps: int = 1000
    batch: int = 512  # sequences per step over all ranks
    micro_batch: int = 0  # sequences per forward pass and rank; 0: all at once
    seed: int = 0
    clip: float = 1.0  # global gradient norm; 0: none
    eval_every: int = 250
    eval_tokens: int = 1_048_576
    save_every: int = 500
    keep: int = 2  # newest checkpoints that stay
    pins: str = ""  # comma-separated steps whose checkpoints always stay: branch points
    log_every: int = 10
    angle_every: int = 50  # 0: never
    # comma-separated windows, in steps or below 1 as shares of them: evaluate averages as well
    average: str = ""
    on_nan: str = "stop"  # stop, skip
    precision: str = "bf16"  # bf16 (autocast), fp32
    compile: bool = True
    deterministic: bool = True  # bit-equal repeats on one machine
    parallel: str = "ddp"  # with several ranks: ddp, fsdp
    tensor: int = 1  # with several: so many divide the products of a layer (dense models)
    loggers: str = ""  # comma-separated: tensorboard, wandb, trackio
    parent: str = ""  # set by `branch`: the run and step that this one continues
    parent_step: int = 0
    model: ModelSpec = field(default_factory=ModelSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    dashboard: DashboardSpec = field(default_factory=DashboardSpec)

    def __post_init__(self) -> None:
        choices = {
            "on_nan": ("stop", "skip"),
            "precision": ("bf16", "fp32"),
            "parallel": ("ddp", "fsdp"),
        }
        for key, valid in choices.items():
            if getattr(self, key) not in valid:
                raise ValueError(f"{key}={getattr(self, key)}: it must be {' or '.join(valid)}")
        least = {"steps": 1, "batch": 1, "micro_batch": 0, "keep": 1, "seed": 0, "log_every": 0,
                 "eval_every": 0, "save_every": 0, "angle_every": 0, "eval_tokens": 1,
                 "tensor": 1}  # fmt: skip
        for key, low in least.items():
            if getattr(self, key) < low:
                raise ValueError(f"{key}={getattr(self, key)}: it must be at least {low}")
        if not all(part.strip().isdigit() for part in self.pins.split(",") if part):
            raise ValueError(f"pins={self.pins}: write steps, separated by commas")
        if not all(_is_window(part) for part in self.average.split(",") if part):
            raise ValueError(
                f"average={self.average}: write windows of at least 2 steps, or shares of the "
                "steps between 0 and 1, separated by commas; a window of 1 would be the weights "
                "themselves"
            )
        if self.schedule.kind not in ("wsd", "cosine", "constant"):
            raise ValueError(
                f"schedule.kind={self.schedule.kind}: it must be wsd, cosine or constant"
            )
        if self.schedule.fall < 0:
            raise ValueError(f"schedule.fall={self.schedule.fall:g}: it must be at least 0")

    def check(self) -> None:
        """Raise ValueError if the settings cannot make a run. Not part of the construction: the
        spec of a run that exists is read whatever it holds."""
        s = self.schedule
        for key, value in (
            ("clip", self.clip),
            ("schedule.warmup", s.warmup),
            ("schedule.decay_steps", s.decay_steps),
        ):
            if not value >= 0:
                raise ValueError(f"{key}={value:g}: it must be at least 0")
        if not 0 <= s.decay <= 1:
            raise ValueError(f"schedule.decay={s.decay:g}: it must be between 0 and 1")
        if s.warmup > self.steps:
            raise ValueError(
                f"schedule.warmup={s.warmup}: the run has {self.steps} steps and would end before "
                "its warm-up; lower schedule.warmup or raise steps"
            )
        if s.kind == "wsd" and s.decay_steps > self.steps:
            raise ValueError(
                f"schedule.decay_steps={s.decay_steps}: the run has {self.steps} steps; lower it"
            )

    @property
    def pinned(self) -> tuple[int, ...]:
        """Steps whose checkpoints stay; the start of the cool-down is always one of them."""
        listed = tuple(int(step) for step in self.pins.split(",") if step)
        cooling = self.schedule.kind == "wsd" and 0 < self.decay_steps < self.steps
        start = self.steps - self.decay_steps
        return (*listed, start) if cooling and start > self.parent_step else listed

    @property
    def averages(self) -> dict[float, str]:
        """Windows of the averages, and what their losses are called in metrics.jsonl."""
        windows = [_window(part) for part in self.average.split(",") if part]
        return {window: f"val_loss_averaged_{window}" for window in windows}

    @property
    def decay_steps(self) -> int:
        return self.schedule.decay_steps or round(self.schedule.decay * self.steps)

    @property
    def constant_phase(self) -> range:
        """Return the steps at the full learning rate: after the warmup and before it falls.

        Empty for a cosine schedule, whose learning rate falls all the time.
        """
        if self.schedule.kind == "cosine":
            return range(0)
        cooldown = self.decay_steps if self.schedule.kind == "wsd" else 0
        return range(self.schedule.warmup + 1, self.steps - cooldown + 1)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.model.sequence

    def shown_like(self, other: "Spec") -> "Spec":
        """Return this spec with the loggers and the dashboard of another."""
        return replace(self, loggers=other.loggers, dashboard=other.dashboard)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Spec":
        plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
        return Spec(
            **plain,
            model=ModelSpec(**values["model"]),
            optim=OptimSpec(**values["optim"]),
            schedule=ScheduleSpec(**values["schedule"]),
            dashboard=DashboardSpec(**values.get("dashboard", {})),
        )
