"""The tables of the reference that the code itself knows.

A page has a line `<!-- generate: name -->`; the site has the table of this name in its place.
"""

import argparse
import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import griffe
import torch

from angular_lab.cli.main import _parser
from angular_lab.config.named_runs import NAMED_RUNS
from angular_lab.config.overrides import as_typed
from angular_lab.config.spec import Spec
from angular_lab.experiments.comparison import EXPERIMENTS, experiment
from angular_lab.experiments.cost import cost, flops_per_token
from angular_muown import AngularMuown, NorMuon
from angular_muown.params.fused_layouts import FUSED_LAYOUTS
from angular_muown.params.options import COMMON_DEFAULTS, ENGINE_DEFAULTS, RULES
from site_hooks.links import ROOT

MARK = re.compile(r"^<!-- generate: ([\w-]+) -->$", re.MULTILINE)
# Group keys that say what a parameter means, or that the engine writes: the page explains them.
STRUCTURE = ("algorithm", "view", "transposed", "blocks", "interleaved", "column_blocks")
COUNTERS = ("step", "averaged", "base_lr")
# The kept measurement that gives a scale's speed on an H200: file and optimizer.
SPEEDS = {"paper": "throughput_124m_h200.json", "s": "throughput_optimizers_h200.json"}


def filled(markdown: str) -> str:
    """Return a page with its marks replaced by what they name."""
    return MARK.sub(lambda mark: TABLES[mark[1]](), markdown)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    head = list(head)
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


# -- command line --------------------------------------------------------------------------------


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of angular-lab's commands."""
    actions = _parser()._actions
    (choices,) = (a.choices for a in actions if isinstance(a, argparse._SubParsersAction))
    return dict(choices)


def _cli() -> str:
    return "\n\n".join(_command(name, parser) for name, parser in commands().items())


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    usage = parser.format_usage().removeprefix("usage: ").strip().replace("\n       ", "\n")
    options = [action for action in parser._actions if action.dest not in ("help", "traceback")]
    parts = [f"## {name}", parser.description or "", f"```text\n{usage}\n```"]
    if options:
        parts.append(_table(["argument", "meaning"], map(_option, options)))
    return "\n\n".join(parts)


def _option(action: argparse.Action) -> tuple[str, str]:
    spelled = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    if action.option_strings and action.nargs != 0:
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else metavar
        spelled += f" {choices}"
    return f"`{spelled}`", (action.help or "").replace("%%", "%").replace("%(default)s", "")


# -- runs and experiments ------------------------------------------------------------------------


def _run_spec() -> str:
    parts = [("", Spec())]
    parts += [(f.name, getattr(Spec(), f.name)) for f in fields(Spec) if _is_part(f.name)]
    return "\n\n".join(_settings(prefix, part) for prefix, part in parts)


def _is_part(name: str) -> bool:
    return is_dataclass(getattr(Spec(), name))


def _settings(prefix: str, part: Any) -> str:
    """Return the table of one dataclass: key, type, default, and the comment on its field."""
    source = inspect.getsource(type(part))
    comments = dict(re.findall(r"^    (\w+): [^#\n]*# (.+)$", source, re.MULTILINE))
    rows = [
        (
            f"`{prefix}{'.' if prefix else ''}{f.name}`",
            f"`{_type(f.type)}`",
            f"`{as_typed(getattr(part, f.name)) or 'empty'}`",
            comments.get(f.name, ""),
        )
        for f in fields(part)
        if not is_dataclass(getattr(part, f.name))
    ]
    title = f"## {prefix}\n\n" if prefix else "## The run\n\n"
    return title + _table(["key", "type", "default", "meaning"], rows)


def _type(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _named_runs() -> str:
    rows = []
    for name, make in NAMED_RUNS.items():
        spec = make()
        model, tokens = spec.model, spec.steps * spec.tokens_per_step
        shape = f"{model.kind}, {model.layers} layers, width {model.width}"
        batch = f"{spec.batch} × {model.sequence:,}"
        rows.append((f"`{name}`", shape, batch, f"{spec.steps:,}", _count(tokens)))
    return _table(["named run", "model", "batch × sequence", "steps", "tokens"], rows)


def _count(x: float) -> str:
    unit, letter = next((u, c) for u, c in ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")) if x >= u)
    return f"{x / unit:.3g}{letter}"


def speed(scale: str) -> float:
    """Return the FLOP/s that a training run of this scale reached on an H200, as kept."""
    results = json.loads((ROOT / "results" / SPEEDS[scale]).read_text())["results"]
    (row,) = (row for row in results if row["optimizer"] == "angular_muown")
    return row["tokens_per_second"] * flops_per_token(NAMED_RUNS[row["recipe"]]().model)


def _experiments(scale: str) -> str:
    rate = speed(scale)
    rows = []
    for name in EXPERIMENTS:
        plan = experiment(name, scale)
        trials, tokens, operations = cost(plan)
        hours = operations / rate / 3600
        cells = (f"`{name}`", plan.title, str(trials), _count(tokens), f"{hours:.2g}")
        rows.append(cells if hours < 100 else (*cells[:-1], f"{hours:.0f}"))
    return _table(["experiment", "question", "trials", "tokens", "H200-hours"], rows)


# -- groups --------------------------------------------------------------------------------------


def described(docstring: str | None) -> dict[str, str]:
    """Return the arguments that a Google-style docstring describes."""
    sections = griffe.Docstring(docstring or "").parse("google", warnings=False)
    return {
        argument.name: " ".join(argument.description.split())
        for section in sections
        if isinstance(section, griffe.DocstringSectionParameters)
        for argument in section.value
    }


def _group_keys() -> str:
    weight = torch.nn.Parameter(torch.eye(2))
    members = (AngularMuown([weight]), NorMuon([weight]))
    defaults: dict[str, Any] = {**COMMON_DEFAULTS}
    for member in reversed(members):
        defaults |= member.defaults
    meaning = described(NorMuon.__doc__) | described(AngularMuown.__doc__)
    rows = [
        (
            f"`{key}`",
            expected,
            f"`{defaults[key]!r}`" if key in defaults else "",
            meaning.get(key, "").replace("<", "&lt;"),
        )
        for key, (_, expected) in RULES.items()
        if key not in (*STRUCTURE, *COUNTERS)
    ]
    return _table(["key", "must be", "default", "meaning"], rows)


def _structure_rules() -> str:
    rows = [
        (f"`{key}`", RULES[key][1], f"`{ENGINE_DEFAULTS.get(key)!r}`")
        for key in STRUCTURE
        if key in RULES
    ]
    return _table(["key", "must be", "default"], rows)


def _fused_layouts() -> str:
    rows = []
    for key, entry in FUSED_LAYOUTS.items():
        if callable(entry):
            cut = (inspect.getdoc(entry) or "computed from the module").partition("\n")[0]
        else:
            cut = ", ".join(f"`{name}={value!r}`" for name, value in entry.items())
        rows.append((f"`{key}`", cut))
    return _table(["class and attribute", "cut"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "cli": _cli,
    "experiments-paper": lambda: _experiments("paper"),
    "experiments-s": lambda: _experiments("s"),
    "fused-layouts": _fused_layouts,
    "group-keys": _group_keys,
    "group-structure": _structure_rules,
    "named-runs": _named_runs,
    "run-spec": _run_spec,
}
