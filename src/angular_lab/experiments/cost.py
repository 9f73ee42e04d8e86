"""What the experiments cost: runs, tokens, operations, hours on this machine."""

import torch

from angular_lab.config.spec import ModelSpec
from angular_lab.experiments.comparison import EXPERIMENTS, experiment
from angular_lab.experiments.definition import SCALES, Experiment
from angular_lab.models import build_model
from angular_lab.report.tables import Mark, Row, text_table
from angular_lab.show import duration, rate_here


def flops_per_token(model: ModelSpec) -> float:
    with torch.device("meta"):
        return build_model(model).flops_per_token()


def tokens_per_run(plan: Experiment, tokens_per_step: int, decay: float) -> float:
    """The trunk once, and every cool-down."""
    if len(plan.horizons) == 1:
        return plan.horizons[0] * tokens_per_step
    last = plan.horizons[-1]
    steps = (1 - decay) * last + sum(decay * h for h in plan.horizons) + plan.longer * last
    return steps * tokens_per_step


def cost(plan: Experiment) -> tuple[int, float, float]:
    """Runs, tokens and operations of a whole experiment, seeds included, grids not extended."""
    runs, tokens, operations = 0, 0.0, 0.0
    known: dict[ModelSpec, float] = {}
    for line in plan.lines:
        spec = line.spec
        count = len(line.values) + len(plan.seeds) - 1
        each = tokens_per_run(plan, spec.tokens_per_step, spec.schedule.decay)
        if spec.model not in known:
            known[spec.model] = flops_per_token(spec.model)
        runs += count
        tokens += count * each
        operations += count * each * known[spec.model]
    return runs, tokens, operations


def listing(only: str = "") -> str:
    """Of all scales, or of one."""
    rate, source = rate_here()
    rows: list[Row] = []
    for name in EXPERIMENTS:
        for scale in (only,) if only else SCALES:
            plan = experiment(name, scale)
            runs, tokens, operations = cost(plan)
            row: Row = {"experiment": name, "scale": scale, "runs": runs}
            row["tokens"] = Mark(tokens, text=f"{tokens:.2e}")
            row["FLOP"] = Mark(operations, text=f"{operations:.2e}")
            row["time here"] = duration(operations / rate)
            rows.append(row | {"title": plan.title})
    return f"{text_table(rows)}\ntime on this machine at {rate / 1e12:.3g} TFLOP/s ({source})"
