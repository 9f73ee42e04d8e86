"""Faults and bad input: the error is clear, and the last good state stays."""

import json
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch

from angular_lab.cli.main import main
from angular_lab.models.base import LanguageModel
from angular_lab.models.moe import MoE
from angular_lab.run_folder import RunFolder, read_run
from angular_lab.sample import load_run
from angular_lab.training import checkpoint, trainer
from angular_lab.training import recorded_passes as passes
from angular_lab.training.nonfinite import NotFinite, OnHost
from angular_lab.training.ranks import Ranks
from angular_lab.training.start import branch_spec, train
from angular_lab.training.trainer import Trainer
from tests.lab.runs import SMALL, lines, stopped_copy, tiny

POISON = 255  # a byte that no UTF-8 text contains


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sixth batch holds a token whose embedding is not a number."""
    embed, batch = LanguageModel.embed, Trainer.batch

    def bad_embed(self, tokens):
        return embed(self, tokens).masked_fill((tokens == POISON).unsqueeze(-1), torch.nan)

    def bad_batch(self, step):
        tokens, targets = batch(self, step)
        if step == 5:
            tokens[0, 0] = POISON
        return tokens, targets

    monkeypatch.setattr(LanguageModel, "embed", bad_embed)
    monkeypatch.setattr(Trainer, "batch", bad_batch)


@pytest.mark.usefixtures("poisoned")
def test_a_loss_that_is_not_finite_stops_before_it_reaches_the_weights(data, tmp_path) -> None:
    out = tmp_path / "run"
    with pytest.raises(NotFinite, match=r"step 6 .*layers\.0\..*checkpoint is step 4"):
        train(tiny(data), out)
    assert checkpoint.steps(out / "checkpoints") == [4]
    assert not RunFolder(out).done


@pytest.mark.usefixtures("poisoned")
def test_on_nan_skip_drops_the_batch_and_counts_it(data, tmp_path) -> None:
    out = tmp_path / "run"
    train(tiny(data, on_nan="skip"), out)
    parsed = [json.loads(line) for line in lines(out)]
    assert parsed[5]["loss"] is None
    assert [line.get("skipped", 0) for line in parsed] == [0] * 5 + [1] * 7
    assert all(line["loss"] < 7 for line in parsed[6:])


@pytest.mark.usefixtures("poisoned")
def test_a_skip_right_after_a_checkpoint_resumes_exactly(data, tmp_path) -> None:
    """Steps are saved every five, the sixth is skipped, and its angle would be due."""
    spec = tiny(data, on_nan="skip", save_every=5, angle_every=6, keep=9)
    train(spec, tmp_path / "skipping")
    out = stopped_copy(tmp_path / "skipping", tmp_path / "run", 5)
    train(spec, out, resume=True)
    assert lines(out) == lines(tmp_path / "skipping")


def test_a_save_before_the_first_step_has_all_state(data, tmp_path, monkeypatch) -> None:
    """All batches so far were skipped, and recorded passes keep gradients in place."""
    monkeypatch.setattr(trainer, "can_record", lambda *_: True)
    monkeypatch.setattr(passes, "WARM_UP", 10**9)
    in_place: list[bool] = []

    def skip(self, *_) -> bool:
        self.skipped += 1
        self.host_norm = OnHost(torch.zeros(()))
        self.passes.clear()
        return False

    save = Trainer.save

    def watch(self) -> None:
        before = [p.grad for p in self.model.parameters()]
        save(self)
        in_place.extend(p.grad is g for p, g in zip(self.model.parameters(), before, strict=True))

    monkeypatch.setattr(Trainer, "save", watch)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "is_finite", skip)
        train(tiny(data), tmp_path / "skipping")
    assert in_place
    assert all(in_place)
    out = stopped_copy(tmp_path / "skipping", tmp_path / "run", 9)
    train(tiny(data), out, resume=True)
    assert RunFolder(out).done


@pytest.mark.usefixtures("poisoned")
def test_experts_are_balanced_by_the_batches_that_count(data, tmp_path, monkeypatch) -> None:
    loads = []
    balance = MoE.balance

    def watch(self):
        loads.append(int(sum(load.sum() for load in self.loads())))
        balance(self)

    monkeypatch.setattr(MoE, "balance", watch)
    spec = tiny(data, on_nan="skip")
    experts = {"kind": "moe", "experts": 4, "experts_per_token": 2, "expert_mlp": 16}
    model = type(spec.model)(**{**spec.model.__dict__, **experts})
    train(tiny(data, on_nan="skip", model=model), tmp_path / "run")
    assert loads == [4 * 32 * 2 * 2] * 11  # sequences x tokens x experts per token x layers


def test_weights_that_are_not_finite_are_never_saved(data, tmp_path, monkeypatch) -> None:
    update = Trainer.update

    def spoil(self):
        update(self)
        if self.step == 7:
            with torch.no_grad():
                self.model.layers[0].mlp.down.weight[0, 0] = torch.inf

    monkeypatch.setattr(Trainer, "update", spoil)
    with pytest.raises(NotFinite, match=r"not saved. The newest checkpoint is step 4"):
        train(tiny(data, log_every=1000, eval_every=None, angle_every=None), tmp_path / "run")


@pytest.mark.usefixtures("poisoned")
def test_a_run_that_diverges_before_its_first_checkpoint(data, tmp_path) -> None:
    with pytest.raises(NotFinite, match=r"There is no checkpoint; lower"):
        train(tiny(data, save_every=None), tmp_path / "run")


@pytest.mark.usefixtures("poisoned")
def test_a_run_that_diverged_leaves_a_record(data, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    assert main(["train", "nano", f"data={data}", *SMALL, "--out", str(out)]) == 3
    record = (out / "DIVERGED").read_text()
    assert record == capsys.readouterr().err.splitlines()[-1].removeprefix("error: ") + "\n"
    assert "loss of step 6 is nan" in record
    run = read_run(out, [])
    assert run is not None
    assert run.diverged


def test_a_run_that_diverged_and_continues_removes_the_record(data, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", lambda self: _raise(NotFinite("bad luck")))
        with pytest.raises(NotFinite):
            train(tiny(data, save_every=2), tmp_path / "run")
    assert (tmp_path / "run" / "DIVERGED").read_text() == "bad luck\n"
    train(tiny(data, save_every=2), tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "DIVERGED").exists()


def _raise(error: Exception) -> None:
    raise error


def test_a_crash_before_the_first_step_does_not_block_the_same_command(
    data, tmp_path, monkeypatch
) -> None:
    out = tmp_path / "run"
    command = ["train", "nano", f"data={data}", *SMALL, "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(
            Trainer, "forward_backward", lambda *_: _raise(RuntimeError("CUDA out of memory"))
        )
        with pytest.raises(RuntimeError, match="out of memory"):
            main(command)
    assert main([*command, "batch=1"]) == 0, "nothing was trained with the other batch"
    assert RunFolder(out).read_spec().batch == 1


def test_a_kill_before_the_first_step_does_not_block_the_same_command(data, tmp_path) -> None:
    """SIGKILL leaves what was written so far."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "LOCK").touch()
    RunFolder(out).write_spec(tiny(data, steps=3), {})
    train(tiny(data, steps=2), out)
    assert RunFolder(out).read_spec().steps == 2


