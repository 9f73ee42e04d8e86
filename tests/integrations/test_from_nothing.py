"""The examples that need torch only: a plain loop, a comparison, fine-tuning, FSDP2 by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.scripts import EXAMPLES, assert_falls, load


def test_the_plain_loop_learns_and_prints_angle_and_kappa(capsys) -> None:
    losses = load("plain_loop").main(steps=60)
    assert_falls(losses, 0.65)
    printed = capsys.readouterr().out
    assert "blocks.*.qkv.weight x2" in printed, "the plan, with layers collapsed"
    assert "3 x rows" in printed
    kappas = [float(line.split("kappa")[1]) for line in printed.splitlines() if "kappa " in line]
    assert len(kappas) == 10
    assert kappas[0] == 1.0
    assert kappas == sorted(kappas, reverse=True)
    assert kappas[-1] == pytest.approx(1 / (1 + 1e-3 * 48), abs=0.005), "54 steps, 6 of warm-up"


def test_the_adamw_line_stands_next_to_its_replacement() -> None:
    source = (EXAMPLES / "plain_loop.py").read_text()
    commented, replacement = (
        source.index("# optimizer = torch.optim.AdamW("),
        source.index("    optimizer = AngularMuown.for_model("),
    )
    assert 0 < replacement - commented < 100


def test_the_comparison_prints_a_table(monkeypatch, capsys) -> None:
    example = load("first_comparison")
    grids = {name: (make, rates[:2]) for name, (make, rates) in example.GRIDS.items()}
    monkeypatch.setattr(example, "GRIDS", grids)
    losses = example.main(steps=20, seeds=[1])
    assert {name: len(by_lr) for name, by_lr in losses.items()} == {"AdamW": 2, "AngularMuown": 2}
    assert all(1 < loss < 5 for by_lr in losses.values() for loss in by_lr.values())
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| A")]
    best = min(losses["AdamW"], key=losses["AdamW"].get)
    assert f"| AdamW | {best:g} | {losses['AdamW'][best]:.3f} | no: extend it |" in table


@pytest.mark.parametrize("optimizer", ["angular_muown", "adamw"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_fine_tuning_lowers_the_loss_on_the_new_text(optimizer, lora) -> None:
    found = load("finetune").main(optimizer, lora, steps=30)
    assert found["after"][0] < found["before"][0] - 0.02


# torch 2.13: if one of gloo's threads still holds the tensor of the last sum when Python exits, it
# waits for the interpreter lock and aborts the process, after all of its work. Not ours to mend.
GLOO_ABORT, ATTEMPTS = "terminate called without an active exception", 3


def torchrun(ranks: int, out: Path, *words: str) -> dict[int, float]:
    """Run the FSDP2 example and return the losses that it prints, by step."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*start, f"--nproc-per-node={ranks}", str(EXAMPLES / "fsdp2.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for _ in range(ATTEMPTS):
        run = subprocess.run(
            [*command, "--out", str(out), "--steps", "20", *words],
            env=environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        if not (run.returncode and GLOO_ABORT in run.stderr and "\nstep   15 " in run.stdout):
            break
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("step ")]
    return {int(words[1]): float(words[3]) for words in lines}


def test_two_ranks_save_with_fsdp2_and_any_number_of_ranks_resumes(tmp_path) -> None:
    losses = torchrun(2, tmp_path)
    assert_falls([*losses.values()], 0.7)
    for ranks in (2, 1):
        resumed = torchrun(ranks, tmp_path, "--resume")
        second_half = {step: loss for step, loss in losses.items() if step >= 10}
        assert resumed == pytest.approx(second_half, abs=2e-3), ranks
