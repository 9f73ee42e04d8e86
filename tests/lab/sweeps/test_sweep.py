"""Sweeps: every run once, whatever happens, and each one as if it were alone."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from angular_lab.config.spec import Spec
from angular_lab.errors import UserError
from angular_lab.experiments.comparison import experiment
from angular_lab.experiments.definition import cooldown_variant
from angular_lab.run_folder import RunFolder
from angular_lab.sweeps import sweep as sweep_module
from angular_lab.sweeps.sweep import Sweep, run_sweeps
from angular_lab.training import checkpoint
from angular_lab.training.ranks import start_ranks
from angular_lab.training.signals import Preempted
from angular_lab.training.start import train
from angular_lab.training.trainer import Trainer
from tests.lab.runs import LIMIT
from tests.lab.sweeps.small import KAPPA_1, metrics, record, small, sweep


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs that sweeps train, in order."""
    names: list[str] = []

    def note(spec: Spec, run: RunFolder, *args: Any) -> RunFolder:
        names.append(run.path.name)
        return train(spec, run, *args)

    monkeypatch.setattr(sweep_module, "train", note)
    return names


def test_one_seed_chooses_and_the_others_judge(data: Path, tmp_path: Path) -> None:
    sweep(small(data), tmp_path)
    result = record(tmp_path)
    assert [(trial.arm, trial.value, trial.seed) for trial in result.trials] == [
        *[("adamw", value, 0) for value in (1e-3, 2e-3, 4e-3)],
        ("adamw", result.chosen["adamw"], 1),
        (KAPPA_1, 0.02, 0),
        (KAPPA_1, 0.02, 1),
    ]
    losses = {}
    for trial in result.trials:
        for horizon, name in trial.runs.items():
            run = RunFolder(tmp_path / "runs" / name)
            assert run.done
            assert run.read_spec().steps == horizon
            assert run.read_spec().parent == trial.trunk
        if (trial.arm, trial.seed) == ("adamw", 0):
            losses[trial.value] = run.read_metrics()[-1].get("val_loss")
    assert result.chosen["adamw"] == min(losses, key=losses.__getitem__)


def test_runs_that_share_a_model_are_as_if_alone(data: Path, tmp_path: Path) -> None:
    sweep(small(data, horizons=(6,)), tmp_path)
    for name, content in metrics(tmp_path).items():
        spec = RunFolder(tmp_path / "runs" / name).read_spec()
        train(spec, tmp_path / "alone" / name, device="cpu")
        assert (tmp_path / "alone" / name / "metrics.jsonl").read_bytes() == content


def test_sweeps_that_share_runs_train_them_once(
    data: Path, tmp_path: Path, trained: list[str]
) -> None:
    """A straight run that another sweep has as a cooldown off a trunk counts as finished."""
    plan = small(data)
    other = replace(plan, name="other", horizons=(8,))
    sweep(plan, tmp_path)
    made = [*trained]
    assert len({*made}) == len(made)
    sweep(other, tmp_path)
    assert trained == made
    result, shared = record(tmp_path), record(tmp_path, "other-nano")
    assert [trial.runs[8] for trial in shared.trials] == [trial.runs[8] for trial in result.trials]
    assert [trial.trunk for trial in shared.trials] == [None] * 6


def test_a_straight_run_serves_as_a_cooldown(
    data: Path, tmp_path: Path, trained: list[str]
) -> None:
    plan = small(data, seeds=(0,), arms=small(data).arms[1:])
    sweep(replace(plan, name="straight", horizons=(8,)), tmp_path)
    (straight,) = trained
    sweep(plan, tmp_path)
    assert trained.count(straight) == 1
    assert len(trained) == 3, "the trunk and the other cooldown are new"


def test_a_run_with_a_default_spelled_out_serves_a_sweep(
    data: Path, tmp_path: Path, trained: list[str]
) -> None:
    """It used to be refused: "made with optim.aux_beta2=0.95, and this sweep needs None"."""
    plan = small(data, horizons=(4,), seeds=(0,))
    arms = [
        replace(arm, spec=replace(arm.spec, optim=replace(arm.spec.optim, aux_beta2=0.95)))
        for arm in plan.arms
    ]
    sweep(replace(plan, name="spelled-out", arms=tuple(arms)), tmp_path)
    made = [*trained]
    sweep(plan, tmp_path)
    assert trained == made


