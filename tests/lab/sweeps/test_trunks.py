"""Sweeps and trunks that grow: no step is taken twice, and a longer trunk serves shorter ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from angular_lab.experiments.definition import Experiment
from angular_lab.run_folder import RunFolder
from angular_lab.sweeps.sweep import Sweep
from angular_lab.training.start import extend
from angular_lab.training.trainer import Trainer
from tests.lab.sweeps.small import metrics, record, small, sweep


@pytest.fixture
def plan(data: Path) -> Experiment:
    return small(data, arms=small(data).arms[1:], horizons=(4, 8), seeds=(0,))


def trunks(out: Path) -> list[Path]:
    return sorted((out / "runs").glob("*-trunk-*"))


def test_a_further_horizon_extends_the_trunk(plan, tmp_path, monkeypatch) -> None:
    sweep(plan, tmp_path / "store")
    (trunk,) = trunks(tmp_path / "store")
    before = (trunk / "metrics.jsonl").read_bytes()
    steps: list[int] = []
    update = Trainer.update

    def count(self) -> None:
        steps.append(self.step + 1)
        update(self)

    monkeypatch.setattr(Trainer, "update", count)
    longer = replace(plan, horizons=(4, 8, 16))
    sweep(longer, tmp_path / "store")
    assert steps == [*range(7, 13), *range(13, 17)], "the trunk from 6 to 12, then the cooldown"
    assert trunks(tmp_path / "store") == [trunk]
    assert (trunk / "metrics.jsonl").read_bytes().startswith(before)
    (trial,) = record(tmp_path / "store").trials
    assert trial.trunk == trunk.name
    monkeypatch.undo()
    sweep(longer, tmp_path / "at once")
    ends = {name: m for name, m in metrics(tmp_path / "at once").items() if "-trunk-" not in name}
    assert ends.items() <= metrics(tmp_path / "store").items()


def test_an_extended_trunk_still_belongs_to_its_sweep(plan, tmp_path) -> None:
    sweep(plan, tmp_path)
    (trunk,) = trunks(tmp_path)
    before = metrics(tmp_path)
    extend(trunk, 12, device="cpu")
    for end in set(before) - {trunk.name}:
        (tmp_path / "runs" / end / "DONE").unlink()
        (tmp_path / "runs" / end / "metrics.jsonl").unlink()
        for checkpoint in (tmp_path / "runs" / end / "checkpoints").iterdir():
            checkpoint.rename(tmp_path / f"{end}-{checkpoint.name}")
    sweep(plan, tmp_path)
    after = metrics(tmp_path)
    assert {k: v for k, v in after.items() if k != trunk.name} == {
        k: v for k, v in before.items() if k != trunk.name
    }
    assert trunks(tmp_path) == [trunk]


def test_what_happens_to_a_trunk_later_does_not_matter(plan, tmp_path) -> None:
    """Killed or diverged beyond the sweep's last branch point, it is finished for the sweep."""
    result = sweep(plan, tmp_path)
    (trunk,) = trunks(tmp_path)
    extend(trunk, 12, device="cpu")
    run = RunFolder(trunk)
    (trial,) = result.grid(plan.arms[0]).trials
    loss = trial.loss
    for name in ("DONE", "DIVERGED"):
        (trunk / "DONE").unlink(missing_ok=True)
        if name == "DIVERGED":
            run.record_divergence("beyond")
        again = Sweep(plan, tmp_path, device="cpu").trial(plan.arms[0], 0.02, 0)
        assert again.trunk is not None
        assert again.trunk.finished
        assert again.done
        assert not again.diverged
        assert again.loss == loss


def test_a_trunk_that_diverged_on_its_way_is_a_diverged_trial(plan, tmp_path) -> None:
    result = sweep(plan, tmp_path)
    (trunk,) = trunks(tmp_path)
    (trunk / "DONE").unlink()
    RunFolder(trunk).record_divergence("on the way")
    assert result.trial(plan.arms[0], 0.02, 0).diverged
