"""Train a small ViT, ConvNeXt or ResNet of transformers in a plain loop, on made-up images.

python examples/vision.py --model vit
"""

import argparse
from itertools import islice

import torch
from made_up import Bars
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

from angular_muown import AngularMuown, wsd_schedule

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


def main(
    name: str = "vit", steps: int = 60, out: str | None = None, resume: str | None = None
) -> tuple[list[float], PreTrainedModel, AngularMuown]:
    """The losses of all steps after the one that was resumed, the model, the optimizer."""
    model = build(name)
    optimizer = AngularMuown.for_model(model, lr=0.02)
    scheduler = wsd_schedule(optimizer, steps, warmup=0.1)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if resume:
        for key, state in torch.load(resume, weights_only=True).items():
            parts[key].load_state_dict(state)
    done, losses = scheduler.last_epoch, []
    for batch in islice(DataLoader(Bars(SIZE, 32 * steps), batch_size=32), done, None):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if out and scheduler.last_epoch == steps // 2:
            torch.save({key: part.state_dict() for key, part in parts.items()}, out)
    return losses, model, optimizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("vit", "convnext", "resnet"), default="vit")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", help="file for the state after half of the run")
    parser.add_argument("--resume", help="such a file to continue from")
    given = parser.parse_args()
    print(AngularMuown.for_model(build(given.model)).plan)
    run = main(given.model, given.steps, given.out, given.resume)
    for step, loss in enumerate(run[0]):
        print(step, round(loss, 4))
