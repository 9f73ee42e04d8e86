"""Train a small ViT, ConvNeXt or ResNet of transformers in a plain loop, on made-up images.

python examples/vision.py --model vit
"""

import argparse

import torch
from made_up import Bars
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from angular_muown import AngularMuown, plan, wsd

SIZE = 16


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "vit":
        size = {"image_size": SIZE, "patch_size": 4, "hidden_size": 32, "intermediate_size": 64}
        return ViTForImageClassification(
            ViTConfig(**size, num_hidden_layers=2, num_attention_heads=2)
        )
    stages = {"hidden_sizes": [16, 32], "depths": [1, 1]}
    if name == "convnext":
        stages |= {"num_stages": 2, "patch_size": 2, "layer_scale_init_value": 1.0}
        return ConvNextForImageClassification(ConvNextConfig(**stages))
    return ResNetForImageClassification(ResNetConfig(**stages, embedding_size=16))


def main(name: str = "vit", steps: int = 60) -> tuple[list[float], AngularMuown]:
    """The losses of all steps, and the optimizer."""
    model, warmup = build(name), steps // 10
    optimizer = AngularMuown(plan(model, aux_lr=3e-3), lr=0.02, warmup_steps=warmup)
    scheduler = LambdaLR(optimizer, lambda t: wsd(t, steps, warmup, decay_steps=steps // 5))
    generator = torch.Generator().manual_seed(0)
    data = DataLoader(Bars(SIZE, 32 * steps), batch_size=32, shuffle=True, generator=generator)
    losses = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("vit", "convnext", "resnet"), default="vit")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    print(plan(build(given.model)))
    for step, loss in enumerate(main(given.model, given.steps)[0]):
        print(step, round(loss, 4))
