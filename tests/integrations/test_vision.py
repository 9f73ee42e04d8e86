"""A ViT, a ConvNeXt and a ResNet of transformers learn; test_model_plans has where their parts go.

timm is documented only: its torchvision has no build for this environment's torch. What stands
here for it are the names that its models give their parts.
"""

import pytest
import torch
from torch import nn

from angular_muown import plan
from tests.integrations.scripts import load


@pytest.mark.parametrize("name", ["vit", "convnext", "resnet"])
def test_the_example_learns_and_resumes(name, tmp_path) -> None:
    half = str(tmp_path / "half.pt")
    losses, model, optimizer = load("vision").main(name, 60, out=half)
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    assert {group["algorithm"] for group in optimizer.param_groups} == {"matrix", "adamw"}
    rest, again, _ = load("vision").main(name, 60, resume=half)
    assert rest == losses[30:]
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_names_of_timm() -> None:
    """conv1 and fc of its ResNets, stem and head of its ConvNeXts, patch_embed of its ViTs."""
    qkv = nn.ModuleDict({"attn": nn.ModuleDict({"qkv": nn.Linear(8, 24)})})
    model = nn.ModuleDict(
        {
            "conv1": nn.Conv2d(3, 8, 3),
            "stem": nn.Sequential(nn.Conv2d(3, 8, 4), nn.GroupNorm(1, 8)),
            "patch_embed": nn.ModuleDict({"proj": nn.Conv2d(3, 8, 4)}),
            "layer1": nn.Sequential(nn.ModuleDict({"conv1": nn.Conv2d(8, 8, 3)})),
            "blocks": nn.ModuleList([qkv]),
            "conv_dw": nn.Conv2d(8, 8, 7, groups=8),
            "head": nn.ModuleDict({"fc": nn.Linear(8, 2)}),
            "fc": nn.Linear(8, 2),
        }
    )
    groups = plan(model, blocks={"blocks.*.attn.qkv.weight": 3})
    matrices = {name for g in groups if g["algorithm"] == "matrix" for name, _ in g["params"]}
    assert matrices == {"layer1.0.conv1.weight", "blocks.0.attn.qkv.weight"}
