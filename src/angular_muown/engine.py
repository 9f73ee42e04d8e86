"""The base class of the family: its only step(), and the contract with torch.optim.

Numbers live in the param groups as plain values; choices live in `recipe(group)`. Nothing else that
a step depends on is kept on the object, except the process group: torch drops attributes on
deepcopy and pickle, and caches may be dropped at any time.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # imports dynamo at the first call, not with us

from angular_muown import adamw, average, cuda_graph
from angular_muown.distributed.collectives import failing_together, watch
from angular_muown.distributed.mesh import has_ranks, is_sharded
from angular_muown.kernels.coverage import runs_on
from angular_muown.params import options
from angular_muown.params.layout import Layout
from angular_muown.params.loading import load_checked
from angular_muown.params.options import (
    ENGINE_DEFAULTS,
    Group,
    equal_groups,
    learning_rates,
    normalize_group,
    plain_values,
)
from angular_muown.params.plan import PLAN_ARGUMENTS, Plan, plan
from angular_muown.params.stacks import OpenParameter, stacks
from angular_muown.params.state import (
    ensure_states,
    has_state,
    is_state_probe,
    momentum_of,
    state_bytes,
    states_of,
    store_as_asked,
    vector_names,
)
from angular_muown.stages.context import State
from angular_muown.update import Observer, Recipe, update_alone
from angular_muown.warn import warn

if TYPE_CHECKING:  # slow to import: imported where needed
    from angular_muown.distributed.assignment import ExchangePlan
    from angular_muown.distributed.exchange import SharedParameter
    from angular_muown.distributed.session import Exchanges, ExchangeSession
    from angular_muown.kernels.fused import FusedGroups


@dataclass
class Batch:
    """Groups that differ only in their parameters: one step moves all of them."""

    indices: list[int]
    group: Group  # the first of them, whose values the step uses
    recipe: Recipe | None  # None: AdamW
    shared: "list[SharedParameter]"  # stepped together with other ranks
    params: list[Tensor] = field(default_factory=list)  # with a gradient, stepped by this rank
    states: list[State] = field(default_factory=list)


@dataclass
class Tasks:
    """Everything that a step will do."""

    batches: list[Batch]
    exchanges: "Exchanges"  # the parameters that ranks share
    counts: list[bool]  # for each group, True if its clock counts this step


def without_autocast(groups: Sequence[Group]) -> ExitStack:
    """Disable autocast, which would multiply in 16 bits, for the duration of a step."""
    kinds = {p.device.type for group in groups for p in group["params"][:1]} | {"cpu"}
    stack = ExitStack()
    for kind in kinds:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


class Engine(torch.optim.Optimizer):
    """Base class of the family. A member consists of defaults and `recipe(group)`:

        class Turning(Engine):
            def __init__(self, params, lr=0.02, **options):
                super().__init__(params, {"lr": lr, **options})

            def recipe(self, group):
                return Recipe(Oblique(), polar_express, fan_ratio)

    Args:
        params: parameters, or groups of them, such as `plan(model)`.
        defaults: values for what a group leaves out. `lr` is required; options that the base class
            does not know are allowed, for the member's own `recipe`.
    """

    family: str = ""  # names the member in state dicts; subclasses of a member inherit it
    observers: tuple[Observer, ...] = ()  # set on an instance by AngleMonitor, never saved
    _fused: "FusedGroups | None" = None  # made at the first step on a GPU
    _asked: list[Any] | None = None  # the groups' state_dtype when momenta were last converted
    _session: "ExchangeSession | None" = None  # made at the first step that ranks share
    _checked: frozenset[Any] | set[Any] = frozenset()  # settings that the last step validated
    _reasons: Mapping[str, str] = {}  # parameter name -> why plan() put it in its group
    _betas: tuple[float, float] = ENGINE_DEFAULTS["betas"]
    process_group: Any = None
    param_groups: list[Group]  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        if "lr" not in defaults:
            raise TypeError(f"{type(self).__name__} has no default lr: add it to its defaults")
        defaults = {**ENGINE_DEFAULTS, **plain_values(defaults)}
        self.process_group = options.check_process_group(defaults.pop("process_group", None))
        # Not among torch's defaults: OneCycleLR and CyclicLR would cycle betas[0] instead of
        # momentum.
        self._betas = defaults.pop("betas")
        for key in options.ADAMW_KEYS:  # absent unless set, so that old checkpoints fit
            if defaults.get(key) is None:
                defaults.pop(key, None)
        options.check_not_model(params, type(self).__name__)
        if isinstance(params, Plan):
            self._reasons = dict(params.reasons)
        super().__init__(params, defaults)

    @classmethod
    def for_model(
        cls, model: torch.nn.Module, lr: float | Tensor | None = None, **options: Any
    ) -> Self:
        """Sort the parameters of a model with `plan` and construct the optimizer.

        Args:
            model: hidden matrices go to the matrix rule, everything else to AdamW.
            lr: learning rate; None is the member's default.
            options: arguments of `plan` and of the optimizer's constructor.
        """
        for_plan = {key: options.pop(key) for key in PLAN_ARGUMENTS if key in options}
        if lr is not None:
            options["lr"] = lr
        member: Any = cls  # a member's own arguments are not known here
        optimizer = member(plan(model, **for_plan), **options)
        optimizer._check_learning_rate()
        return optimizer

    @property
    def plan(self) -> Plan:
        """What happens to each parameter, and the bytes of its state: `print(optimizer.plan)`."""
        groups, sizes = [], {}
        for i, group in enumerate(self.param_groups):
            recipe = self.recipe(group) if group["algorithm"] == "matrix" else None
            named = list(zip(options.parameter_names(group, i), group["params"], strict=True))
            sizes |= {name: state_bytes(p, group, recipe) for name, p in named}
            settings = options.changed_settings(group, self.group_defaults())
            groups.append({**settings, "params": named})
        reasons = {name: self._reasons.get(name, "given") for name in sizes}
        return Plan(groups, reasons, sizes)

    def __repr__(self) -> str:
        """Show the settings that differ from the member's defaults, and what they apply to."""
        arguments = inspect.signature(type(self)).parameters.items()
        usual = {**ENGINE_DEFAULTS, **{name: argument.default for name, argument in arguments}}
        settings = options.changed_settings(self.group_defaults(), {**usual, "lr": None})
        values = ", ".join(f"{key}={x!r}" for key, x in settings.items() if key != "algorithm")
        return f"{type(self).__name__}({values})\n{self.plan.summary()}"

    def group_defaults(self) -> dict[str, Any]:
        """Return the values of a group that sets nothing itself."""
        return {**self.defaults, "betas": self._betas}

    def recipe(self, group: Group) -> Recipe:
        """Return what this member does with the matrices of a group at its current step.

        Args:
            group: a dict of `param_groups`.
        """
        raise TypeError(
            f"{type(self).__name__} has no recipe: define it, or use a member of the family"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; an error leaves the optimizer as it was.

        Args:
            param_group: a dict with `params` and values that replace the defaults.
        """
        defaults = self.group_defaults()
        options.check_keys(param_group, defaults, type(self).__name__)
        param_group = normalize_group(param_group, defaults, type(self))
        param_group["params"] = options.parameter_list(param_group["params"])
        options.warn_if_unsorted(param_group, type(self).__name__)
        param_group.setdefault("betas", self._betas)
        group = {**defaults, **param_group}
        options.check_values(group)
        param_group.setdefault("base_lr", float(group["lr"]))
        super().add_param_group(param_group)
        self.release()
        try:
            self._check_parameters(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise
        cuda_graph.to_device(self.param_groups[-1])

    def _check_parameters(self, index: int) -> None:
        group = self.param_groups[index]
        if not group["params"]:
            raise ValueError(f"group {index} has no parameters: leave it out")
        options.check_foreach(group)
        for p, name in zip(group["params"], options.parameter_names(group, index), strict=True):
            options.check_parameter(p, name, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of all groups; parameters without a gradient keep their values.

        Args:
            closure: computes the loss and its gradients, called first; its result is returned.
        """
        average.check_outside(self.param_groups, "step()")
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        with without_autocast(self.param_groups):
            self._advance()
        return loss

    @_disable_dynamo
    def _advance(self) -> None:
        """Check everything that can be checked, move the weights, and advance the clocks last.

        An error that a check finds leaves everything as it was.
        """
        with failing_together() if has_ranks() else nullcontext():
            tasks = self._collect()
            if tasks is None:
                return
            counters: list[Tensor] = []
            for batch in tasks.batches:
                if not batch.params:
                    continue
                if batch.recipe is None:
                    adamw.update(batch.params, batch.states, batch.group)
                else:
                    rest = self._update_fused(batch, batch.recipe)
                    counters += self._update_stacks(rest, batch, batch.recipe)
            counters += self._update_shared(tasks)
            self._advance_clocks(counters, tasks.counts)
        self._check_schedule()

    def state_dict(self) -> dict[str, Any]:
        """Return state and the groups' values, as every torch optimizer does."""
        self._store_as_asked()
        return super().state_dict()

    def _store_as_asked(self) -> None:
        """Convert all momenta after a group's state_dtype has changed, also of parameters that have
        no gradient: a state dict must not mix dtypes that its groups do not name."""
        asked = [group["state_dtype"] for group in self.param_groups]
        if asked == self._asked:
            return
        replaced = store_as_asked(self.param_groups, self.state)
        if self._fused is not None:
            self._fused.retained += replaced  # the user's graphs may use them
        self._asked = asked

    def _collect(self) -> Tasks | None:
        """Check all groups, make missing state and find what to do; None for a state probe."""
        groups = self.param_groups
        self._store_as_asked()
        if cuda_graph.is_recording():
            cuda_graph.check(groups, self.state)
        if self._session is not None:
            watch(self._session.ranks)
        sets = equal_groups(groups)
        self._check_settings(sets)
        batches = [self._batch(indices) for _, indices in sets]
        shared = sorted((one for b in batches for one in b.shared), key=lambda one: one.index)
        if shared:
            shardings = {id(one.sharding): one.sharding for one in shared}
            everyone = dict.fromkeys(sharding.everyone for sharding in shardings.values())
            self._exchange.ranks = [rank_group.ranks for rank_group in everyone]
            watch(self._exchange.ranks)
        active = [options.with_gradient(group, i) for i, group in enumerate(groups)]
        is_probe = not self.state and is_state_probe(groups, active)
        for batch in batches:
            self._open(batch, [p for i in batch.indices for p in active[i]])
        if is_probe:
            return None
        if not any(active) and not any(float(group["step"]) for group in groups):
            warn(
                "no parameter of this optimizer has a gradient: if the model was sharded, wrapped "
                "or given adapters after the optimizer was constructed, construct it again; "
                "otherwise call backward() before step()"
            )
        counts = self._groups_that_count(active, shared)
        exchanges = []
        if shared:
            exchanges = self._exchange.check(shared, groups, observed=bool(self.observers))
        return Tasks(batches, exchanges, counts)

    def _check_settings(self, sets: list[tuple[Any, list[int]]]) -> None:
        """Check the groups' values, which users and schedulers may have changed.

        Clocks and learning rates are checked at every step, the rest only after a change.
        """
        for i, group in enumerate(self.param_groups):
            options.check_clock(group, i)
        for settings, indices in sets:
            if settings not in self._checked:
                for i in indices:
                    options.check_group(self.param_groups[i], i)
        self._checked = {settings for settings, _ in sets}

    def _batch(self, indices: list[int]) -> Batch:
        group = self.param_groups[indices[0]]
        recipe = self.recipe(group) if group["algorithm"] == "matrix" else None
        shared = [one for i in indices for one in self._shared(i, recipe)] if recipe else []
        return Batch(indices, group, recipe, shared)

    def _shared(self, index: int, recipe: Recipe) -> "list[SharedParameter]":
        """Return the group's parameters whose step is shared with other ranks."""
        if not has_ranks():
            return []
        return self._exchange.shared(self.param_groups[index], index, recipe, self.process_group)

    @property
    def _exchange(self) -> "ExchangeSession":
        if self._session is None:
            from angular_muown.distributed.session import ExchangeSession

            self._session = ExchangeSession()
        return self._session

    def _open(self, batch: Batch, params: list[Tensor]) -> None:
        """Make missing state, and select what this rank steps by itself."""
        with_state = params
        if has_ranks():
            shared = {id(one.parameter) for one in batch.shared}
            owned = [p for i in batch.indices for p in self.param_groups[i]["params"]]
            rest = [p for p in owned if id(p) not in shared] if len(shared) < len(owned) else []
            params = [p for p in rest if p.grad is not None]
            with_state = [one.parameter for one in batch.shared]
            with_state += [p for p in rest if has_state(p)]
        states = ensure_states(self.state, with_state, batch.group, batch.recipe)
        self._check_fit(batch, with_state, states)
        batch.params, batch.states = params, states_of(states, with_state, params)
        for one, state in zip(batch.shared, states, strict=False):
            one.state = state

    def _check_fit(self, batch: Batch, params: list[Tensor], states: list[State]) -> None:
        """Check that state and parameters fit, unless these DTensors and their state are known to.

        A plain parameter may have been resized since; a DTensor's shape does not change.
        """
        groups = {i: self.param_groups[i] for i in batch.indices}
        if not batch.shared or not all(map(is_sharded, params)):
            options.check_fit(groups, params, states)
            return
        tensors = [*params, *(t for state in states for t in state.values())]
        known = self._exchange.fitting
        # By id, to keep no tensor that the caller frees. A new tensor with the id of an old one
        # would be noticed by the exchange, which checks shapes where tensors have moved.
        if known.get(batch.indices[0]) != (ids := list(map(id, tensors))):
            options.check_fit(groups, params, states)
            known[batch.indices[0]] = ids

    def _groups_that_count(
        self, active: list[list[Tensor]], shared: "Sequence[SharedParameter]"
    ) -> list[bool]:
        """For each group, True if any rank has a gradient in it.

        Ranks that share a parameter's step have gradients for the same parameters. Ranks that have
        experts of their own may not: some may have received no tokens.
        """
        own = [bool(params) for params in active]
        # A recorded step requires a gradient for every parameter.
        if not has_ranks() or cuda_graph.is_recording():
            return own
        matrices = (g["params"] for g in self.param_groups if g["algorithm"] == "matrix")
        elsewhere = {id(one.parameter) for one in shared}
        others = [p for params in matrices for p in params if id(p) not in elsewhere]
        experts = [p for p in others if is_sharded(p)]
        if not experts:
            return own
        from angular_muown.distributed.reductions import any_rank

        meshes = dict.fromkeys(p.device_mesh for p in experts)
        watch(tuple(mesh.mesh.flatten().tolist()) for mesh in meshes)
        return any_rank(own, experts)

    def _update_fused(self, batch: Batch, recipe: Recipe) -> list[Tensor]:
        """Step what the kernels cover, and return the rest."""
        if not runs_on(batch.params[0].device):
            return batch.params
        if self._fused is None:
            from angular_muown.kernels.fused import FusedGroups  # imports Triton

            self._fused = FusedGroups.of(self.param_groups)
        both = learning_rates(batch.group, torch.float32)
        return self._fused.advance(
            batch.indices[0], batch.params, batch.states, batch.group, recipe, both, self.observers
        )

    def _update_stacks(self, params: list[Tensor], batch: Batch, recipe: Recipe) -> list[Tensor]:
        """Step parameters eagerly; return their counters."""
        if not params:
            return []
        layout = Layout.of(batch.group)
        states = states_of(batch.states, batch.params, params)
        opened = [OpenParameter(p, s, layout) for p, s in zip(params, states, strict=True)]
        for stack in stacks(opened, vector_names(recipe, batch.group), batch.group):
            update_alone(stack, recipe, batch.group, self.observers)
        for one in opened:
            one.close()
        return [one.state["step"] for one in opened]

    def _update_shared(self, tasks: Tasks) -> list[Tensor]:
        """Step parameters together with other ranks; return their counters."""
        shared = [one for _, members in tasks.exchanges for one in members]
        if not shared:
            return []
        if cuda_graph.is_recording():
            raise RuntimeError("a step that exchanges matrices between ranks cannot be recorded")
        counters = self._exchange.update(tasks.exchanges, self.observers)
        for one in shared:
            one.close()
        return counters

    def _advance_clocks(self, counters: list[Tensor], counts: list[bool]) -> None:
        """Advance Adam's counters, the groups' steps and the averages, once, after all updates."""
        if counters:
            torch._foreach_add_(counters, 1)
        for group, counted in zip(self.param_groups, counts, strict=True):
            group["step"] += counted
        if any(counts):
            average.update(self.param_groups, self.state)

    def _check_learning_rate(self) -> None:
        """Warn if lr does not suit the member; called for a whole model, by `for_model`."""

    def _check_schedule(self) -> None:
        """Warn if a schedule does not suit the member; called after every step."""

    def momentum(self, p: Tensor) -> Tensor:
        """Return a copy of the momentum M of a matrix, in float32 (float64 for float64 weights).

        Use this rather than `state[p]["momentum_buffer"]`, which holds integers with
        `state_dtype="int8"`. The copy has the shape of p. If p is sharded, so is the copy, and
        nothing is communicated.

        Args:
            p: a parameter of this optimizer that has taken a step.
        """
        return momentum_of(p, self.param_groups, self.state)

    def averaged(self, model: torch.nn.Module | None = None) -> AbstractContextManager[None]:
        """Replace the parameters by their averages inside a `with` block; restore them exactly.

        Args:
            model: needed if parameters are sharded across ranks.
        """
        return average.in_place_of_weights(self.param_groups, self.state, model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and the groups' values, as every torch optimizer does.

        A warning shows both values if that changes the method or kappa. State of another member,
        algorithm or cut is refused, and so is state with missing or damaged entries; the optimizer
        is then unchanged. The optimizer keeps its own `state_dtype`: momenta that were saved with
        another one are converted, with a warning that says what is rounded. AdamW's moments take
        the dtype of the weights. A momentum that a schedule was moving is the usual one again,
        unless this optimizer has such a schedule.

        Args:
            state_dict: what `state_dict()` returned.
        """
        average.check_outside(self.param_groups, "load_state_dict()")
        load_checked(self, super().load_state_dict, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return what torch saves, and the values that it does not know."""
        options.check_copy(self.process_group)
        own = {key: getattr(self, key) for key in ("process_group", "_betas", "_reasons")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Fill in defaults for values that an older group does not have.

        torch adds a key of its own, `differentiable`; it is removed, because distributed
        checkpoints need the keys to stay the same.
        """
        super().__setstate__(state)
        self._betas = self.defaults.pop("betas", self._betas)  # where version 0.1 had them
        self.defaults.pop("differentiable", None)
        for group in cast("list[dict[str, Any]]", self.param_groups):
            group.pop("differentiable", None)
            for key, value in self.group_defaults().items():
                group.setdefault(key, value)

    def exchange_plan(self) -> "ExchangePlan":
        """Return which rank orthogonalizes what in a step that ranks share, and the bytes moved.

        Call it on all ranks: it sends nothing, but torch may have to create a process group for a
        part of a larger mesh.
        """
        from angular_muown.distributed.session import plan_of

        return plan_of(self._all_shared())

    def _all_shared(self) -> "list[SharedParameter]":
        groups = [(i, g) for i, g in enumerate(self.param_groups) if g["algorithm"] == "matrix"]
        return [one for i, g in groups for one in self._shared(i, self.recipe(g))]

    def release(self) -> None:
        """Free work buffers, recorded launches and plans; the next step creates new ones."""
        self._fused = self._session = None
