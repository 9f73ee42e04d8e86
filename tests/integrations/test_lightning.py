"""Lightning's Trainer and Fabric: one optimizer, per-step schedules, resuming."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from angular_muown import AngularMuown, linear_schedule, wsd_schedule
from angular_muown.integrations.lightning import AngleMonitorCallback, per_step
from tests.integrations.scripts import assert_falls, assert_same_weights, load

# Warnings from Lightning itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("lightning")
    return {"out": out, **load("lightning_bytes").main(out)}


@pytest.mark.parametrize("host", ["lightning", "fabric"])
def test_the_example_learns_and_resumes_bit_for_bit(example: dict[str, Any], host: str) -> None:
    assert_falls(example["losses"][host], 0.85)
    assert_same_weights(example["weights"][host], example["resumed"][host])


def test_trainer_and_fabric_take_the_same_steps(example: dict[str, Any]) -> None:
    """Including gradient clipping and the schedule."""
    assert example["losses"]["lightning"] == example["losses"]["fabric"]


def test_the_callback_logs_measurements(example: dict[str, Any]) -> None:
    logged = {part: _logged(example["out"] / part) for part in ("whole", "resumed")}
    assert [row["step"] for row in logged["whole"]] == [1, 11, 21, 31, 41, 51]
    # the resumed half continues the step count, and so does kappa
    assert [row["step"] for row in logged["resumed"]] == [31, 41, 51]
    assert logged["whole"][3:] == logged["resumed"]
    kappas = [row["muown/kappa"] for row in logged["whole"]]
    assert kappas[0] == 1.0
    assert kappas == sorted(kappas, reverse=True)
    angles = [row["muown/angle_mean/network.mix.weight"] for row in logged["whole"]]
    assert angles[1] == pytest.approx(0.03 * kappas[1], rel=0.1)  # in the constant phase


def _logged(folder: Path) -> list[dict[str, float]]:
    with next(folder.glob("log/*/metrics.csv")).open() as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


class Small(pl.LightningModule):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer, self.fails, self.lrs = nn.Linear(4, 4, bias=False), fails, []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails and batch_idx == 2:
            raise RuntimeError("on purpose")
        self.lrs.append(self.optimizers().param_groups[0]["lr"])  # pyrefly: ignore
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = AngularMuown(self.layer.parameters(), lr=1.0)
        return per_step(optimizer, lambda step: 1 / (step + 1))


def fit(module: Small, tmp_path: Path, **settings: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        **settings,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2))
    return trainer


def test_the_schedule_follows_optimizer_steps(tmp_path: Path) -> None:
    module = Small()
    fit(module, tmp_path)
    assert module.lrs == [1, 1 / 2, 1 / 3, 1 / 4]
    accumulated = Small()
    fit(accumulated, tmp_path, accumulate_grad_batches=2)
    assert accumulated.lrs == [1, 1, 1 / 2, 1 / 2]


def test_a_torch_scheduler_is_stepped_per_step_and_must_be_the_optimizers() -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = AngularMuown(layer.parameters(), lr=1.0)
    scheduler = wsd_schedule(optimizer, 10, warmup=0)
    result = per_step(optimizer, scheduler)
    assert result["optimizer"] is optimizer
    assert result["lr_scheduler"] == {"scheduler": scheduler, "interval": "step"}
    other = linear_schedule(torch.optim.SGD(layer.parameters(), lr=1.0), 10)
    with pytest.raises(ValueError, match=r"schedule=Schedule belongs to another optimizer \(SGD\)"):
        per_step(optimizer, other)


@pytest.mark.parametrize("fails", [False, True])
def test_the_callback_removes_its_hooks(tmp_path: Path, fails: bool) -> None:
    module, callback = Small(fails), AngleMonitorCallback(every=1)
    optimizers = []

    class Record(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            optimizers.append(trainer.optimizers[0])

    settings = {"callbacks": [callback, Record()]}
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            fit(module, tmp_path, **settings)
    else:
        fit(module, tmp_path, **settings)
    optimizer = optimizers[0]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert callback.logs == []


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("settings", [{"average": 0.5}], ids=str)
def test_averaged_works_through_fabrics_wrapper(settings: dict[str, Any], inner: bool) -> None:
    """Entered through the optimizer or its wrapper, it also blocks step() of the other."""
    fabric = Fabric(accelerator="cpu", devices=1)
    layer = nn.Linear(8, 8, bias=False)
    optimizer = AngularMuown(layer.parameters(), lr=0.02, **settings)
    model, wrapped = fabric.setup(layer, optimizer)
    for _ in range(12):
        fabric.backward(model(torch.randn(4, 8)).square().mean())
        wrapped.step()
    entered, other = (optimizer, wrapped) if inner else (wrapped, optimizer)
    before = layer.weight.detach().clone()
    with entered.averaged():
        assert torch.equal(layer.weight, optimizer.state[layer.weight]["average"])
        assert not torch.equal(layer.weight, before)
        with pytest.raises(RuntimeError, match=r"step\(\) was called inside averaged"):
            other.step()
    assert torch.equal(layer.weight, before)
