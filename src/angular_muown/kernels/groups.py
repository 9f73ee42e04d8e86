"""An optimizer's fused steps, one per group, and the work buffer that they share."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from angular_muown.capture import is_recording
from angular_muown.kernels.chunks import Choices
from angular_muown.kernels.dispatch import covers, is_plain, knows
from angular_muown.kernels.numbers import write_numbers
from angular_muown.kernels.step import SPARES, FusedStep, Observers
from angular_muown.kernels.tables import Where, dtypes_of
from angular_muown.layout import Layout
from angular_muown.recipe import Recipe


class FusedGroups:
    """Holds nothing that a step needs to be right: dropped at any time, it is made again."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # bytes
        self.steps: dict[int, tuple[Any, FusedStep | None, list[Tensor]]] = {}
        self.work: dict[torch.device, Tensor] = {}
        self.kept: list[FusedStep | Tensor] = []  # what graphs of the user read

    @staticmethod
    def of(groups: Sequence[dict[str, Any]]) -> "FusedGroups":
        """With the work buffer that the groups' `workspace` allows."""
        matrices = [group for group in groups if group["algorithm"] == "matrix"]
        sizes = [
            g["workspace"] * p.numel() * p.element_size() for g in matrices for p in g["params"]
        ]
        return FusedGroups(int(sum(sizes)))

    def advance(
        self,
        index: int,
        params: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        group: dict[str, Any],
        recipe: Recipe,
        rates: tuple[float | Tensor, float | Tensor],
        observers: Observers = (),
    ) -> list[Tensor]:
        """Step what the kernels cover; what they do not is returned."""
        if not knows(recipe):
            return list(params)
        step, places, rest = self._prepared(index, params, states, group, recipe)
        if step is not None and places is not None:
            if is_recording() and not step.spares:
                raise RuntimeError(
                    f"{SPARES} graphs were recorded since the last step: take one in between"
                )
            device = torch.cuda.device(step.device) if step.device.type == "cuda" else nullcontext()
            with device:
                step.refresh(places)
                write_numbers(step, group, recipe, *rates, step.count())
                self._lend(step)
                step.run(observers)
        return rest

    def _lend(self, step: FusedStep) -> None:
        """One buffer for all steps on a device; it grows with the first step of each of them."""
        if step.chunks:
            return
        work, users = self.work.get(step.device), [step]
        if work is None or work.numel() < step.workspace:
            others = [other for _, other, _ in self.steps.values() if other is not None]
            users += [o for o in others if o.device == step.device and o is not step and o.chunks]
            if work is not None and any(user.recorded for user in users):
                self.kept.append(work)
            work = torch.empty(step.workspace, dtype=torch.float16, device=step.device)
            self.work[step.device] = work
        for user in users:
            user.use(work)

    def _prepared(
        self,
        index: int,
        params: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        group: dict[str, Any],
        recipe: Recipe,
    ) -> tuple[FusedStep | None, Where | None, list[Tensor]]:
        layout, choices = Layout.of(group), Choices.of(recipe, group)
        key = (choices, layout, [id(p) for p in params])
        known, step, rest = self.steps.get(index, (None, None, []))
        places = step.look() if step is not None and key == known else None
        if key == known and (step is None or self._still_fits(step, places)):
            return step, places, rest
        if is_recording():
            raise RuntimeError(
                "parameters, gradients, state or settings have changed since the last step (or "
                "there was none): take a step before recording one"
            )
        if step is not None and step.recorded:
            self.kept.append(step)
        pairs = [(p, s) for p, s in zip(params, states, strict=True) if covers(p, s, layout)]
        own = [(p, s) for p, s in pairs if p.device == pairs[0][0].device]
        step = None
        if own:
            covered, kept = zip(*own, strict=True)
            capturable = group["capturable"]
            step = FusedStep(covered, kept, layout, choices, self.budget, capturable)
            places = step.look()
        taken = {id(p) for p, _ in own}
        rest = [p for p in params if id(p) not in taken]
        self.steps[index] = (key, step, rest)
        return step, places, rest

    @staticmethod
    def _still_fits(step: FusedStep, places: Where | None) -> bool:
        """Gradients may come at new places; weights and state that moved are looked at anew."""
        if places is None or step.seen is None or places.own != step.seen.own:
            return False
        if places == step.seen:
            return True
        known = zip(step.params, step.states, step.dtypes, strict=True)
        return all(
            p.grad is not None and is_plain(p.grad, p.device) and dtypes_of(p, s) == kind
            for p, s, kind in known
        )
