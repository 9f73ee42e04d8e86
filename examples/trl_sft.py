"""Fine-tune with TRL's SFTTrainer: all weights of a small Llama first, then LoRA adapters only.

python examples/trl_sft.py --steps 40
"""

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from made_up import sentences
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from angular_muown.integrations.transformers import planned, wsd_arguments

RANK = 4
ADAPTER_LR = 2e-3  # what AdamW would have, for adapters


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    words = sorted({word for text in texts for word in text.replace(".", " .").split()})
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def build_model(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **shape, **heads, **special))


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    steps: int,
    schedule: dict[str, Any],
    settings: dict[str, float],
    lora: LoraConfig | None = None,
    out: str | None = None,
    resume: str | None = None,
) -> SFTTrainer:
    arguments = SFTConfig(
        out or tempfile.mkdtemp(),
        **schedule,
        per_device_train_batch_size=16,
        max_length=16,
        logging_steps=5,
        save_steps=steps // 2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        processing_class=tokenizer,
        peft_config=lora,
        # the Trainer wraps the model in adapters, so it has to construct the optimizer
        optimizer_cls_and_kwargs=planned(arguments=arguments, **settings),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main(
    steps: int = 40, out: str | None = None, resume: str | None = None
) -> tuple[SFTTrainer, SFTTrainer]:
    """Return the trainers of both stages; `out` and `resume` are those of the adapters."""
    texts = sentences(256)
    others = [" ".join(text.split()[::-1]) for text in texts]  # what the base has not learnt
    tokenizer = build_tokenizer(texts)
    model = build_model(len(tokenizer))
    # From scratch: a constant phase and a cooldown, with kappa on; aux_lr is lr.
    constant = wsd_arguments(steps, lr=0.02, warmup=0.1)
    full = train(model, tokenizer, texts, steps, constant, {})
    # A row of B has RANK entries and starts at zero. AdamW would move it by up to
    # ADAPTER_LR sqrt(RANK) a step: the same bound for its length.
    lora = LoraConfig(r=RANK, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    rates = {"aux_lr": ADAPTER_LR, "radius_lr": ADAPTER_LR * RANK**0.5}
    # From a checkpoint: the learning rate falls to zero, so kappa is off.
    falling = {"learning_rate": 0.04, "lr_scheduler_type": "linear", "max_steps": steps}
    falling["warmup_steps"] = steps // 10
    settings = {**rates, "decay_degree": 0.0}
    return full, train(model, tokenizer, others, steps, falling, settings, lora, out, resume)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", help="folder of the adapters' checkpoints")
    parser.add_argument("--resume", help="a checkpoint of the adapters to continue from")
    main(**vars(parser.parse_args()))
