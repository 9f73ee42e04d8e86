"""AngularMuown for megatron-core's tensor-parallel weights.

    # megatron-core >= 0.19, which has an optimizer registry
    register(warmup_steps=200)
    values = {"lr": 0.02, "weight_decay": 0.0, "adam_beta2": 0.95}  # Megatron has other defaults
    config = OptimizerConfig(optimizer="angular_muown", **values)
    optimizer = get_megatron_optimizer(config, [model])

    # megatron-core < 0.19
    optimizer = get_angular_muown_optimizer(OptimizerConfig(**values), [model])

AngularMuown steps the hidden matrices. Megatron's Adam steps embeddings, output layer, norms,
biases and routers. Importing this module does not import Megatron; calling these functions does.
"""

from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from angular_muown.integrations.megatron.checkpoint import save_row_vectors
from angular_muown.integrations.megatron.marks import frozen, is_matrix, mark
from angular_muown.integrations.megatron.views import MatrixViews, TensorParallel, block_sizes
from angular_muown.optimizers import AngularMuown
from angular_muown.params.options import Group
from angular_muown.params.state import init_state

NAME = "angular_muown"


class MegatronAngularMuown(AngularMuown):
    """AngularMuown for a rank's part of Megatron's weights.

    A step sees whole matrices: those of all tensor-parallel ranks, with separate q, k and v (over
    all query groups) and separate gate and up projections.

    Args:
        qkv_split_shapes: row counts of q, k and v (or q, gate, k and v) in one query group.
        pg_collection: Megatron's process groups; only `tp` and `expt_tp` are used. None means no
            tensor parallelism.
        settings: arguments of AngularMuown.
    """

    qkv_split_shapes: list[int] | None = None
    pg_collection: Any = None
    # Pipeline ranks hold different parameters; only DTensors specify which ranks share a weight.
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
        """Include qkv_split_shapes in copies; torch copies only groups and state."""
        if self.pg_collection is not None:
            raise TypeError(
                "an optimizer with process groups cannot be copied: create a new one and load the "
                "state_dict of this one"
            )
        return {**super().__getstate__(), "qkv_split_shapes": self.qkv_split_shapes}

    def _check_parameters(self, index: int) -> None:
        """Check a group, which may be empty on some pipeline ranks."""
        group = self.param_groups[index]
        if group["average"] is not None:
            raise ValueError(
                f"average={group['average']!r}: averaged() would not reach the model, which has "
                "copies of these weights; set average=None"
            )
        if group["params"]:
            super()._check_parameters(index)

    def _advance(self) -> None:
        if self.observers:
            raise RuntimeError(
                "AngleMonitor does not support Megatron's weights: detach it with close()"
            )
        self._store_as_asked()  # what is converted in a view would be lost
        original = [group["params"] for group in self.param_groups]
        replaced = [[self._views(p, group) for p in group["params"]] for group in self.param_groups]
        all_views = [views for in_group in replaced for views in in_group]
        try:
            for group, in_group in zip(self.param_groups, replaced, strict=True):
                group["params"] = [matrix for views in in_group for matrix in views.matrices]
                self.state.update({m: s for views in in_group for m, s in views.states.items()})
            super()._advance()
        finally:
            for group, params in zip(self.param_groups, original, strict=True):
                group["params"] = params
            for matrix in (matrix for views in all_views for matrix in views.states):
                self.state.pop(matrix, None)
        for views in all_views:
            views.copy_back()

    def _views(self, p: Tensor, group: Group) -> MatrixViews:
        if p.ndim != 2:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is not a matrix, because Megatron's "
                "distributed optimizer flattens parameters: set use_distributed_optimizer=False; "
                "to shard the state across ranks, use LayerWiseDistributedOptimizer"
            )
        sizes = block_sizes(p, self.qkv_split_shapes)
        ranks = TensorParallel.of(p, self.pg_collection)
        if sizes is None and ranks is None:
            return MatrixViews(p)
        recipe = self.recipe(group)
        init_state(p, self.state[p], group, recipe)
        init = partial(init_state, group=group, recipe=recipe)
        return MatrixViews.of(p, self.state[p], sizes, ranks, init)


