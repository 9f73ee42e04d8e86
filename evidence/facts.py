"""All facts by name, and all tables that documents show."""

import json
from collections.abc import Iterable
from math import floor
from typing import Any

from evidence import (
    ablations,
    comparison,
    concurrent,
    finetune,
    headline,
    memory,
    noise,
    one_pass,
    ranks,
    repeated,
    speed,
    storage,
    tiny_model,
    trials,
    verdicts,
    whole_corpus,
)
from evidence.kept import RESULTS, Kept, Rows, read_json
from evidence.measures import Facts, spread
from evidence.titles import titled

FILE = RESULTS / "facts.json"
HEADER = "The numbers that README.md, docs/ and results/README.md quote. `make evidence` writes it."
SUBJECTS = (
    comparison,
    ablations,
    concurrent,
    one_pass,
    whole_corpus,
    noise,
    repeated,
    finetune,
    tiny_model,
    storage,
    trials,
)


def compute(kept: Kept) -> Facts:
    """Return every fact under its dotted name."""
    nested: Facts = speed.facts() | ranks.facts() | {"theory": _theory()}
    for subject in SUBJECTS:
        nested |= subject.facts(kept)
    facts = flatten(nested)
    in_tokens = facts["tuned_adamw.speed_up.mean"]
    facts["tuned_adamw.speed_up.wall_clock"] = in_tokens * speed.time_ratio("adamw")
    return facts


def _theory() -> Facts:
    """How far the measured norms are below the theorem's bound."""
    data = read_json("theory/guarantee")
    cells, rank_cells = data["cells"], data["rank_cells"]
    least = min(cell["bound"] / cell["dual_mean"] for cell in cells + rank_cells)
    return {
        "factor": spread(cell["bound"] / cell["mean"] for cell in cells),
        "rank_factor": spread(cell["bound"] / cell["mean"] for cell in rank_cells),
        "dual_factor": floor(100 * least) / 100,
    }


def flatten(nested: Any, name: str = "") -> Facts:
    if not isinstance(nested, dict):
        return {name: nested}
    flat: Facts = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{name}.{key}" if name else str(key))
    return flat


def read() -> Facts:
    facts: Facts = json.loads(FILE.read_text())["facts"]
    return facts


def write(facts: Facts, names: Iterable[str]) -> None:
    """Write the facts of these names."""
    content = {"about": HEADER, "facts": {name: facts[name] for name in sorted(names)}}
    FILE.write_text(json.dumps(content, indent=1) + "\n")


def _of_the_report(kept: Kept) -> dict[str, Rows]:
    return {
        name: table if name.startswith("theory/") else titled(table)
        for name, table in kept.tables.items()
    }


def tables(kept: Kept) -> dict[str, Rows]:
    """Return the report's tables and those that are made here, by name."""
    once, main = one_pass.OnePass(kept), headline.Headline(kept)
    whole = whole_corpus.WholeCorpus(kept)
    return (
        _of_the_report(kept)
        | verdicts.tables(kept)
        | {
            "whole-corpus": whole.table(),
            "goals": whole.goals(),
            "whole-corpus-pairs": whole.pairs_table(),
            "advice": whole_corpus.advice(kept),
            "grids": whole_corpus.grids(kept),
            "trials": trials.table(kept),
            "short-runs": tiny_model.short_runs_table(kept),
            "results": main.table(),
            "schedules-and-kappa": once.schedules_and_kappa(),
            "state-bytes": memory.table(),
            "side-by-side": speed.side_by_side(),
            "one-pass-validation": titled(once.table()),
            "provenance": repeated.provenance(kept),
            "step-times": speed.step_times(),
            "step-memory": speed.step_memory(),
            "throughput": speed.throughput(),
            "pace": titled(speed.pace_table()),
            "momentum": storage.momentum_table(),
            "registers": storage.registers_table(),
            "instructions": storage.instructions_table(),
            "train-memory": storage.train_memory_table(),
            "throughput-of-optimizers": titled(speed.throughput_of_optimizers()),
            "orthogonalize": speed.orthogonalize(),
            "spectra": speed.spectra(),
            "strong-scaling": ranks.strong_scaling(),
            "weak-scaling": ranks.weak_scaling(),
            "placements": ranks.placements(),
            "finetune": finetune.table("own"),
            "finetune-adamw-base": finetune.table("adamw"),
        }
    )
