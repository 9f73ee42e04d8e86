"""TRL's SFTTrainer on all weights and on LoRA adapters: how A and B are planned, how B starts."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from angular_muown import AngularMuown, plan
from tests.integrations.scripts import load

TARGETS = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def with_adapters() -> PeftModel:
    torch.manual_seed(0)
    return get_peft_model(load("trl_sft").build_model(30), LoraConfig(r=4, **TARGETS))


def backward(model) -> None:
    tokens = torch.randint(30, (4, 8), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens).loss.backward()


def test_all_weights_and_adapters_learn_and_adapters_resume(tmp_path) -> None:
    full, adapted = load("trl_sft").main(40, str(tmp_path / "a"))
    for trainer in (full, adapted):
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[-1] < 0.75 * losses[0]
        assert type(trainer.optimizer.optimizer) is AngularMuown
    assert {group["step"] for group in adapted.optimizer.optimizer.param_groups} == {40}
    assert all(p.requires_grad == ("lora_" in n) for n, p in adapted.model.named_parameters())
    resume = str(tmp_path / "a" / "checkpoint-20")
    _, resumed = load("trl_sft").main(40, str(tmp_path / "b"), resume)
    for (name, p), q in zip(
        adapted.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(p, q), name


def test_both_factors_are_matrices_and_a_frozen_head_is_not_reported_missing() -> None:
    groups = plan(with_adapters())
    names = [name for group in groups for name, _ in group["params"]]
    assert {group["algorithm"] for group in groups} == {"matrix"}
    assert {name.split(".")[-3] for name in names} == {"lora_A", "lora_B"}


def test_adapters_of_embeddings_and_heads_go_to_adamw() -> None:
    layers = {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]}
    model = get_peft_model(load("trl_sft").build_model(30), LoraConfig(r=4, **layers))
    rules = {name: group["algorithm"] for group in plan(model) for name, _ in group["params"]}
    for name, rule in rules.items():
        assert rule == ("matrix" if "q_proj" in name else "adamw"), name
    assert any("lora_embedding_B" in name for name in rules)
    assert any("lm_head" in name for name in rules)


@pytest.mark.parametrize("radius_lr", [1e-2, 1e-3])
def test_b_leaves_zero_continuously(radius_lr) -> None:
    """Its rows start along steepest descent, by about one learning rate per step."""
    model = with_adapters()
    optimizer = AngularMuown(plan(model, radius_lr=radius_lr), lr=0.02)
    factors = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in factors.items()}
    backward(model)
    gradients = {name: p.grad.clone() for name, p in factors.items()}
    optimizer.step()
    for name, p in factors.items():
        change = (p - before[name]).detach()
        if "lora_A" in name:
            assert not gradients[name].any(), "B is zero, so A has no gradient yet"
            assert change.norm(dim=1).max() <= 1e-6
            continue
        assert not before[name].any()
        torch.testing.assert_close(
            change.norm(dim=1), torch.full((len(p),), radius_lr), rtol=1e-3, atol=0.0
        )
        cosine = torch.cosine_similarity(change, -gradients[name], dim=1)
        torch.testing.assert_close(cosine, torch.ones(len(p)))
    for _ in range(5):
        optimizer.zero_grad()
        backward(model)
        start = {name: p.detach().clone() for name, p in factors.items()}
        optimizer.step()
        for name, p in factors.items():
            if "lora_B" in name:  # its length changes by at most radius_lr, its direction by lr
                bound = 1.5 * radius_lr + 0.03 * p.norm(dim=1).max()
                assert (p - start[name]).norm(dim=1).max() <= bound, name
