"""AngularMuown in torchtitan: its trainer, its Llama and its checkpoints, on one CPU.

    pip install -e '.[torchtitan]'
    python examples/torchtitan_llama.py --out runs/torchtitan_llama

On a GPU only `make_config` is of interest: put such a function into a config registry of yours and
start torchtitan as usual. torchtitan is written for accelerators, so `use_the_cpu` has to do
three things that no option does. The text is this script's own source.
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}


def use_the_cpu() -> None:
    """Before torchtitan is imported: without an accelerator it would assume CUDA. Its trainer also
    reports the memory of a GPU, and waits on one when it changes timeouts."""
    os.environ.update({k: os.environ.get(k, v) for k, v in {**ALONE, "MASTER_PORT": "0"}.items()})
    with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
        from torchtitan.components import metrics
        from torchtitan.distributed import utils

    monitor = mock.Mock(device_name="cpu")
    monitor.get_peak_stats.return_value = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    metrics.build_device_memory_monitor = lambda: monitor
    utils.set_pg_timeouts = lambda *_, **__: None


def prepare(out: Path) -> None:
    """A byte-level tokenizer and a data set of one document, as torchtitan expects them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet,
                                  vocab_size=258, show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator([], trainer)
    (out / "assets").mkdir(parents=True, exist_ok=True)
    (out / "data").mkdir(exist_ok=True)
    tokenizer.save(str(out / "assets" / "tokenizer.json"))
    ends = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    (out / "assets" / "tokenizer_config.json").write_text(ends)
    line = json.dumps({"text": Path(__file__).read_text()})
    (out / "data" / "text.json").write_text("\n".join([line] * 8))


def make_config(out: Path, steps: int) -> Any:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from angular_muown.integrations.torchtitan import angular_muown

    config = llama3_debugmodel()
    config.optimizer = angular_muown(lr=0.02, warmup_steps=4)  # instead of AdamW
    config.optimizer.implementation = "foreach"  # "fused", the default, is for a GPU
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 4, 0.5

    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:  # FlexAttention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=config.model_spec.model.vocab_size)
    config.hf_assets_path, config.dump_folder = str(out / "assets"), str(out / "run")
    config.dataloader.dataset_path = str(out / "data")
    training, checkpoint = config.training, config.checkpoint
    training.steps, training.seq_len, training.local_batch_size = steps, 64, 4
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    checkpoint.enable, checkpoint.interval = True, steps // 2
    config.validator.enable = False
    return config


def train(config: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights at the end, and the loss of every step."""
    trainer = config.build()
    losses: list[float] = []
    with mock.patch.object(
        trainer.metrics_processor, "log", lambda step, loss, *_, **__: losses.append(loss)
    ):
        trainer.train()
    trainer.close()
    sharded = trainer.model_parts[0].state_dict()  # over one rank
    weights = {name: value.full_tensor() for name, value in sharded.items()}
    torch.distributed.destroy_process_group()
    return weights, losses


def main(out: Path, steps: int = 20) -> dict[str, Any]:
    use_the_cpu()
    prepare(out)
    weights, losses = train(make_config(out, steps))
    # as if the run had been killed half-way: what was saved later is gone
    shutil.rmtree(out / "run" / "checkpoint" / f"step-{steps}")
    resumed, again = train(make_config(out, steps))
    same = all(torch.equal(value, resumed[name]) for name, value in weights.items())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps")
    result = {"losses": losses, "resumed": again, "same_weights": same}
    (out / "result.json").write_text(json.dumps(result))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/torchtitan_llama"))
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
