"""A ViT, a ConvNeXt and a ResNet of transformers learn; test_model_plans tests their plans.

timm needs a torchvision that may not be available for the installed torch, so its parameter names
are tested on a model made by hand.
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
    second_half, resumed, _ = load("vision").main(name, 60, resume=half)
    assert second_half == losses[30:]
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_timm_parameter_names_are_recognized() -> None:
    """conv1 and fc of ResNets, stem and head of ConvNeXts, patch_embed of ViTs."""
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
