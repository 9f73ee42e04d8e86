"""FSDP1 and DeepSpeed's ZeRO flatten parameters: the error names one and says what to use.

FSDP1 itself runs here. DeepSpeed is compiled against the installed torch, so the suite does not
install it: the tests modify the groups as DeepSpeed does. If DeepSpeed is installed, it runs too.
"""

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from angular_muown import AngularMuown, plan
from tests.library.models import loss_of, tiny_lm
from tests.ranks import results


def shard(model: nn.Module, **options) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def work() -> None:
    warnings.simplefilter("ignore")  # torch deprecates FSDP1
    for keep_names in (False, True):
        model = shard(tiny_lm(), use_orig_params=keep_names)
        with pytest.raises(
            ValueError,
            match=r"'FullyShardedDataParallel' is wrapped by FSDP1.*"
            r"use FSDP2 \(torch.distributed.fsdp.fully_shard\)",
        ):
            plan(model)
    flat = shard(tiny_lm(), use_orig_params=False)
    for rule in ("matrix", "adamw"):
        group = {"params": list(flat.named_parameters()), "algorithm": rule}
        with pytest.raises(
            ValueError, match=r"'_fsdp_wrapped_module._flat_param' .*flattened by F"
        ):
            AngularMuown([group])
    # Wrapping after plan() flattens matrices that the optimizer already holds.
    model = tiny_lm()
    optimizer = AngularMuown(plan(model))
    wrapped = shard(model, use_orig_params=True)
    loss_of(wrapped).backward()
    before = [p.clone() for p in wrapped.parameters()]
    with pytest.raises(
        ValueError, match=r"created with 'layers.0.attn.qkv.weight'.*Under FSDP1: use F"
    ):
        optimizer.step()
    assert all(map(torch.equal, before, wrapped.parameters())), "no weight changed"


def test_fsdp1_is_rejected_on_two_ranks() -> None:
    results(2, work)


def test_a_flat_zero_partition_is_rejected() -> None:
    """ZeRO 1, 2 and 3 replace the parameters of a group by one flat tensor."""
    optimizer = AngularMuown(plan(tiny_lm()))
    for group in optimizer.param_groups:
        flat = torch.cat([p.detach().flatten() for p in group["params"]]).requires_grad_()
        flat.grad = torch.ones_like(flat)
        group["params"] = [flat]
    before = [p.clone() for group in optimizer.param_groups for p in group["params"]]
    with pytest.raises(
        ValueError,
        match=r"flat tensor of shape \(4096,\) .*'layers.0.attn.qkv.wei"
        r'.*Under DeepSpeed: use ZeRO stage 0 \("zero_optimization": {"stage": 0}\)',
    ):
        optimizer.step()
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(map(torch.equal, before, after)), "no weight changed"


def test_parameters_emptied_by_zero_3_are_rejected() -> None:
    """deepspeed.zero.Init leaves an empty tensor with the attribute ds_id."""
    model = tiny_lm()
    model.lm_head.weight = nn.Parameter(torch.empty(0))
    model.lm_head.weight.ds_id = 0
    with pytest.raises(ValueError, match=r"'lm_head.weight' \(shape \(0,\)\).*by DeepSpeed: use Z"):
        plan(model)


DEEPSPEED = """
import sys, torch, deepspeed
from torch import nn
from angular_muown import AngularMuown, plan

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
    def forward(self, x):
        return self.head(self.up(x).relu()).square().mean()

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model, stage = Model(), int(sys.argv[1])
config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
config["zero_allow_untested_optimizer"] = True
optimizer = AngularMuown(plan(model), lr=0.02)
try:
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(5):
        loss = engine(torch.ones(4, 8))
        engine.backward(loss)
        engine.step()
    print("LAST", loss.item())
except ValueError as error:
    print("ERROR", error)
"""


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_runs_at_stage_0_only(stage, tmp_path) -> None:
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environment = {
        **os.environ,
        **one_rank,
        "MASTER_PORT": str(29600 + stage),
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, "-c", DEEPSPEED, str(stage)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if stage == 0:
        assert "LAST" in run.stdout, run.stderr
    else:
        assert "ERROR" in run.stdout, run.stderr
        assert "use ZeRO stage 0" in run.stdout
