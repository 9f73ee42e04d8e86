"""Megatron-LM: AngularMuown for megatron-core's tensor-parallel weights.

    # megatron-core >= 0.19, which has a registry
    register(aux_lr=2e-3, warmup_steps=200)
    values = {"lr": 0.02, "weight_decay": 0.0, "adam_beta2": 0.95}  # Megatron has other defaults
    config = OptimizerConfig(optimizer="angular_muown", **values)
    optimizer = get_megatron_optimizer(config, [model])

    # before it
    optimizer = get_angular_muown_optimizer(OptimizerConfig(**values), [model], aux_lr=2e-3)

Hidden matrices go to AngularMuown; embeddings, output, norms, biases and routers to Megatron's own
Adam. Importing this module does not import Megatron; calling these two functions does.
"""

from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from angular_muown.integrations.megatron.checkpoint import save_row_vectors
from angular_muown.integrations.megatron.marks import frozen, is_matrix, mark
from angular_muown.integrations.megatron.views import Group, Shown, parts_of
from angular_muown.optimizers import AngularMuown
from angular_muown.params.options import Group as ParamGroup
from angular_muown.params.state import init_state

NAME = "angular_muown"
NO_AVERAGE = (
    "Megatron's models have copies of the weights that are stepped here, and averaged() would not "
    "reach those; leave it at"
)


class MegatronAngularMuown(AngularMuown):
    """AngularMuown on a rank's part of Megatron's weights, with whole matrices for the time of a
    step: q, k and v of all query groups apart, gate and up apart, columns and rows of all ranks.

    Args:
        qkv_split_shapes: rows of q, k and v (q, gate, k, v) in one query group.
        pg_collection: Megatron's process groups; `tp` and `expt_tp` are used. None: one rank.
        settings: AngularMuown's.
    """

    qkv_split_shapes: list[int] | None = None
    pg_collection: Any = None
    # ranks of a pipeline have other parameters: who shares is Megatron's to say, by DTensors
    process_group: Any = False

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        *,
        qkv_split_shapes: list[int] | None = None,
        pg_collection: Any = None,
        **settings: Any,
    ) -> None:
        self.qkv_split_shapes, self.pg_collection = qkv_split_shapes, pg_collection
        settings.setdefault("process_group", self.process_group)
        super().__init__(params, lr, **settings)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, to which torch gives groups and state only."""
        if self.pg_collection is not None:
            raise TypeError(
                "an optimizer with process groups cannot be copied: make a new one and load this "
                "one's state_dict"
            )
        return {**super().__getstate__(), "qkv_split_shapes": self.qkv_split_shapes}

    def _check_parameters(self, index: int) -> None:
        """A rank of a pipeline may hold no parameter of a group that others have."""
        if self.param_groups[index]["average"] is not None:
            raise ValueError(f"average={self.param_groups[index]['average']!r}: {NO_AVERAGE} None")
        if self.param_groups[index]["params"]:
            super()._check_parameters(index)

    def _advance(self) -> None:
        if self.observers:
            raise RuntimeError("AngleMonitor cannot name the matrices of Megatron's weights yet")
        own = [group["params"] for group in self.param_groups]
        shown = [[self._show(p, group) for p in group["params"]] for group in self.param_groups]
        try:
            for group, views in zip(self.param_groups, shown, strict=True):
                group["params"] = [matrix for view in views for matrix in view.matrices]
                self.state.update({m: s for v in views for m, s in v.states.items()})
            super()._advance()
        finally:
            for group, params in zip(self.param_groups, own, strict=True):
                group["params"] = params
            for view in (view for views in shown for view in views if view.apart):
                for matrix in view.matrices:
                    self.state.pop(matrix, None)
        for view in (view for views in shown for view in views):
            view.put_back()

    def _show(self, p: Tensor, group: ParamGroup) -> Shown:
        if p.ndim != 2:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is no matrix: Megatron's distributed "
                "optimizer hands out flat parts; use use_distributed_optimizer=False, with "
                "LayerWiseDistributedOptimizer if state has to be spread over ranks"
            )
        sizes = parts_of(p, self.qkv_split_shapes)
        ranks = Group.of(p, self.pg_collection)
        if sizes is None and ranks is None:
            return Shown(p, {})  # as it is
        recipe = self.recipe(group)
        init_state(p, self.state[p], group, recipe)
        init = partial(init_state, group=group, recipe=recipe)
        return Shown.apart_from(p, self.state[p], sizes, ranks, init)


def init_all(optimizer: MegatronAngularMuown, config: Any = None) -> None:
    """Fresh state before a checkpoint is loaded into it."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            init_state(p, optimizer.state[p], group, optimizer.recipe(group))


