"""Log angles, radii and kappa to TensorBoard, W&B and trackio, offline."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from angular_muown import AngularMuown, plan
from angular_muown.integrations.loggers import log_angles
from tests.dashboards import trackio_rows, wandb_rows
from tests.integrations.scripts import assert_falls, load

EVERY, STEPS = 2, 5
MEASURED = [1, 3, 5]  # every second of 5 steps
KEYS = ("angle_mean", "row_norm_mean", "kappa", "angle_mean/0.weight", "row_norm_mean/0.weight")


@pytest.fixture(scope="module", autouse=True)
def _trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set TRACKIO_DIR, which trackio reads only when it is imported."""
    os.environ.setdefault("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))


def make() -> tuple[nn.Module, AngularMuown]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    return model, AngularMuown(plan(model, head="1.*"), lr=0.1, decay_scale=1.0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, after: Any = lambda: None) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).square().mean().backward()
        optimizer.step()
        after()


def expected_values() -> dict[int, dict[str, float]]:
    """Return what a plain function receives, and reset the seed for the logger under test."""
    torch.manual_seed(1)
    received: dict[int, dict[str, float]] = {}
    model, optimizer = make()
    log_angles(model, optimizer, lambda values, step: received.update({step: values}), every=EVERY)
    train(model, optimizer)
    torch.manual_seed(1)
    return received


def test_a_function_gets_values_and_steps() -> None:
    received = expected_values()
    assert list(received) == MEASURED
    assert {f"muown/{key}" for key in KEYS} <= received[1].keys()
    assert [received[t]["muown/kappa"] for t in MEASURED] == [1.0, 1 / 3, 1 / 5]


def test_tensorboard_receives_all_measurements(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    expected = expected_values()
    model, optimizer = make()
    with SummaryWriter(str(tmp_path)) as writer:
        log_angles(model, optimizer, writer, every=EVERY)
        train(model, optimizer)
    events = EventAccumulator(str(tmp_path)).Reload()
    for key in KEYS:
        scalars = events.Scalars(f"muown/{key}")
        assert [s.step for s in scalars] == MEASURED
        values = [expected[t][f"muown/{key}"] for t in MEASURED]
        assert [s.value for s in scalars] == pytest.approx(values)


USER_LOGS: dict[str, Any] = {  # what the user logs to a run after step t
    "nothing": lambda run, t: None,
    "often": lambda run, t: [run.log({"loss": 1.0}) for _ in range(3)],
    "with steps": lambda run, t: run.log({"loss": 1.0}, step=t),
    "at the end": lambda run, t: run.log({"loss": 1.0}) if t == STEPS else None,
}


@pytest.mark.parametrize("habit", USER_LOGS)
def test_wandb_keeps_all_measurements_and_user_rows(
    habit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the user logs, and with or without step numbers."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    expected = expected_values()
    model, optimizer = make()
    run = wandb.init(project="test", dir=str(tmp_path))
    log_angles(model, optimizer, run, every=EVERY)
    steps = iter(range(1, STEPS + 1))
    train(model, optimizer, after=lambda: USER_LOGS[habit](run, next(steps)))
    run.finish()
    wandb.teardown()  # wait for the process that writes the file
    rows = wandb_rows(next(tmp_path.rglob("*.wandb")))
    logged = {"nothing": 0, "often": 3 * STEPS, "with steps": STEPS, "at the end": 1}
    assert sum("loss" in row for row in rows) == logged[habit]
    measured = {int(row["muown/step"]): row for row in rows if "muown/step" in row}
    assert list(measured) == MEASURED
    for step, values in expected.items():
        assert {k: measured[step][k] for k in values} == pytest.approx(values)


def test_trackio_stores_all_measurements() -> None:
    import trackio

    expected = expected_values()
    model, optimizer = make()
    run = trackio.init(project="test", embed=False)
    log_angles(model, optimizer, run, every=EVERY)
    train(model, optimizer)
    trackio.finish()
    assert trackio_rows("test") == expected


@pytest.mark.parametrize("to", ["tensorboard", "wandb", "trackio"])
def test_the_example_writes_and_learns(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    assert_falls(load("angle_logs").main(tmp_path, to=to, steps=40), 0.5)
    measured = [1, 11, 21, 31]
    if to == "trackio":
        assert list(trackio_rows("angles")) == measured
    elif to == "wandb":
        import wandb

        wandb.teardown()  # wait for the process that writes the file
        rows = wandb_rows(next(tmp_path.rglob("*.wandb")))
        assert [row["muown/step"] for row in rows if "muown/kappa" in row] == measured
    else:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path)).Reload()
        assert [event.step for event in events.Scalars("muown/kappa")] == measured


def test_steps_of_any_torch_optimizer_are_counted_until_close() -> None:
    model, _ = make()
    steps: list[int] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = log_angles(model, optimizer, lambda values, step: steps.append(step), every=EVERY)
    train(model, optimizer)
    assert steps == MEASURED
    log.close()
    train(model, optimizer)
    assert steps == MEASURED
    assert not optimizer._optimizer_step_post_hooks


def test_without_per_parameter_only_overall_values_are_logged() -> None:
    model, optimizer = make()
    logged: dict[str, float] = {}
    log_angles(model, optimizer, lambda v, step: logged.update(v), per_parameter=False, prefix="a")
    train(model, optimizer)
    assert {"a/angle_mean", "a/angle_max", "a/row_norm_mean", "a/kappa"} <= logged.keys()
    assert all(key.count("/") == 1 for key in logged)


def test_without_a_writer_it_measures_but_does_not_log() -> None:
    model, optimizer = make()
    log = log_angles(model, optimizer, None)
    train(model, optimizer)
    assert log.monitor.steps == STEPS


def test_an_invalid_writer_is_rejected() -> None:
    model, optimizer = make()
    with pytest.raises(TypeError, match="writer=3 has neither add_scalar"):
        log_angles(model, optimizer, 3)
    assert not optimizer._optimizer_step_pre_hooks  # nothing was attached