def test_the_data_is_known_by_its_tokens_not_by_its_path(
    data: Path, tmp_path: Path, trained: list[str]
) -> None:
    plan = small(data, horizons=(4,))
    sweep(plan, tmp_path)
    made = [*trained]
    (tmp_path / "link").symlink_to(data)
    again = Sweep(plan, tmp_path, str(tmp_path / "link"), device="cpu")
    run_sweeps([again])
    assert trained == made


def test_other_data_needs_another_name(data: Path, tmp_path: Path) -> None:
    plan = small(data, horizons=(4,), seeds=(0,))
    sweep(plan, tmp_path)
    other = Sweep(plan, tmp_path, device="cpu")
    other.data = "0123456789abcdef"
    with pytest.raises(UserError, match=r"small-nano.json was made with data .*--name"):
        run_sweeps([other])
    changed = Sweep(replace(plan, name="other"), tmp_path, device="cpu", name="small-nano")
    with pytest.raises(UserError, match="was made with experiment small, and this sweep has other"):
        run_sweeps([changed])
    with pytest.raises(UserError, match=r"--name a/b: it must be a plain file name"):
        Sweep(plan, tmp_path, name="a/b")


def test_a_run_continues_with_data_that_was_moved(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "before")
    plan = small(data, arms=small(data).arms[1:], seeds=(0,))
    begun = Sweep(plan, tmp_path, str(tmp_path / "before"), device="cpu")
    begun.until = 0.0
    with pytest.raises(Preempted):
        begun.try_make(begun.next_runs()[0])
    (tmp_path / "before").rename(tmp_path / "after")
    moved = Sweep(plan, tmp_path, str(tmp_path / "after"), device="cpu")
    run_sweeps([moved])
    assert moved.counts() == (1, 1)


def test_a_variant_leaves_the_same_trunk(data: Path, tmp_path: Path, trained: list[str]) -> None:
    """It takes the value chosen for its arm, and is the run that cools down for that long."""
    plan = small(data, horizons=(8, 16))
    plan = replace(plan, arms=(plan.arms[0], cooldown_variant(plan.arms[0], 0.5, 16)))
    finished = sweep(plan, tmp_path)
    result = record(tmp_path)
    assert sum("-trunk-" in name for name in trained) == 4
    chosen = finished.chosen["adamw"].lr
    extended = Sweep(replace(plan, arms=(plan.arms[0], plan.arms[1])), tmp_path)
    values = [trial.value for trial in extended.grid(plan.arms[1], extend=3).trials]
    assert values == [trial.value for trial in extended.grid(plan.arms[0], extend=3).trials]
    assert chosen in values
    assert list(result.chosen) == ["adamw"]
    label = plan.arms[1].label
    trials = [trial for trial in result.trials if trial.arm == label]
    assert [t.value for t in trials] == [1e-3, 2e-3, 4e-3, result.chosen["adamw"]]
    end = finished.trial(plan.arms[1], 1e-3, 0).ends[16]
    straight = replace(end.spec, parent=None, parent_step=0)
    train(straight, tmp_path / "straight", device="cpu")
    losses = [
        RunFolder(f).read_metrics()[-1].get("val_loss") for f in (end.folder, tmp_path / "straight")
    ]
    assert losses[0] == losses[1] != finished.trial(plan.arms[0], 1e-3, 0).loss