def register(name: str = NAME, *, aux_lr: float | None = None, **settings: Any) -> None:
    """An entry in the registry that megatron-core has from 0.19 on: `optimizer=name` in its config
    then means AngularMuown with these settings. `aux_lr` is Adam's learning rate; None: the same.

    Megatron asks for the package emerging-optimizers before it looks at the registry.
    """
    try:
        registry = import_module("megatron.core.optimizer.emerging_optimizers")
    except ModuleNotFoundError:
        raise ImportError(
            "this megatron-core has no registry of optimizers, which came with 0.19: use "
            "get_angular_muown_optimizer in the place of get_megatron_optimizer"
        ) from None
    registry._EMERGING_OPTIMIZERS[name] = registry.EmergingOptimizerEntry(
        optimizer_cls=MegatronAngularMuown,
        init_state_fn=init_all,
        config_to_kwargs=partial(arguments_from, settings),
        default_param_overrides=for_the_rest(aux_lr, optimizer="adam"),
    )
    save_row_vectors()


def for_the_rest(aux_lr: float | None, **values: Any) -> dict[Any, dict[str, Any]]:
    """Megatron's overrides for what is no hidden matrix. Its scheduler moves a group's lr from
    max_lr on; without a scheduler the group's lr counts."""
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    rest = ParamWithNamePredicate(name="no_matrix", fn=lambda p, name: not is_matrix(p, name))
    rate = {} if aux_lr is None else {"lr": aux_lr, "max_lr": aux_lr}
    return {ParamKey(with_name_predicate=rest): {**rate, **values}}


def arguments_from(
    settings: dict[str, Any], config: Any, model_chunks: list[Any], pg_collection: Any
) -> dict[str, Any]:
    """MegatronAngularMuown's, from Megatron's configs; settings win."""
    model = model_chunks[0].config
    query = model.num_attention_heads // model.num_query_groups * model.kv_channels
    gate = [query] if getattr(model, "attention_output_gate", False) else []
    return {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "qkv_split_shapes": [query, *gate, model.kv_channels, model.kv_channels],
        "pg_collection": pg_collection,
        **settings,
    }


def get_angular_muown_optimizer(
    config: Any,
    model_chunks: list[Any],
    config_overrides: dict[Any, Any] | None = None,
    *,
    aux_lr: float | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    **settings: Any,
) -> Any:
    """Megatron's `get_megatron_optimizer` for a megatron-core without the registry (0.16 on).

    Args:
        config: an OptimizerConfig; its lr, weight_decay, betas and eps are AngularMuown's too.
        aux_lr: Adam's learning rate, for what is no hidden matrix; None: the same.
        settings: AngularMuown's, such as warmup_steps.
        others: as Megatron's function has them.
    """
    from megatron.core import optimizer as mcore
    from megatron.core.process_groups_config import ProcessGroupCollection

    if config.use_distributed_optimizer or config.fp16:
        raise ValueError(
            f"use_distributed_optimizer={config.use_distributed_optimizer}, fp16={config.fp16}: "
            "AngularMuown needs whole matrices in bf16 or float32; set both to False"
        )
    if config.optimizer != "adam":
        raise ValueError(f"optimizer={config.optimizer!r}: it is for the rest; set it to 'adam'")
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    mark(model_chunks)
    named = [item for chunk in model_chunks for item in chunk.named_parameters()]
    matrices = {p for name, p in named if is_matrix(p, name)}
    make = partial(MegatronAngularMuown, **arguments_from(settings, config, model_chunks, groups))
    with frozen(p for _, p in named if p not in matrices):
        found = mcore._get_param_groups(model_chunks, config, config_overrides)
    experts = [group for group in found if group["is_expert_parallel"]]
    dense = [group for group in found if not group["is_expert_parallel"]]
    wrapped = [_wrap(make(part), config) for part in (dense, experts) if part]
    if experts:
        wrapped[-1].grad_stats_parallel_group = groups.tp_ep_pp
    if config_overrides is None:
        config_overrides = mcore.get_standard_config_overrides(config)
    overrides: Any = {**config_overrides, **for_the_rest(aux_lr)}
    with frozen(matrices):
        rest = mcore.get_megatron_optimizer(
            config, model_chunks, overrides, use_gloo_process_groups, pg_collection
        )
    save_row_vectors()
    return mcore.ChainedOptimizer([*wrapped, *getattr(rest, "chained_optimizers", [rest])])


def _wrap(optimizer: MegatronAngularMuown, config: Any) -> Any:
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    if config.bf16:
        scaler: Any = None  # bf16 needs none
        return Float16OptimizerWithFloat16Params(optimizer, config, scaler, init_all)
    return FP32Optimizer(optimizer, config, init_all)
