"""benchmarks/finetune.py: the search, the adapters, and a whole study of a tiny model."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from angular_lab.training.start import train
from angular_muown import plan
from tests.lab.runs import tiny
from tests.lab.tiny import SPECS, scrambled, text

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import finetune  # noqa: E402
from finetune_trial import METHODS, adapt, make_optimizer, schedule  # noqa: E402


def parabola(best: float) -> tuple[list[float], finetune.Losses]:
    """Return losses with a minimum, and the values that were asked for."""
    asked: list[float] = []

    def losses(wanted: list[finetune.Settings]) -> list[float]:
        asked.extend(s["lr"] for s in wanted if s["lr"] not in asked)
        return [math.log(s["lr"] / best) ** 2 for s in wanted]

    return asked, losses


@pytest.mark.parametrize("best", [0.1, 1.0, 8.0])
def test_a_grid_grows_until_its_best_is_inside(best: float) -> None:
    asked, losses = parabola(best)
    chosen = finetune.closed({"lr": 1.0, "aux_lr": 3.0}, "lr", 2, losses)
    assert chosen["aux_lr"] == 3.0
    assert abs(math.log2(chosen["lr"] / best)) <= 0.5
    assert min(asked) < chosen["lr"] < max(asked)


def test_a_grid_stops_growing_at_the_limit() -> None:
    asked, losses = parabola(1000.0)
    assert finetune.closed({"lr": 1.0}, "lr", 2, losses, 2)["lr"] == 8.0
    assert asked == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_adapters_change_nothing_until_they_are_trained() -> None:
    model, batch = scrambled(SPECS["dense"]), text()
    frozen = model.embedding.weight.clone()
    before = model(*batch).detach()
    adapters = adapt(model, rank=4)
    for adapter in adapters:
        adapter.reset(torch.Generator().manual_seed(0))
    assert torch.equal(model(*batch), before)
    assert len(adapters) == 4 * SPECS["dense"].layers
    optimizer = make_optimizer(
        model, METHODS["AngularMuown, LoRA"], {"lr": 0.1, "radius_lr": 0.1}, steps=10
    )
    for _ in range(2):  # A has no gradient until B has moved
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model(*batch) < before - 0.01
    assert torch.equal(model.embedding.weight, frozen)
    roles = {group["algorithm"] for group in plan(model)}
    assert roles == {"matrix"}


def test_adamw_has_its_own_rates_for_the_embedding_and_for_b() -> None:
    model = scrambled(SPECS["dense"])
    full = make_optimizer(model, METHODS["AdamW, full"], {"lr": 1.0, "aux_ratio": 3.0}, 10)
    rates = {group["params"][0].shape: group["lr"] for group in full.param_groups}
    assert rates[model.embedding.weight.shape] == 3.0
    assert rates[model.layers[0].mlp.down.weight.shape] == 1.0
    adapters = adapt(model, rank=4)
    lora = make_optimizer(model, METHODS["AdamW, LoRA"], {"lr": 1.0, "b_ratio": 3.0}, 10)
    rates = {id(group["params"][0]): group["lr"] for group in lora.param_groups}
    assert rates[id(adapters[0].lora_A.weight)] == 1.0
    assert rates[id(adapters[0].lora_B.weight)] == 3.0


def test_schedules_end_at_zero() -> None:
    linear, kappa = (
        schedule(METHODS[name], 100)
        for name in ("AngularMuown, full", "AngularMuown, full, WSD with kappa")
    )
    assert linear(4) == kappa(4) < 0.5  # the warm-up
    assert linear(55) == pytest.approx(0.5, abs=0.01)
    assert kappa(55) == 1.0
    assert linear(99) < 0.02
    assert kappa(99) < 0.06


def test_a_study_of_a_tiny_model(data: Path, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "study.json"
    train(tiny(data, steps=3, eval_every=None, angle_every=None), base, device="cpu")
    sizes = ["--steps=2", "--batch=2", "--rank=2", "--eval-tokens=64", "--extend=0", "--device=cpu"]
    methods = ["AdamW, full", "AngularMuown, LoRA"]
    command = [sys.executable, str(BENCHMARKS / "finetune.py"), str(base), "--text", str(data)]
    command += [*sizes, "--seeds", "0", "1", "2", "--json", str(out), "--methods", *methods]
    subprocess.run(command, check=True, timeout=300)
    content = json.loads(out.read_text())
    rows = {row["method"]: row for row in content["summary"]}
    assert {*rows} == {*methods}
    for name, row in rows.items():
        of_seed_0 = [t for t in content["trials"] if (t["method"], t["seed"]) == (name, 0)]
        assert len(of_seed_0) == row["trials_of_the_first_seed"] >= 5
        assert row["settings"] == min(of_seed_0, key=lambda t: t["loss"])["settings"]
        judges = [t for t in content["trials"] if t["method"] == name and t["seed"]]
        assert [t["seed"] for t in judges] == row["seeds"] == [1, 2]
        assert all(t["settings"] == row["settings"] for t in judges)
        low, high = row["loss"]["interval"]
        assert low < row["loss"]["mean"] < high
    assert content["base"]["loss"] != content["trials"][0]["loss"]
    assert rows["AdamW, full"]["loss"]["minus_adamw"] == 0
    assert "minus_adamw" not in rows["AngularMuown, LoRA"]["loss"]  # AdamW, LoRA did not run