@pytest.mark.parametrize("trace", ["metrics.jsonl", "checkpoints/step_00000004", "DIVERGED"])
def test_a_run_that_has_begun_is_not_overwritten(data, tmp_path, trace) -> None:
    """By its log, a checkpoint, or the record of its end."""
    out = tmp_path / "run"
    (out / trace).parent.mkdir(parents=True)
    RunFolder(out).write_spec(tiny(data), {})
    (out / trace).write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="holds a run already"):
        train(tiny(data), out)


def test_a_full_disk_leaves_the_last_good_checkpoint(data, tmp_path) -> None:
    """The kernel refuses to write large files, as it would on a full disk."""
    out = tmp_path / "run"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    calls = []
    save = checkpoint.dcp.save

    def save_on_a_full_disk(*arguments, **values):
        calls.append(1)
        if len(calls) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            return save(*arguments, **values)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.dcp, "save", save_on_a_full_disk)
        with pytest.raises(OSError, match=r"step 8 could not be written.*last good one is step 4"):
            train(tiny(data), out)
    assert checkpoint.steps(out / "checkpoints") == [4]
    train(tiny(data), out, resume=True)
    assert RunFolder(out).done


def test_a_folder_in_use_is_rejected(data, tmp_path) -> None:
    first = RunFolder(tmp_path / "run")
    first.claim()
    with pytest.raises(ValueError, match="in use by another process"):
        train(tiny(data), tmp_path / "run")
    first.release()
    train(tiny(data, steps=2), tmp_path / "run")


def test_an_existing_run_needs_resume_and_the_same_spec(data, tmp_path) -> None:
    train(tiny(data, steps=2), tmp_path / "run")
    with pytest.raises(ValueError, match="--resume auto"):
        train(tiny(data, steps=2), tmp_path / "run")
    with pytest.raises(ValueError, match=r"started with steps=2 \(now 3\)"):
        train(tiny(data, steps=3), tmp_path / "run", resume=True)
    before = lines(tmp_path / "run")
    train(tiny(data, steps=2), tmp_path / "run", resume=True)
    assert lines(tmp_path / "run") == before, "a finished run is left alone"


