"""What ranks that share a step do and move, as a table: a line for each part of a copy, in the
order of the ranks that hold them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from angular_muown.assignment import Assignment

SHOWN = 16  # ranks that get a line of their own
UNITS = ("B", "KB", "MB", "GB", "TB")


@dataclass(frozen=True)
class ExchangePlan:
    """One assignment for each set of ranks that share work; most models have one."""

    assignments: Sequence[Assignment]

    def __str__(self) -> str:
        if not self.assignments:
            return "nothing is exchanged: this rank steps its parameters alone"
        return "\n\n".join(map(_table, self.assignments))


def _table(plan: Assignment) -> str:
    ranks = plan.places * plan.copies
    shape = f"{plan.copies} copies of {plan.places} parts" if plan.copies > 1 else "1 copy"
    lines = [
        f"{len(plan.jobs)} matrices over {ranks} ranks ({shape}), {len(plan.rounds)} rounds; "
        f"imbalance {plan.imbalance:.3f}"
    ]
    if plan.summed:
        moved = sum(plan.jobs[i].sum_bytes for i in plan.summed) / plan.places
        lines.append(f"{len(plan.summed)} stay and add up Gram matrices, {_size(moved)} a rank")
    owned = torch.zeros(ranks)
    for owner in plan.owners.values():
        owned[owner] += 1
    sent, received = plan.traffic
    columns = (owned, plan.loads / plan.loads.mean().clamp(min=1), sent, received, plan.peaks)
    lines.append(f"{'part':>6} {'owns':>6} {'work':>6} {'sends':>9} {'receives':>9} {'buffers':>9}")
    if ranks <= SHOWN:
        names = [f"{i // plan.places}.{i % plan.places}" for i in range(ranks)]
        names = names if plan.copies > 1 else [str(i) for i in range(ranks)]
        lines += [_line(name, [c[i] for c in columns]) for i, name in enumerate(names)]
    else:
        measures = (("least", Tensor.min), ("mean", Tensor.mean), ("most", Tensor.max))
        lines += [_line(name, [of(column) for column in columns]) for name, of in measures]
    if plan.dominant:
        lines.append(dominance(*plan.dominant))
    return "\n".join(lines)


def _line(name: str, values: Sequence[Tensor]) -> str:
    owns, work, *sizes = map(float, values)
    return f"{name:>6} {owns:>6.4g} {work:>6.2f} " + " ".join(f"{_size(x):>9}" for x in sizes)


def _size(count: float) -> str:
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} {UNITS[-1]}"


def dominance(name: str, share: float) -> str:
    return (
        f"a single matrix, {name}, is {share:.2f} times a rank's mean share: "
        "more ranks do not make the step shorter"
    )
