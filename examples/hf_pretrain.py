"""Pre-train a small Llama or Qwen2 with transformers' Trainer, from a config and made-up text.

python examples/hf_pretrain.py --model qwen2 --steps 60
"""

import argparse
import tempfile

import torch
from made_up import Windows
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
)

from angular_muown import AngularMuown, wsd_schedule

SHAPE = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE))
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))


def main(
    name: str = "qwen2",
    steps: int = 60,
    out: str | None = None,
    resume: str | None = None,
    model: PreTrainedModel | None = None,
    lr: float = 0.02,
    aux_lr: float | None = None,
) -> Trainer:
    """Train from scratch, or a given model: then pass aux_lr, the learning rate of AdamW."""
    model = model or build(name)
    optimizer = AngularMuown.for_model(model, lr=lr, aux_lr=aux_lr)
    scheduler = wsd_schedule(optimizer, steps, warmup=0.1)
    arguments = TrainingArguments(
        out or tempfile.mkdtemp(),
        max_steps=steps,
        learning_rate=lr,  # for the log: the Trainer does not use it when it gets an optimizer
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        save_steps=steps // 2,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model, arguments, train_dataset=Windows(32), optimizers=(optimizer, scheduler)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("llama", "qwen2"), default="qwen2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", help="folder of the checkpoints; a temporary one if not given")
    parser.add_argument("--resume", help="a checkpoint folder to continue from")
    given = parser.parse_args()
    print(AngularMuown.for_model(build(given.model)).plan)
    main(given.model, given.steps, given.out, given.resume)