def init_states(optimizer: MegatronAngularMuown, config: Any = None) -> None:
    """Create the state of all parameters, for a checkpoint to be loaded into."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            init_state(p, optimizer.state[p], group, optimizer.recipe(group))


def register(name: str = NAME, *, aux_lr: float | None = None, **settings: Any) -> None:
    """Register AngularMuown in megatron-core 0.19 or later, as `optimizer=name` in its config.

    Args:
        name: the name to register.
        aux_lr: learning rate of Adam, for all parameters but the hidden matrices; None is the
            config's lr.
        settings: arguments of AngularMuown.

    Megatron requires the package emerging-optimizers to use its registry.
    """
    try:
        registry = import_module("megatron.core.optimizer.emerging_optimizers")
    except ModuleNotFoundError:
        raise ImportError(
            "this megatron-core has no optimizer registry, which was added in 0.19: use "
            "get_angular_muown_optimizer instead of get_megatron_optimizer"
        ) from None
    registry._EMERGING_OPTIMIZERS[name] = registry.EmergingOptimizerEntry(
        optimizer_cls=MegatronAngularMuown,
        init_state_fn=init_states,
        config_to_kwargs=partial(arguments_from_config, settings),
        default_param_overrides=adam_overrides(aux_lr, optimizer="adam"),
    )
    save_row_vectors()


def adam_overrides(aux_lr: float | None, **values: Any) -> dict[Any, dict[str, Any]]:
    """Return Megatron's config overrides for all parameters but the hidden matrices.

    Megatron's scheduler reads a group's max_lr. Without a scheduler, the group's lr applies.
    """
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    rest = ParamWithNamePredicate(
        name="not_hidden_matrix", fn=lambda p, name: not is_matrix(p, name)
    )
    lr = {} if aux_lr is None else {"lr": aux_lr, "max_lr": aux_lr}
    return {ParamKey(with_name_predicate=rest): {**lr, **values}}


def arguments_from_config(
    settings: dict[str, Any], config: Any, model_chunks: list[Any], pg_collection: Any
) -> dict[str, Any]:
    """Return MegatronAngularMuown's arguments: Megatron's configs, overridden by `settings`."""
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
    """Replace `get_megatron_optimizer` in a megatron-core (0.16 or later) without a registry.

    Args:
        config: an OptimizerConfig; AngularMuown also uses its lr, weight_decay, betas and eps.
        model_chunks: the parts of the model on this rank, as in `get_megatron_optimizer`.
        config_overrides: Megatron's settings for some parameters, as in `get_megatron_optimizer`.
        aux_lr: learning rate of Adam, for all parameters but the hidden matrices; None is
            config.lr.
        use_gloo_process_groups: as in `get_megatron_optimizer`.
        pg_collection: Megatron's process groups; None takes the global ones.
        **settings: arguments of AngularMuown, such as warmup_steps.
    """
    from megatron.core import optimizer as mcore
    from megatron.core.process_groups_config import ProcessGroupCollection

    if config.use_distributed_optimizer or config.fp16:
        raise ValueError(
            f"use_distributed_optimizer={config.use_distributed_optimizer}, fp16={config.fp16}: "
            "AngularMuown needs whole matrices in bf16 or float32; set both to False"
        )
    if config.optimizer != "adam":
        raise ValueError(
            f"optimizer={config.optimizer!r} must be 'adam', for all but the hidden matrices"
        )
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    mark(model_chunks)
    named = [item for chunk in model_chunks for item in chunk.named_parameters()]
    matrices = {p for name, p in named if is_matrix(p, name)}
    make = partial(
        MegatronAngularMuown, **arguments_from_config(settings, config, model_chunks, groups)
    )
    with frozen(p for _, p in named if p not in matrices):
        param_groups = mcore._get_param_groups(model_chunks, config, config_overrides)
    experts = [group for group in param_groups if group["is_expert_parallel"]]
    dense = [group for group in param_groups if not group["is_expert_parallel"]]
    wrapped = [_wrap(make(part), config) for part in (dense, experts) if part]
    if experts:
        wrapped[-1].grad_stats_parallel_group = groups.tp_ep_pp
    if config_overrides is None:
        config_overrides = mcore.get_standard_config_overrides(config)
    overrides: Any = {**config_overrides, **adam_overrides(aux_lr)}
    with frozen(matrices):
        rest = mcore.get_megatron_optimizer(
            config, model_chunks, overrides, use_gloo_process_groups, pg_collection
        )
    save_row_vectors()
    return mcore.ChainedOptimizer([*wrapped, *getattr(rest, "chained_optimizers", [rest])])


def _wrap(optimizer: MegatronAngularMuown, config: Any) -> Any:
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    if config.bf16:
        scaler: Any = None  # bf16 needs no loss scaling
        return Float16OptimizerWithFloat16Params(optimizer, config, scaler, init_states)
    return FP32Optimizer(optimizer, config, init_states)
