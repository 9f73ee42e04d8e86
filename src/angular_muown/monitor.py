"""AngleMonitor: what an optimizer does to the rows of a model, as numbers.

    monitor = AngleMonitor(model, optimizer, every=50)     # any torch optimizer
    ...
    if values := monitor.read():                           # {} until something was measured
        wandb.log(values)                                  # or writer.add_scalar(k, v, step)

A measured step costs one product Q Q^T for each hidden matrix, and a copy of those whose angles
the step does not measure itself: this package's kernels do. The other steps cost nothing. Numbers
stay on the device until `read`.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from angular_muown.distributed.mesh import has_ranks, local, whole
from angular_muown.engine import Engine
from angular_muown.params.layout import Layout
from angular_muown.params.options import ENGINE_DEFAULTS, Values
from angular_muown.params.roles import hidden_matrices
from angular_muown.stages.charts import chord_angle, nonzero, normalize_rows
from angular_muown.stages.reductions import frobenius, row_norm

if TYPE_CHECKING:
    from angular_muown.distributed.mesh import RankGroup

OBSERVED = ("radial_mean", "orthogonality_error")


def row_angles(before: Tensor, after: Tensor) -> Tensor:
    """Radians between rows; nan where one of them is zero.

    A row that went through zero changed its sign but did not turn, so u and -u count as the same
    direction. Kernels that write W say the same of its rows: `_chord` in kernels/triton/rows.py.
    """
    u, v = normalize_rows(before), normalize_rows(after)
    chord = torch.minimum(row_norm(v - u), row_norm(v + u))
    defined = (row_norm(before) > 0) & (row_norm(after) > 0)
    return torch.where(defined, chord_angle(chord), torch.full_like(chord, torch.nan)).squeeze(-1)


def orthogonality_error(Q: Tensor) -> Tensor:
    """|Q Q^T - I|_F / sqrt(k) on the short side, for each matrix of (..., m, n)."""
    Q = Q.mT if Q.shape[-2] > Q.shape[-1] else Q
    eye = torch.eye(Q.shape[-2], dtype=Q.dtype, device=Q.device)
    return (frobenius(Q @ Q.mT - eye) / Q.shape[-2] ** 0.5).squeeze(-1).squeeze(-1)


class AngleMonitor:
    """Measure how far an optimizer's steps turn the rows of a model.

    Args:
        model: its parameters' names label the measurements.
        optimizer: any torch optimizer; hooks on its step do the measuring.
        every: measure one step in this many.

    Overall and per parameter (`key/parameter name`): `angle_mean`, `angle_max` (radians per step),
    `row_norm_mean`, `row_norm_max`; for this package's optimizers also `radial_mean` (mean of
    |<Q_i, U_i>|), `orthogonality_error` and, where there is one, `kappa`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int = 1) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} is not valid: it must be an integer >= 1")
        self.model, self.optimizer, self.every = model, optimizer, every
        self.steps = 0
        self._layouts: dict[str, Layout] = {}
        self._before: dict[str, list[Tensor]] = {}  # copies
        self._parts: dict[str, Tensor] = {}  # the same of parameters that lie over ranks
        self._angles: dict[str, list[Tensor]] = {}  # that the step measured itself
        self._measured: dict[str, dict[str, Tensor]] = {}
        self._observed: dict[str, dict[str, Any]] = {}  # sums over a parameter's pieces
        self._kappa: float | None = None
        self._hooks = [
            optimizer.register_step_pre_hook(self._start),
            optimizer.register_step_post_hook(self._finish),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        self._stop_observing()
        for hook in self._hooks:
            hook.remove()

    def read(self) -> dict[str, float]:
        """Return the measurements of the last measured step; {} if there is no new one."""
        # A step that raised leaves entries without the numbers of its end.
        measured = {name: n for name, n in self._measured.items() if "rows" in n}
        self._measured = {}
        if not measured:
            return {}
        flat = [(name, key, n) for name, numbers in measured.items() for key, n in numbers.items()]
        device = flat[0][-1].device  # one copy to the host, not one for each number
        host = torch.stack([number.double().to(device) for *_, number in flat]).tolist()
        values = {f"{key}/{name}": x for (name, key, _), x in zip(flat, host, strict=True)}
        columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for name, key, _ in flat:
            columns[key].append((values[f"{key}/{name}"], values[f"rows/{name}"]))
        del columns["rows"]
        for key, column in columns.items():
            values[key] = max(column)[0] if key.endswith("_max") else _weighted_mean(column)
        if self._kappa is not None:
            values["kappa"] = float(self._kappa)
        return {key: value for key, value in values.items() if not key.startswith("rows/")}

    def _parameters(self) -> dict[str, tuple[Tensor, Values]]:
        """name -> parameter and group values, looked up anew: frameworks swap parameters."""
        named: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        if isinstance(self.optimizer, Engine):
            groups = [g for g in self.optimizer.param_groups if g["algorithm"] == "matrix"]
            return {named[p]: (p, g) for g in groups for p in g["params"] if p in named}
        hidden = hidden_matrices(self.model)
        owned = [p for g in self.optimizer.param_groups for p in g["params"] if p in named]
        return {
            named[p]: (p, {**ENGINE_DEFAULTS, **hidden[named[p]]})
            for p in owned
            if named[p] in hidden
        }

    def _start(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.steps % self.every:
            return
        parameters = self._parameters()
        self._measured = {name: {} for name in parameters}
        self._observed = defaultdict(lambda: defaultdict(float))
        self._layouts = {name: Layout.of(group) for name, (_, group) in parameters.items()}
        self._before, self._parts, self._angles = {}, {}, defaultdict(list)
        if not isinstance(optimizer, Engine):
            for name, (p, _group) in parameters.items():
                self._before[name] = self._matrices(name, p, copy=True)
        else:  # what it steps is shown to us in time, but of a matrix over ranks to its owner only
            for name, (p, _group) in parameters.items():
                if self._teams(p):
                    self._parts[name] = p.detach().clone()
            self._stop_observing()
            optimizer.observers = (*optimizer.observers, self._observe)
            groups = [group for _, group in parameters.values()]
            kappa = getattr(optimizer, "kappa", None)
            self._kappa = kappa(groups[0]) if kappa is not None and groups else None

    def _matrices(self, name: str, p: Tensor, copy: bool = False) -> list[Tensor]:
        dtype = torch.promote_types(p.dtype, torch.float32)
        return [X.detach().to(dtype, copy=copy) for X in self._layouts[name].cut(whole(p))]

    def _stop_observing(self) -> None:
        if isinstance(self.optimizer, Engine):
            others = tuple(o for o in self.optimizer.observers if o != self._observe)
            self.optimizer.observers = others

    def _observe(
        self, parts: Sequence[tuple[Tensor, int]], U: Tensor, Q: Tensor, angles: Tensor | None
    ) -> None:
        named: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        rows = Q.shape[-2]
        radial = (Q * normalize_rows(U)).sum(dim=-1).abs().sum(dim=-1)
        sums = dict(zip(OBSERVED, (radial, rows * orthogonality_error(Q)), strict=True))
        start = 0
        for parameter, count in parts:
            part = slice(start, start := start + count)
            name = named.get(parameter, "")
            if name not in self._layouts:
                continue
            if angles is not None:
                self._angles[name].append(angles[part].flatten())
            elif name not in self._before and name not in self._parts:  # before it is written
                self._before[name] = self._matrices(name, parameter, copy=True)
            seen = self._observed[name]
            seen["rows"] += rows * count
            for key, value in sums.items():
                seen[key] += value[part].sum()

    def _finish(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        measuring = self.steps % self.every == 0
        self.steps += 1
        if not measuring:
            return
        self._stop_observing()
        for name, (p, _group) in self._parameters().items():
            self._add_observed(name, p)
            after = self._matrices(name, p)
            norms = torch.cat([row_norm(X).flatten() for X in after])
            self._record(name, self._turned(name, after), norms)

    def _teams(self, p: Tensor) -> "Sequence[RankGroup]":
        """Ranks that see other matrices of p than we do."""
        if not isinstance(self.optimizer, Engine) or not has_ranks():
            return ()
        from angular_muown.distributed.session import rank_groups_of

        return rank_groups_of(p, self.optimizer.process_group)

    def _add_observed(self, name: str, p: Tensor) -> None:
        rank_groups, seen = self._teams(p), self._observed.get(name, {})
        if not seen and not (rank_groups and p.grad is not None):
            return
        sums = [torch.as_tensor(seen.get(key, 0.0)) for key in ("rows", *OBSERVED)]
        device = local(p).device
        together = torch.stack([x.double().to(device) for x in sums])
        if rank_groups:
            from angular_muown.distributed.reductions import sum_over

            together = sum_over(together, rank_groups)
        count, *found = together.unbind()
        self._measured[name].update(
            {key: x / nonzero(count) for key, x in zip(OBSERVED, found, strict=True)}
        )

    def _turned(self, name: str, after: list[Tensor]) -> Tensor:
        if name in self._angles:
            return torch.cat(self._angles.pop(name))
        before = self._before.pop(name, after)  # of what was not stepped there is no copy
        if name in self._parts:
            before = self._matrices(name, self._parts.pop(name))
        pairs = zip(before, after, strict=True)
        return torch.cat([row_angles(a, b).flatten() for a, b in pairs])

    def _record(self, name: str, angles: Tensor, norms: Tensor) -> None:
        turned = angles.nan_to_num()
        count = nonzero(angles.isfinite().sum())
        self._measured[name] |= {
            "rows": count,
            "angle_mean": turned.sum() / count,
            "angle_max": turned.max(),
            "row_norm_mean": norms.mean(),
            "row_norm_max": norms.max(),
        }


def _weighted_mean(column: list[tuple[float, float]]) -> float:
    return sum(value * rows for value, rows in column) / sum(rows for _, rows in column)