def test_model_and_batch_must_fit_the_data(data, tmp_path) -> None:
    spec = tiny(data)
    small = type(spec.model)(**{**spec.model.__dict__, "vocabulary": 64})
    with pytest.raises(ValueError, match="64"):
        train(tiny(data, model=small), tmp_path / "a")
    with pytest.raises(ValueError, match="no such folder"):
        train(tiny(tmp_path / "nowhere"), tmp_path / "b")
    with pytest.raises(ValueError, match="batch"):
        train(tiny(data, batch=10**9), tmp_path / "c")


def _spoil_gradient(monkeypatch, at: int) -> None:
    """The loss of step `at` is finite, one entry of its gradient is not."""
    forward_backward = Trainer.forward_backward

    def spoil(self, tokens, targets):
        loss = forward_backward(self, tokens, targets)
        if self.step + 1 == at:
            self.model.layers[1].mlp.down.weight.grad[0, 0] = torch.inf
        return loss

    monkeypatch.setattr(Trainer, "forward_backward", spoil)


def test_a_gradient_that_is_not_finite_stops_and_is_not_saved(data, tmp_path, monkeypatch) -> None:
    _spoil_gradient(monkeypatch, at=6)
    with pytest.raises(NotFinite, match=r"step 4") as error:
        train(tiny(data), tmp_path / "run")
    assert "gradient of step 6" in str(error.value) or "loss of step 7" in str(error.value)
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [4]


def test_a_gradient_that_is_not_finite_can_be_skipped(data, tmp_path, monkeypatch) -> None:
    _spoil_gradient(monkeypatch, at=6)
    train(tiny(data, on_nan="skip"), tmp_path / "run")
    parsed = [json.loads(line) for line in lines(tmp_path / "run")]
    assert parsed[-1]["skipped"] == 1
    assert parsed[5]["grad_norm"] is None
    assert all(line["loss"] < 7 for line in parsed)


def test_validation_shorter_than_a_sequence(data, tmp_path) -> None:
    spec = tiny(data)
    long = type(spec.model)(**{**spec.model.__dict__, "sequence": 250_000})
    with pytest.raises(ValueError, match=r"validation split .* is shorter than one sequence"):
        train(tiny(data, model=long, batch=1), tmp_path / "run")


def test_a_line_that_does_not_fit_on_the_disk_is_removed(tmp_path) -> None:
    run = RunFolder(tmp_path)
    run.append(run.metrics_path, {"step": 1, "tokens": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, before[1]))
    try:
        with pytest.raises(OSError, match="full"):
            run.append(run.metrics_path, {"step": 2, "loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run.append(run.metrics_path, {"step": 3, "tokens": 3})
    assert [line.step for line in run.read_metrics()] == [1, 3]


def test_branches_that_cannot_start(whole, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint at step 5: it keeps \[4, 8, 9, 12\]; pin"):
        branch_spec(RunFolder(whole), 5, 2)
    with pytest.raises(ValueError, match="at least one"):
        branch_spec(RunFolder(whole), 9, 0)
    with pytest.raises(ValueError, match=r"at step 12 the learning rate of .* from step 9 on"):
        branch_spec(RunFolder(whole), 12, 2)
    with pytest.raises(ValueError, match="is not a run folder"):
        branch_spec(RunFolder(tmp_path), 8, 2)


class Evil:
    """What a poisoned checkpoint would contain."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_loading_executes_no_code(whole, tmp_path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    folder = checkpoint.step_folder(tmp_path / "run" / "checkpoints", 12)
    trap = tmp_path / "trap"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(trap)))
    (folder / checkpoint.HASHES).unlink()  # or with hashes that match
    with pytest.raises(Exception, match="refused"):
        load_run(tmp_path / "run")
    assert not trap.exists()


def test_plain_values_in_a_checkpoint_are_unpickled_safely(whole, monkeypatch) -> None:
    loaded = []
    load = torch.load

    def watch(*arguments, **values):
        loaded.append(values.get("weights_only"))
        return load(*arguments, **values)

    monkeypatch.setattr(torch, "load", watch)
    load_run(whole)
    assert loaded
    assert all(loaded)


def test_one_rank_needs_no_collectives() -> None:
    ranks = Ranks(0, 1, torch.device("cpu"))
    assert ranks.any(True)
    assert not ranks.any(False)
    assert ranks.mean(torch.tensor(3.0)) == 3.0
