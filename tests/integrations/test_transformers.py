"""transformers' Trainer: the example pre-trains, resumes bit for bit and fine-tunes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
    get_scheduler,
)

from angular_muown import AngularMuown, Muon
from angular_muown.integrations.transformers import PlannedOptimizer, planned, wsd_arguments
from tests.integrations.scripts import load
from tests.library.models import tiny_lm

CLASSES = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}
STEPS = 40


def losses(trainer: Trainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def run(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param)
    return request.param, out, load("hf_pretrain").main(request.param, STEPS, str(out))


def test_pre_training_learns_with_the_planned_optimizer(run) -> None:
    name, _, trainer = run
    history = losses(trainer)
    assert history[STEPS] < 0.7 * history[5]
    optimizer = trainer.optimizer.optimizer  # inside accelerate's wrapper
    assert type(optimizer) is AngularMuown
    rules = {name: g["algorithm"] for g in optimizer.param_groups for name in g["param_names"]}
    assert rules["model.embed_tokens.weight"] == "adamw"
    assert rules["model.layers.0.mlp.up_proj.weight"] == "matrix"
    assert ("lm_head.weight" in rules) == (name == "llama"), "Qwen2's head is tied here"
    steps = {group["step"] for group in optimizer.param_groups}
    assert steps == {STEPS}, "kappa counts optimizer steps, not micro-batches"


def test_a_resumed_run_equals_the_uninterrupted_run(run, tmp_path) -> None:
    name, out, uninterrupted = run
    checkpoint = out / f"checkpoint-{STEPS // 2}"
    resumed = load("hf_pretrain").main(name, STEPS, str(tmp_path), resume=str(checkpoint))
    assert losses(resumed) == losses(uninterrupted)
    pairs = zip(resumed.model.named_parameters(), uninterrupted.model.parameters(), strict=True)
    for (key, p), q in pairs:
        assert torch.equal(p, q), key


def test_fine_tuning_starts_from_the_checkpoint(run, tmp_path) -> None:
    name, out, before = run
    model = CLASSES[name].from_pretrained(out / f"checkpoint-{STEPS}")
    settings = {"model": model, "lr": 0.01, "aux_lr": 2e-3}
    after = losses(load("hf_pretrain").main(name, STEPS, str(tmp_path), **settings))
    assert after[5] < 1.05 * losses(before)[STEPS]
    assert after[STEPS] < 0.98 * after[5]


QUIET = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}


def test_the_trainer_constructs_the_optimizer_from_its_arguments(tmp_path: Path) -> None:
    example = load("hf_pretrain")
    arguments = TrainingArguments(str(tmp_path), **wsd_arguments(12, lr=0.03, warmup=3), **QUIET)
    chosen = planned(arguments=arguments, average=0.1)
    trainer = Trainer(
        example.build("llama"), arguments, train_dataset=example.Windows(32),
        optimizer_cls_and_kwargs=chosen,
    )  # fmt: skip
    trainer.train()
    optimizer = trainer.optimizer.optimizer  # inside accelerate's wrapper
    assert {group["base_lr"] for group in optimizer.param_groups} == {0.03}
    assert {group["warmup_steps"] for group in optimizer.param_groups} == {3}
    assert {group["average"] for group in optimizer.param_groups} == {0.1}
    with optimizer.averaged():
        trainer.save_model()
    saved = dict(LlamaForCausalLM.from_pretrained(tmp_path).named_parameters())
    for name, p in trainer.model.named_parameters():
        assert torch.equal(saved[name], optimizer.state[p]["average"]), name
        assert not torch.equal(saved[name], p), name


def test_unused_values_of_the_arguments_are_reported(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), weight_decay=0.1, **wsd_arguments(10), **QUIET)
    with pytest.warns(UserWarning, match=r"weight_decay=0.1 is not used: pass aux_weight_decay="):
        planned(arguments=arguments)
    _, settings = planned(arguments=arguments, aux_weight_decay=0.1)  # a choice was made
    assert settings["lr"] == 0.02
    arguments = TrainingArguments(str(tmp_path), max_steps=10, **QUIET)
    with pytest.warns(UserWarning, match=r"learning_rate=5e-05 is not used: lr=0.02 is"):
        _, settings = planned(arguments=arguments, lr=0.02)
    assert settings["lr"] == 0.02
    arguments = TrainingArguments(str(tmp_path), warmup_steps=0.1, **QUIET)
    with pytest.raises(ValueError, match=r"arguments.warmup_steps=0.1 is a fraction, and .*max_st"):
        planned(arguments=arguments)


def test_wsd_is_linear_on_both_sides() -> None:
    arguments = wsd_arguments(20, lr=1.0, warmup=4, cooldown=0.25)
    assert arguments["learning_rate"] == 1.0
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(
        arguments["lr_scheduler_type"],
        optimizer,
        num_warmup_steps=arguments["warmup_steps"],
        num_training_steps=arguments["max_steps"],
        scheduler_specific_kwargs=arguments["lr_scheduler_kwargs"],
    )
    for step in range(21):
        assert scheduler.get_last_lr()[0] == pytest.approx(min(step / 4, 1.0, (20 - step) / 5))
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(("warmup", "cooldown"), [(4, 7), (-1, 2), (0, 11)])
def test_wsd_phases_longer_than_the_run_are_rejected(warmup, cooldown) -> None:
    with pytest.raises(ValueError, match=f"warmup={warmup}.*(do not fit|is not valid)|fit into"):
        wsd_arguments(10, warmup=warmup, cooldown=cooldown)


def test_settings_reach_the_plan_and_the_optimizer() -> None:
    settings = {"blocks": {"*.qkv.weight": 3}, "aux_lr": 1e-3, "lr": 0.01, "momentum": 0.8}
    factory, arguments = planned(Muon, **settings)
    optimizer = factory()(tiny_lm(), **arguments)
    assert type(optimizer) is Muon
    groups = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert groups["layers.0.attn.qkv.weight"]["blocks"] == 3
    assert groups["layers.0.attn.qkv.weight"]["lr"] == 0.01
    assert groups["embedding.weight"]["lr"] == 1e-3
    assert {group["momentum"] for group in optimizer.param_groups} == {0.8}
    with pytest.raises(TypeError, match="learning_rate"):
        PlannedOptimizer()(tiny_lm(), blocks={"*.qkv.weight": 3}, learning_rate=0.01)


def test_the_host_is_not_imported() -> None:
    code = (
        "import sys, angular_muown\n"
        "assert not any('integrations' in name for name in sys.modules)\n"
        "import angular_muown.integrations.transformers\n"
        "assert not {'transformers', 'accelerate', 'peft', 'trl'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