def test_cooldowns_start_from_memory(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a process no checkpoint is read. That the bytes are those of a process that reads one
    is what the next test shows."""
    monkeypatch.setattr(checkpoint, "load", lambda *_: pytest.fail("it read a checkpoint"))
    sweep(small(data), tmp_path)


def test_a_budget_stops_it_and_nothing_is_trained_twice(
    data: Path, tmp_path: Path, trained: list[str]
) -> None:
    """Stopped again and again, it ends with the bytes of one that ran through."""
    plan = small(data)
    sweep(plan, tmp_path / "whole")
    stops = 0
    for _ in range(200):
        try:
            sweep(plan, tmp_path / "pieces", budget=0.5)
            break
        except Preempted:
            stops += 1
    assert stops > 2
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "pieces")
    assert record(tmp_path / "whole") == record(tmp_path / "pieces")
    count = len(trained)
    sweep(plan, tmp_path / "pieces")
    assert len(trained) == count


def test_nothing_begins_once_the_time_is_over(data: Path, tmp_path: Path) -> None:
    with pytest.raises(Preempted, match="0 of 6 trials done, 6 left; run the same command"):
        sweep(small(data), tmp_path, budget=1e-9)
    assert not metrics(tmp_path)


def test_a_grid_is_extended_at_its_edge_on_request(data: Path, tmp_path: Path) -> None:
    low = replace(small(data).arms[0], values=(1e-5, 2e-5))
    plan = small(data, arms=(low,), horizons=(8,), seeds=(0,))
    flagged = sweep(plan, tmp_path)
    assert flagged.chosen["adamw"].extend == ("above",)
    extended = sweep(plan, tmp_path, extend=2)
    expected = pytest.approx((1e-5, 2e-5, 4e-5, 8e-5))
    assert record(tmp_path).arms[0].values == expected
    before = extended.path.read_bytes()
    again = sweep(plan, tmp_path)
    assert again.path.read_bytes() == before, "values that were added stay"
    assert again.chosen["adamw"].lr == pytest.approx(8e-5)
    again.path.unlink()
    assert sweep(plan, tmp_path, extend=2).path.read_bytes() == before, "it follows from the runs"


def test_a_run_that_diverges_is_a_result(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    high = replace(small(data).arms[0], values=(1e-3, 1e30))
    plan = small(data, arms=(high,), horizons=(4, 8), seeds=(0,))
    finished = sweep(plan, tmp_path)
    assert finished.chosen["adamw"].lr == 1e-3
    assert finished.counts() == (2, 2)
    assert finished.trial(high, 1e30, 0).diverged
    monkeypatch.setattr(sweep_module, "train", lambda *_: pytest.fail("it ran again"))
    sweep(plan, tmp_path)


def test_an_arm_whose_values_all_diverge_does_not_stop_the_others(
    data: Path, tmp_path: Path
) -> None:
    high, other = small(data).arms
    high = replace(high, values=(1e28, 1e30))
    plan = small(data, arms=(high, other), horizons=(8,))
    finished = sweep(plan, tmp_path)
    assert list(finished.chosen) == [other.label]
    assert finished.counts() == (4, 4)
    finished = sweep(plan, tmp_path, extend=1)
    assert record(tmp_path).arms[0].values == pytest.approx((1e26, 1e28, 1e30))


def test_a_single_value_has_no_choice_to_wait_for(data: Path, tmp_path: Path) -> None:
    plan = small(data, arms=small(data).arms[1:], seeds=(0, 1, 2))
    assert [trial.seed for trial in Sweep(plan, tmp_path).pending()] == [0, 1, 2]


def test_a_run_continues_as_it_began(data: Path, tmp_path: Path) -> None:
    """Settings that no loss depends on may have changed since."""
    plan = small(data, arms=small(data).arms[1:], seeds=(0,))
    begun = Sweep(plan, tmp_path, device="cpu")
    begun.until = 0.0
    with pytest.raises(Preempted):
        begun.try_make(begun.next_runs()[0])
    (arm,) = plan.arms
    other = replace(arm, spec=replace(arm.spec, log_every=5, eval_every=2))
    finished = sweep(replace(plan, arms=(other,)), tmp_path)
    trunk = finished.trial(other, 0.02, 0).trunk
    assert trunk is not None
    assert RunFolder(trunk.folder).read_spec().log_every == arm.spec.log_every


def test_trials_that_the_plan_no_longer_has_stay_listed(data: Path, tmp_path: Path) -> None:
    plan = small(data, horizons=(4,), seeds=(0,))
    sweep(plan, tmp_path)
    before = record(tmp_path)
    changed = replace(plan.arms[0], values=(2e-3, 8e-3))
    sweep(replace(plan, arms=(changed,)), tmp_path)
    after = record(tmp_path)
    assert all(trial in after.trials for trial in before.trials)
    assert [arm.label for arm in after.arms] == ["adamw", KAPPA_1]


def test_a_sweep_keeps_the_runs_it_refers_to(data: Path, tmp_path: Path) -> None:
    """Runs of the same settings that were trained twice are numbered."""
    plan = small(data, horizons=(4,), seeds=(0,), arms=small(data).arms[1:])
    finished = sweep(plan, tmp_path)
    (name,) = metrics(tmp_path)
    (tmp_path / "runs" / name).rename(tmp_path / "runs" / f"{name}-2")
    finished.path.write_text(finished.path.read_text().replace(name, f"{name}-2"))
    before = finished.path.read_bytes()
    sweep(plan, tmp_path)
    assert list(metrics(tmp_path)) == [f"{name}-2"]
    assert finished.path.read_bytes() == before


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '{"format": 2}'])
def test_a_damaged_file_is_written_anew(data: Path, tmp_path: Path, text: str) -> None:
    plan = small(data, horizons=(4,), seeds=(0,), arms=small(data).arms[1:])
    finished = sweep(plan, tmp_path)
    before = finished.path.read_bytes()
    finished.path.write_text(text)
    sweep(plan, tmp_path)
    assert finished.path.read_bytes() == before
    assert finished.path.with_suffix(".damaged").read_text() == text


def test_many_writers_one_file(data: Path, tmp_path: Path) -> None:
    plan = small(data)
    for trial in Sweep(plan, tmp_path).pending():
        trial.runs[0].folder.mkdir(parents=True)
    first = Sweep(plan, tmp_path)
    first.write()
    whole, stop, wrong = first.path.read_text(), threading.Event(), []

    def write() -> None:
        try:
            for _ in range(10):
                Sweep(plan, tmp_path).write()
        except BaseException as error:
            wrong.append(error)

    def read() -> None:
        while not stop.is_set():
            if first.path.read_text() != whole:
                wrong.append("half a file")

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write) for _ in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for writer in writers:
        writer.join()
    stop.set()
    reader.join()
    assert wrong == []
    assert len(record(tmp_path).trials) == 5


# -- other processes ---------------------------------------------------------------------------


class Log:
    """Messages of the sweeps; `act` is called with each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[str] = []
        self.act: Any = lambda _: None
        monkeypatch.setattr(sweep_module.log, "info", self.note)

    def note(self, message: str, *values: object) -> None:
        self.messages.append(message % values)
        self.act(self.messages[-1])


def test_runs_of_other_processes_are_waited_for(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test holds the lock of one value. Its arm's other seed waits, all else is made."""
    log, runner = Log(monkeypatch), Sweep(small(data), tmp_path, device="cpu")
    held = runner.pending()[1]
    assert held.trunk is not None
    lock, waiting = RunFolder(held.trunk.folder), threading.Event()
    done: list[int] = []
    log.act = lambda text: waiting.set() if "waiting" in text else None
    lock.claim()

    def let_go() -> None:
        if waiting.wait(LIMIT):
            done.append(sum(trial.done for trial in runner.pending()) + runner.counts()[0])
            time.sleep(1)
        lock.release()

    thread = threading.Thread(target=let_go, daemon=True)
    thread.start()
    run_sweeps([runner])
    thread.join()
    assert done == [4], "all but the held value and the judge of its arm"
    assert runner.counts() == (6, 6)
    assert sum("waiting" in text for text in log.messages) == 1


def test_no_sweep_waits_while_another_has_work(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, plan = Log(monkeypatch), small(data, horizons=(4,), seeds=(0,))
    first = Sweep(replace(plan, name="first", arms=plan.arms[:1]), tmp_path, device="cpu")
    second = Sweep(replace(plan, name="second", arms=plan.arms[1:]), tmp_path, device="cpu")
    locks = [RunFolder(run.folder) for run in first.next_runs()]
    for lock in locks:
        lock.claim()

    def stop(text: str) -> None:
        if "waiting" in text:
            raise Preempted(text)

    log.act = stop
    with pytest.raises(Preempted):
        run_sweeps([first, second])
    assert second.counts() == (1, 1)
    assert first.counts() == (0, 3)
    assert second.models is first.models, "one compiled model for all"


def test_a_run_finished_by_another_process_is_not_made_again(
    data: Path, tmp_path: Path, trained: list[str]
) -> None:
    runner = Sweep(small(data, horizons=(4,)), tmp_path, device="cpu")
    first, *_ = runner.next_runs()
    first.folder.mkdir(parents=True)
    train(first.spec, first.folder, device="cpu")
    assert not runner.try_make(first)
    assert trained == []
    run = RunFolder(first.folder)
    assert run.try_claim(), "it was released"
    run.release()


def test_a_run_of_the_cached_model_comes_first(
    data: Path, tmp_path: Path, trained: list[str]
) -> None:
    arm = small(data).arms[1]
    wide = replace(arm.spec, model=replace(arm.spec.model, width=48, mlp=96, heads=3))
    plan = small(data, arms=(arm, replace(arm, label="wide", spec=wide)), horizons=(4,))
    runner = Sweep(plan, tmp_path, device="cpu")
    runner.models.take(wide, start_ranks("cpu"))
    run_sweeps([runner])
    widths = [RunFolder(tmp_path / "runs" / name).read_spec().model.width for name in trained]
    assert widths == [48, 48, 32, 32]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's own
def test_each_shape_is_compiled_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that trains and one that evaluates, however many runs; also where torch would
    stop compiling, which is at the fifth shape and here at the second."""
    compile_, graphs = torch.nn.Module.compile, []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_(self, backend=backend))
    arm, arms, counts = small(data).arms[1], [], []
    for width in (16, 32):
        sizes = {"layers": 1, "width": width, "mlp": 2 * width, "heads": width // 16}
        spec = replace(arm.spec, model=replace(arm.spec.model, **sizes), compile=True)
        arms.append(replace(arm, label=f"d = {width}", spec=spec))
    torch.compiler.reset()

    def note(*arguments: Any) -> RunFolder:
        counts.append(len(graphs))
        return train(*arguments)

    monkeypatch.setattr(sweep_module, "train", note)
    # torch's own way: what monkeypatch sets on this module, it cannot restore
    with torch._dynamo.config.patch(recompile_limit=2):
        sweep(small(data, arms=tuple(arms), horizons=(4,)), tmp_path)
    assert [*counts, len(graphs)] == [0, 2, 2, 4, 4]


# -- interruptions -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_runs_counts(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It arrives while the second run is being set up: that run takes no step."""
    begin, count = Trainer.__init__, []

    def interrupted(self: Trainer, *arguments: Any) -> None:
        begin(self, *arguments)
        count.append(1)
        if len(count) == 2:
            os.kill(os.getpid(), number)

    plan = small(data, horizons=(8,))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__init__", interrupted)
        with pytest.raises(Preempted, match=r"lr0.002.* is saved"):
            sweep(plan, tmp_path / "a")
    assert [text.count(b"\n") for text in metrics(tmp_path / "a").values()] == [8]
    assert len(list(tmp_path.glob("a/runs/*/STOPPED"))) == 1
    sweep(plan, tmp_path / "a")
    sweep(plan, tmp_path / "b")
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_a_store_can_be_moved(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in a cooldown under a relative path, it continues under the absolute one, and
    after a move."""
    plan = small(data, arms=small(data).arms[1:], seeds=(0,))
    update = Trainer.update

    def stop(self: Trainer) -> None:
        update(self)
        if self.spec.parent and self.spec.steps == 8:
            self.until = 0.0

    monkeypatch.chdir(tmp_path)
    for out in (Path("store"), (tmp_path / "store").resolve()):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "update", stop)
            with pytest.raises(Preempted):
                sweep(plan, out)
    os.rename("store", "moved")
    sweep(plan, Path("moved"))
    sweep(plan, Path("whole"))
    assert metrics(Path("moved")) == metrics(Path("whole"))


def test_a_failed_run_is_not_tried_again_by_this_call(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Sweep(small(data, horizons=(4,), seeds=(0,)), tmp_path, device="cpu")
    runner.marks = tmp_path

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(sweep_module, "train", fail)
    runs: Sequence[Any] = runner.next_runs()
    with pytest.raises(RuntimeError):
        run_sweeps([runner])
    assert runner.next_runs() == runs[1:]
    assert len(runner.pending()) == len(runs)


def test_a_sweep_is_not_for_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"a sweep under torchrun: .*--processes N"):
        Sweep(experiment("teaser", "nano"), tmp_path)
