"""Fine-tune: pre-train a tiny GPT on Python code, then continue on English prose.

    python examples/finetune.py                       # all weights
    python examples/finetune.py --lora                # adapters by peft: pip install -e '.[hf]'
    python examples/finetune.py --optimizer adamw     # for comparison

The prose is that of Python's `help()`, so nothing is downloaded. From a checkpoint, the learning
rate of the AdamW groups is always explicit: `aux_lr` is the one that AdamW would have.
"""

import argparse
from functools import cache
from pydoc_data.topics import topics

import torch
from first_comparison import held_out_loss
from plain_loop import GPT, batch, python_source
from torch import Tensor, nn
from torch.optim import Optimizer

from angular_muown import AngularMuown, linear_schedule, wsd_schedule

RANK = 4
ADAMW_LR = 1e-3  # what AdamW would have, for all weights
ADAPTER_LR = 2e-3  # what AdamW would have, for adapters


@cache
def prose() -> Tensor:
    text = "".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def pretrain(steps: int) -> GPT:
    torch.manual_seed(0)
    model = GPT()
    blocks = {"*.qkv.weight": 3}
    optimizer = AngularMuown.for_model(model, lr=0.04, blocks=blocks)
    scheduler = wsd_schedule(optimizer, steps, warmup=0.1)
    run(model, optimizer, scheduler, python_source(), steps)
    return model


def full_optimizer(model: nn.Module, name: str) -> Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=ADAMW_LR, weight_decay=0.0)
    return AngularMuown.for_model(
        model, lr=0.008, aux_lr=ADAMW_LR, radius_lr=ADAMW_LR, blocks={"*.qkv.weight": 3}
    )


def adapter_optimizer(model: nn.Module, name: str) -> Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(trainable, lr=ADAPTER_LR, weight_decay=0.0)
    # AdamW moves a row of B, with its RANK entries, by up to ADAPTER_LR sqrt(RANK) a step.
    return AngularMuown.for_model(
        model, lr=0.04, aux_lr=ADAPTER_LR, radius_lr=ADAPTER_LR * RANK**0.5,
        blocks={"*.qkv.lora_A.*": 1, "*.qkv.lora_B.*": 3},
    )  # fmt: skip


def with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    layers = ["qkv", "out", "up", "down"]
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=8, target_modules=layers))


def run(model: nn.Module, optimizer: Optimizer, scheduler, text: Tensor, steps: int) -> None:
    for step in range(steps):
        model(*batch(text, step)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def main(
    optimizer: str = "angular_muown", lora: bool = False, steps: int = 200
) -> dict[str, tuple[float, float]]:
    """Return the held-out losses on prose and on code, before and after fine-tuning."""
    model = pretrain(steps)
    border = len(prose()) * 9 // 10

    def losses() -> tuple[float, float]:
        return held_out_loss(model, prose()[border:]), held_out_loss(model, python_source())

    found = {"before": losses()}
    trained = with_adapters(model) if lora else model
    chosen = (adapter_optimizer if lora else full_optimizer)(trained, optimizer)
    print(chosen.plan if isinstance(chosen, AngularMuown) else chosen)
    # Fine-tuning is short: the learning rate falls all the way, and kappa stays off.
    run(trained, chosen, linear_schedule(chosen, steps, warmup=0.1), prose()[:border], steps)
    found["after"] = losses()
    for name, (new, old) in found.items():
        print(f"{name:6}  loss on prose {new:.3f}, on code {old:.3f}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=("angular_muown", "adamw"), default="angular_muown")
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--steps", type=int, default=200, help="of each of the two parts")
    main(**vars(parser.parse_args()))
