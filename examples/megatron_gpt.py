"""AngularMuown in Megatron-LM: megatron-core's GPT and its torch_dist checkpoints, on a CPU.

    pip install -e '.[megatron]'
    python examples/megatron_gpt.py --out runs/megatron_gpt
    torchrun --nproc-per-node 2 examples/megatron_gpt.py --out runs/megatron_gpt   # tensor parallel

Megatron is written for GPUs: `use_the_cpu` answers where it asks for the current one. Your own
script needs `make_optimizer` only. Data: the bytes of this file.
"""

import argparse
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29555"}
LENGTH, BATCH, VOCABULARY = 32, 8, 128
LR, WARMUP = 0.02, 3


@contextmanager
def use_the_cpu() -> Iterator[None]:
    """The current device is the CPU, tensors meant for "cuda" are made there, nothing to wait for.
    A process group over gloo for as many ranks as were started."""

    def on_cpu(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            return make(*args, **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})

        return made

    os.environ.update({key: os.environ.get(key, value) for key, value in ALONE.items()})
    with (
        warnings.catch_warnings(),
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.tensor", on_cpu(torch.tensor)),
        mock.patch("torch.zeros", on_cpu(torch.zeros)),
    ):
        warnings.simplefilter("ignore")  # Megatron's, about packages that it does without
        from megatron.core import parallel_state, tensor_parallel

        without = mock.Mock(fork=nullcontext)  # no dropout, so no random numbers of a GPU
        tensor_parallel.get_cuda_rng_tracker = lambda: without
        torch.distributed.init_process_group("gloo")
        ranks = torch.distributed.get_world_size()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def make_model() -> Any:
    """Two layers with grouped queries and a gated MLP, in Megatron's own DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=8, num_query_groups=4,
        ffn_hidden_size=128, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
        tensor_model_parallel_size=torch.distributed.get_world_size(),
    )  # fmt: skip
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
                     share_embeddings_and_output_weights=False)  # fmt: skip
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def make_optimizer(model: Any, steps: int) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    from angular_muown.integrations.megatron import get_angular_muown_optimizer

    config = OptimizerConfig(lr=LR, min_lr=0.0, weight_decay=0.0, adam_beta2=0.95, clip_grad=0.0)
    return get_angular_muown_optimizer(config, [model], warmup_steps=WARMUP)


def make_scheduler(optimizer: Any, steps: int, done: int = 0) -> Any:
    """Return Megatron's scheduler with a warm-up, a constant phase and a linear cooldown."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=LR, min_lr=0.0, lr_warmup_steps=WARMUP,
        lr_decay_steps=steps, lr_decay_style="WSD", wsd_decay_steps=steps // 2,
        lr_wsd_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=steps,
        wd_incr_style="constant",
    )  # fmt: skip
    scheduler.step(done + 1)  # the learning rate of the next step; the first one is not 0
    return scheduler


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long() % 128
    starts = torch.randint(
        len(text) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step)
    )
    windows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def train(model: Any, optimizer: Any, scheduler: Any, start: int, end: int) -> list[float]:
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    losses = []
    for step in range(start, end):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        tokens, answers = batch(step)
        loss = model(tokens, positions, mask, labels=answers).mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        scheduler.step(1)
        losses.append(loss.item())
    return losses


def state_of(model: Any, optimizer: Any, loading: bool) -> dict[str, Any]:
    """What Megatron's training script saves, as far as it matters here."""
    weights = model.module.sharded_state_dict()
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, loading)}


def main(out: Path, steps: int = 20) -> dict[str, Any]:
    """Train, save half-way; then a fresh model takes the second half from the checkpoint. A folder
    that has a checkpoint already, of as many ranks as you like, is resumed only."""
    with use_the_cpu():
        from megatron.core import dist_checkpointing

        half, saved = steps // 2, out / "half"
        losses: list[float] = []
        if not saved.exists():
            torch.distributed.barrier()
            saved.mkdir(parents=True, exist_ok=True)
            model = make_model()
            optimizer = make_optimizer(model, steps)
            scheduler = make_scheduler(optimizer, steps)
            losses = train(model, optimizer, scheduler, 0, half)
            dist_checkpointing.save(state_of(model, optimizer, False), str(saved))
            losses += train(model, optimizer, scheduler, half, steps)
        model = make_model()
        optimizer = make_optimizer(model, steps)
        loaded = dist_checkpointing.load(state_of(model, optimizer, True), str(saved))
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        scheduler = make_scheduler(optimizer, steps, done=half)
        resumed = train(model, optimizer, scheduler, half, steps)
        result = {"losses": losses, "resumed": resumed}
        if torch.distributed.get_rank() == 0:
            last = result["resumed"][-1]
            print(f"loss {losses[0]:.3f} -> {last:.3f}" if losses else f"resumed: {last:.3f}")
            ranks = torch.distributed.get_world_size()
            (out / f"result-{ranks}.json").write_text(json.dumps(result))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/megatron_gpt"))
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
