"""plan(model): sort a model's parameters into param groups, and print them as a table.

A parameter's role comes from the module that owns it and from what the caller declares, never from
its shape. If neither determines the role, an error explains how to declare it.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from angular_muown.params.fused_layouts import Layouts, declare_cuts
from angular_muown.params.layout import Cut
from angular_muown.params.options import check_model, check_value, plain_value
from angular_muown.params.roles import (
    Patterns,
    Role,
    collapse,
    find_roles,
    warn_if_fused,
    warn_if_one_row,
)
from angular_muown.params.wrappers import bare_parameters

Overrides = Mapping[str, Mapping[str, Any]]
# Keys that the table's columns show.
COLUMN_KEYS = ("params", "algorithm", "view", "transposed", "blocks", "interleaved",
               "column_blocks", "lr", "radius_lr")  # fmt: skip
HEAD = ("parameter", "shape", "rule", "cut", "lr", "radius lr", "why")


class Plan(list[dict[str, Any]]):
    """Param groups with (name, parameter) pairs. Printing it shows what happens to each parameter.

    Layers that are alike share a line, such as `layers.*.mlp.weight x32`; `table()` lists every
    parameter.

    Args:
        groups: the groups, each a dict with `params` and its values.
        reasons: parameter name -> why it is in its group.
        state_bytes: parameter name -> bytes of its state, known to an optimizer (`optimizer.plan`).
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        reasons: Mapping[str, str],
        state_bytes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(groups)
        self.reasons = reasons
        self.state_bytes = state_bytes

    def __str__(self) -> str:
        names: dict[tuple[str, ...], list[str]] = {}
        for name, *cells in self._lines():
            names.setdefault((*collapse([name]), *cells), []).append(name)
        lines = [
            (f"{pattern} x{len(alike)}" if len(alike) > 1 else alike[0], *cells)
            for (pattern, *cells), alike in names.items()
        ]
        return _aligned([HEAD, *lines]) + "\n\n" + self.summary()

    __repr__ = __str__

    def table(self) -> str:
        """Return a table with one line for each parameter."""
        return _aligned([HEAD, *self._lines()]) + "\n\n" + self.summary()

    def summary(self) -> str:
        """Return one line for each rule: parameters, elements, learning rate, bytes of state."""
        return "\n".join(self._total(rule) for rule in ("matrix", "adamw"))

    def _total(self, rule: str) -> str:
        groups = [group for group in self if group["algorithm"] == rule]
        named = [pair for group in groups for pair in group["params"]]
        plural = "" if len(named) == 1 else "s"
        elements = sum(p.numel() for _, p in named)
        parts = [f"{len(named)} parameter{plural}", f"{elements:,} elements"]
        rates = dict.fromkeys(_number(group.get("lr")) for group in groups)
        if groups and list(rates) != ["lr"]:
            parts.append(f"lr {', '.join(rates)}")
        if self.state_bytes is not None:
            total = sum(self.state_bytes[name] for name, _ in named)
            each = f" ({total / elements:.2f} bytes per element)" if elements else ""
            parts.append(f"{_size(total)} of state{each}")
        return f"{rule}: {', '.join(parts)}"

    def _lines(self) -> list[tuple[str, ...]]:
        return [self._line(name, p, group) for group in self for name, p in group["params"]]

    def _line(self, name: str, p: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        matrix = group["algorithm"] == "matrix"
        return (
            name,
            " x ".join(map(str, p.shape)) or "scalar",
            group["algorithm"],
            _describe_cut(group) if matrix else "",
            _number(group.get("lr")),
            _number(group.get("radius_lr")) if matrix else "",
            ", ".join([self.reasons[name], *_other_values(group)]),
        )


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def _number(lr: Any) -> str:
    return "lr" if lr is None else f"{float(lr):g}"


def _aligned(table: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in table) for i in range(len(HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def plan(
    model: nn.Module,
    *,
    blocks: Mapping[str, Cut] | None = None,
    interleaved: Mapping[str, int] | None = None,
    column_blocks: Mapping[str, Cut] | None = None,
    stacks: str | Iterable[str] = (),
    transposed: str | Iterable[str] = (),
    matrix: str | Iterable[str] = (),
    adamw: str | Iterable[str] = (),
    head: str | Iterable[str] | None = "auto",
    aux_lr: float | None = None,
    aux_weight_decay: float = 0.0,
    aux_betas: tuple[float, float] | None = None,
    radius_lr: float | None = None,
    overrides: Overrides | None = None,
    layouts: Layouts | None = None,
) -> Plan:
    """Sort every trainable parameter of `model` into param groups.

    Hidden matrices go to the matrix rule; embeddings, heads, norms, biases, routers and parameters
    with fewer than two dimensions go to AdamW. All patterns are globs over parameter names.

    Args:
        model: the model; wrappers (torch.compile, DDP, activation checkpointing) are looked
            through.
        blocks: pattern -> number of equal row blocks, or their sizes (fused q, k, v; heads). 1
            keeps a fused layer whole.
        interleaved: pattern -> number of units, where the rows of the blocks alternate: each unit
            holds its part of every block in turn, such as q, k, v of one head (GPT-NeoX).
        column_blocks: pattern -> blocks of columns (heads of an output projection).
        stacks: patterns of (..., m, n) stacks of matrices, such as experts.
        transposed: patterns of matrices stored as in x out.
        matrix: patterns of parameters to send to the matrix rule, whatever plan would choose.
        adamw: patterns of parameters to send to AdamW, whatever plan would choose.
        head: pattern(s) of the output head. "auto" finds a tied head, one that the model reports
            (get_output_embeddings) or one with a usual name. None means that there is no head.
        aux_lr: learning rate of the AdamW groups; None means the optimizer's lr.
        aux_weight_decay: weight decay of the AdamW groups.
        aux_betas: Adam's two decay rates in the AdamW groups; None means the optimizer's betas,
            which row lengths have in any case.
        radius_lr: learning rate of the matrices' row lengths; None means lr.
        overrides: pattern -> values to set in the group, such as {"*.mlp.*": {"lr": 0.01}}.
        layouts: "ParentClass.attribute" -> cut of a fused layer, in addition to those of the common
            model classes, such as {"MyAttention.wqkv": {"blocks": 3}}; a function of the parent
            module may compute it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} is not an nn.Module: pass the model, not its parameters")
    named = [(name, p) for name, p in bare_parameters(model) if p.requires_grad]
    if not named:
        raise ValueError(f"{type(model).__name__} has no trainable parameters: nothing to plan")
    check_model(model, named)
    patterns = Patterns([name for name, _ in named])
    declared = _declared_roles(patterns, stacks, transposed, matrix, adamw)
    roles = find_roles(model, named, patterns, declared, head, layouts)
    cuts = {
        "blocks": patterns.lookup("blocks", (blocks or {}).items()),
        "interleaved": patterns.lookup("interleaved", (interleaved or {}).items()),
        "column_blocks": patterns.lookup("column_blocks", (column_blocks or {}).items()),
    }
    defaults = {
        "adamw": _adamw_values(aux_lr, aux_weight_decay, aux_betas),
        "matrix": {} if radius_lr is None else {"radius_lr": radius_lr},
    }
    overridden = patterns.lookup("overrides", (overrides or {}).items())
    groups: dict[str, dict[str, Any]] = {}
    for name, p in named:
        role = roles[name]
        name_cuts, name_overrides = _cuts_of(name, role, cuts), overridden.get(name, {})
        structure = declare_cuts(role.values, name_cuts)
        conflicts = {"algorithm", *structure}.intersection(name_overrides)
        if conflicts:
            raise ValueError(
                f"overrides sets {', '.join(sorted(conflicts))} of '{name}', which is already set: "
                "use matrix=, adamw=, stacks=, transposed=, blocks=, interleaved= or "
                "column_blocks= instead"
            )
        values = {**structure, **defaults[role.algorithm], **name_overrides}
        values["algorithm"] = role.algorithm
        group = groups.setdefault(repr(sorted(values.items())), {"params": [], **values})
        group["params"].append((name, p))
    described = [name for name, role in roles.items() if "blocks" in role.values]
    warn_if_fused(groups.values(), {*cuts["blocks"], *described})
    warn_if_one_row(groups.values(), declared)
    return Plan(groups.values(), {name: role.reason for name, role in roles.items()})


# What `for_model` passes to plan.
PLAN_ARGUMENTS = tuple(inspect.signature(plan).parameters)[1:]


def _adamw_values(
    lr: float | None, weight_decay: float, betas: tuple[float, float] | None
) -> dict[str, Any]:
    """Return what the AdamW groups set themselves."""
    values: dict[str, Any] = {"weight_decay": weight_decay}
    if lr is not None:
        values["lr"] = lr
    if betas is not None:
        betas = plain_value(betas)
        check_value("aux_betas", betas, "betas")
        values["betas"] = tuple(betas)
    return values


def _declared_roles(
    patterns: Patterns,
    stacks: str | Iterable[str],
    transposed: str | Iterable[str],
    matrix: str | Iterable[str],
    adamw: str | Iterable[str],
) -> dict[str, Role]:
    """Return the roles that the caller declares; only one declaration may match a parameter."""
    matrix, adamw, stacks, transposed = map(_as_list, (matrix, adamw, stacks, transposed))
    roles = patterns.lookup(
        "matrix, adamw, stacks",
        [
            *((pattern, Role("matrix", "declared")) for pattern in matrix),
            *((pattern, Role("adamw", "declared")) for pattern in adamw),
            *((pattern, Role("matrix", "stack", {"view": "stack"})) for pattern in stacks),
        ],
    )
    for name in patterns.lookup("transposed", [(pattern, True) for pattern in transposed]):
        role = roles.get(name, Role("matrix", "declared transposed"))
        if role.algorithm == "adamw":
            raise ValueError(
                f"'{name}' is in adamw= and in transposed=: AdamW ignores the orientation, so "
                "remove it from one of them"
            )
        roles[name] = Role(role.algorithm, role.reason, {**role.values, "transposed": True})
    return roles


def _as_list(patterns: str | Iterable[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _cuts_of(name: str, role: Role, cuts: Mapping[str, Mapping[str, Cut]]) -> dict[str, Cut]:
    """Return the cuts of one parameter, by group key."""
    name_cuts = {key: by_name[name] for key, by_name in cuts.items() if name in by_name}
    if name_cuts and role.algorithm != "matrix":
        raise ValueError(
            f"{name_cuts} would cut '{name}', but it goes to AdamW ({role.reason}): declare it "
            f"with matrix=['{name}'], or drop it from the cuts"
        )
    return name_cuts


def _other_values(group: Mapping[str, Any]) -> list[str]:
    """Return what a group sets beyond the table's columns, except AdamW's usual zero decay."""
    usual = {"weight_decay": 0.0} if group["algorithm"] == "adamw" else {}
    others = ((key, value) for key, value in group.items() if key not in COLUMN_KEYS)
    return [f"{key}={value}" for key, value in others if usual.get(key) != value]


def _describe_cut(group: Mapping[str, Any]) -> str:
    parts = [group["view"]] if "view" in group else []
    parts += ["transposed"] if group.get("transposed") else []
    for key, word in (("blocks", "rows"), ("column_blocks", "columns")):
        if group.get(key) is not None:
            cut = group[key]
            parts.append(f"{cut} x {word}" if isinstance(cut, int) else f"{word} {list(cut)}")
    if group.get("interleaved"):
        parts.append(f"interleaved x{group['interleaved']}")
    return ", ".join(parts) or "whole"
