"""AngleMonitor: measure what an optimizer does to the rows of a model.

    monitor = AngleMonitor(model, optimizer, every=50)     # any torch optimizer
    ...
    if values := monitor.read():                           # {} until something was measured
        wandb.log(values)                                  # or writer.add_scalar(k, v, step)

A measured step costs one product Q Q^T per hidden matrix, and a copy of each matrix unless this
package's kernels measure its angles during the step. Other steps cost nothing. Results stay on the
device until `read`.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from angular_muown.distributed.mesh import has_ranks, is_sharded, local, whole
from angular_muown.engine import Engine
from angular_muown.params.layout import Layout
from angular_muown.params.options import ENGINE_DEFAULTS, Values
from angular_muown.params.roles import hidden_matrices
from angular_muown.params.wrappers import bare_parameters
from angular_muown.stages.charts import chord_angle, nonzero, normalize_rows
from angular_muown.stages.reductions import frobenius, row_norm

if TYPE_CHECKING:
    from angular_muown.distributed.mesh import RankGroup

OBSERVED = ("radial_mean", "orthogonality_error")


def row_angles(before: Tensor, after: Tensor) -> Tensor:
    """Return the angles between rows in radians; nan if either row is zero.

    A row that went through zero changed its sign but did not turn, so u and -u count as the same
    direction. The kernels define the angle the same way: `_chord` in kernels/triton/rows.py.
    """
    u, v = normalize_rows(before), normalize_rows(after)
    chord = torch.minimum(row_norm(v - u), row_norm(v + u))
    defined = (row_norm(before) > 0) & (row_norm(after) > 0)
    return torch.where(defined, chord_angle(chord), torch.full_like(chord, torch.nan)).squeeze(-1)


def orthogonality_error(Q: Tensor) -> Tensor:
    """Return |Q Q^T - I|_F / sqrt(k) on the short side k, for each matrix of (..., m, n)."""
    Q = Q.mT if Q.shape[-2] > Q.shape[-1] else Q
    eye = torch.eye(Q.shape[-2], dtype=Q.dtype, device=Q.device)
    return (frobenius(Q @ Q.mT - eye) / Q.shape[-2] ** 0.5).squeeze(-1).squeeze(-1)


class AngleMonitor:
    """Measure how far an optimizer's steps turn the rows of a model.

    Args:
        model: its parameter names label the measurements.
        optimizer: any torch optimizer; it is measured by hooks on its step.
        every: measure every N-th step.

    Overall and per parameter (`key/parameter name`): `angle_mean`, `angle_max` (radians per step),
    `row_norm_mean`, `row_norm_max`; for this package's optimizers also `radial_mean` (mean of
    |<Q_i, U_i>|), `orthogonality_error` and, if the optimizer has one, `kappa`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int = 1) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} is not valid: it must be an integer >= 1")
        self.model, self.optimizer, self.every = model, optimizer, every
        self.steps = 0
        self._layouts: dict[str, Layout] = {}
        self._before: dict[str, list[Tensor]] = {}  # copies of the matrices before the step
        self._shared_before: dict[str, Tensor] = {}  # copies of parameters that ranks share
        self._angles: dict[str, list[Tensor]] = {}  # measured by the step itself
        self._measured: dict[str, dict[str, Tensor]] = {}
        self._observed: dict[str, dict[str, Any]] = {}  # sums over a parameter's matrices
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
        """Return the measurements of the last measured step; {} if there are no new ones."""
        # A step that raised leaves entries without the values that `_finish` adds.
        measured = {name: values for name, values in self._measured.items() if "rows" in values}
        self._measured = {}
        if not measured:
            return {}
        flat = [(name, key, x) for name, values in measured.items() for key, x in values.items()]
        device = flat[0][-1].device
        # a single copy to the host
        on_host = torch.stack([x.double().to(device) for *_, x in flat]).tolist()
        values = {f"{key}/{name}": x for (name, key, _), x in zip(flat, on_host, strict=True)}
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
        """Return name -> (parameter, group values).

        Called for every measured step, because frameworks swap parameters.
        """
        names = self._names()
        if isinstance(self.optimizer, Engine):
            groups = [g for g in self.optimizer.param_groups if g["algorithm"] == "matrix"]
            return {names[p]: (p, g) for g in groups for p in g["params"] if p in names}
        hidden = hidden_matrices(self.model)
        owned = [p for g in self.optimizer.param_groups for p in g["params"] if p in names]
        return {
            names[p]: (p, {**ENGINE_DEFAULTS, **hidden[names[p]]})
            for p in owned
            if names[p] in hidden
        }

    def _names(self) -> dict[Tensor, str]:
        return {p: name for name, p in bare_parameters(self.model)}

    def _start(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.steps % self.every:
            return
        parameters = self._parameters()
        self._measured = {name: {} for name in parameters}
        self._observed = defaultdict(lambda: defaultdict(float))
        self._layouts = {name: Layout.of(group) for name, (_, group) in parameters.items()}
        self._before, self._shared_before, self._angles = {}, {}, defaultdict(list)
        if not isinstance(optimizer, Engine):
            for name, (p, _group) in parameters.items():
                self._before[name] = self._matrices(name, p, copy=True)
        else:
            # The engine calls `_observe` before it writes a matrix, but if ranks share a matrix,
            # only on the rank that computes it.
            for name, (p, _group) in parameters.items():
                if self._rank_groups(p):
                    self._shared_before[name] = p.detach().clone()
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
            self.optimizer.observers = others  # those of other monitors

    def _observe(
        self, parts: Sequence[tuple[Tensor, int]], U: Tensor, Q: Tensor, angles: Tensor | None
    ) -> None:
        names = self._names()
        rows = Q.shape[-2]
        radial = (Q * normalize_rows(U)).sum(dim=-1).abs().sum(dim=-1)
        sums = dict(zip(OBSERVED, (radial, rows * orthogonality_error(Q)), strict=True))
        start = 0
        for parameter, count in parts:
            part = slice(start, start := start + count)
            name = names.get(parameter, "")
            if name not in self._layouts:
                continue
            if angles is not None:
                self._angles[name].append(angles[part].flatten())
            elif name not in self._before and name not in self._shared_before:
                self._before[name] = self._matrices(name, parameter, copy=True)
            totals = self._observed[name]
            totals["rows"] += rows * count
            for key, value in sums.items():
                totals[key] += value[part].sum()

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
            self._record(name, self._row_angles(name, after), norms)

    def _rank_groups(self, p: Tensor) -> "Sequence[RankGroup]":
        """Return the groups of ranks that share p's matrices; () if this rank has all of them."""
        if not isinstance(self.optimizer, Engine) or not has_ranks():
            return ()
        from angular_muown.distributed.session import rank_groups_of

        shared = [] if is_sharded(p) else self.optimizer._all_shared()
        return rank_groups_of(p, shared)

    def _add_observed(self, name: str, p: Tensor) -> None:
        rank_groups, totals = self._rank_groups(p), self._observed.get(name, {})
        if not totals and not (rank_groups and p.grad is not None):
            return
        values = [torch.as_tensor(totals.get(key, 0.0)) for key in ("rows", *OBSERVED)]
        device = local(p).device
        stacked = torch.stack([x.double().to(device) for x in values])
        if rank_groups:
            from angular_muown.distributed.reductions import sum_over

            stacked = sum_over(stacked, rank_groups)
        rows, *sums = stacked.unbind()
        self._measured[name].update(
            {key: x / nonzero(rows) for key, x in zip(OBSERVED, sums, strict=True)}
        )

    def _row_angles(self, name: str, after: list[Tensor]) -> Tensor:
        if name in self._angles:
            return torch.cat(self._angles.pop(name))
        before = self._before.pop(name, after)  # no copy if the parameter was not stepped
        if name in self._shared_before:
            before = self._matrices(name, self._shared_before.pop(name))
        pairs = zip(before, after, strict=True)
        return torch.cat([row_angles(a, b).flatten() for a, b in pairs])

    def _record(self, name: str, angles: Tensor, norms: Tensor) -> None:
        defined = angles.nan_to_num()
        count = nonzero(angles.isfinite().sum())
        self._measured[name] |= {
            "rows": count,
            "angle_mean": defined.sum() / count,
            "angle_max": defined.max(),
            "row_norm_mean": norms.mean(),
            "row_norm_max": norms.max(),
        }


def _weighted_mean(column: list[tuple[float, float]]) -> float:
    return sum(value * rows for value, rows in column) / sum(rows for _, rows in column)
