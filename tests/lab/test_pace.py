"""Optimizers take turns on one device; times are kept raw, and a shared device is marked."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from angular_lab.cli.main import main
from angular_lab.config.named_runs import named_run
from angular_lab.config.spec import OptimSpec
from angular_lab.pace import measure as measuring
from angular_lab.pace.disturbances import disturbances
from angular_lab.pace.measure import LEAD_IN, Contestant, measure, optimizer_spec, turns
from angular_lab.pace.record import Pace, Timed
from angular_lab.sample import load_run
from angular_lab.status.device_use import DeviceUse, look
from angular_lab.training.start import train
from tests.lab.runs import SMALL, tiny

NAMES = ("adamw", "muon", "angular_muown")
WARMUP, ROUNDS, STEPS = 5, 3, 3
TOTAL = WARMUP + ROUNDS * (LEAD_IN + STEPS)
IDLE = DeviceUse(load=0.1, cores=8)
BUSY = DeviceUse(load=0.1, cores=8, gpu=True, others=2, others_mib=900.0, utilization=99.0)
SMALL_PACE = ("--rounds", "2", "--steps", "1", "--warmup", "4", "--device", "cpu")


@pytest.fixture(scope="module")
def base(data: Path):
    return tiny(data, steps=TOTAL)


@pytest.fixture(scope="module")
def timed(base) -> tuple[Pace, dict[str, Contestant], list[str]]:
    """A pace, the optimizers after their last step, and whose steps were taken in which order."""
    contestants: dict[str, Contestant] = {}
    log: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        step, rounds = Contestant.step, measuring._rounds

        def keep(these, *arguments):
            contestants.update(these)
            return rounds(these, *arguments)

        patch.setattr(Contestant, "step", lambda self: (log.append(self.name), step(self)))
        patch.setattr(measuring, "_rounds", keep)
        patch.setattr(measuring, "look", lambda *_: IDLE)
        pace = measure(base, NAMES, ROUNDS, STEPS, WARMUP, device="cpu", seed=1)
    return pace, contestants, log


def test_optimizers_take_turns_in_an_order_that_changes(timed) -> None:
    pace, contestants, log = timed
    warm, rounds = log[: WARMUP * len(NAMES)], log[WARMUP * len(NAMES) :]
    assert warm == [name for name in NAMES for _ in range(WARMUP)]
    assert rounds == [
        name for order in pace.order for name in order for _ in range(LEAD_IN + STEPS)
    ]
    assert len(pace.order) == ROUNDS
    assert all(sorted(order) == sorted(NAMES) for order in pace.order)
    assert len({*pace.order}) > 1
    assert {c.trainer.step for c in contestants.values()} == {TOTAL}
    for result in pace.timed:
        assert [len(seconds) for seconds in result.seconds] == [STEPS] * ROUNDS
        assert all(x > 0 for seconds in result.seconds for x in seconds)


def test_the_order_follows_from_the_seed() -> None:
    assert turns(NAMES, 9, 3) == turns(NAMES, 9, 3) != turns(NAMES, 9, 4)
    firsts = [order[0] for order in turns(NAMES, 300, 0)]
    assert min(firsts.count(name) for name in NAMES) > 60


@pytest.mark.parametrize("name", NAMES)
def test_a_timed_step_is_a_step_of_train(timed, base, tmp_path, name) -> None:
    """To the bit, although the run also measures angles, evaluates and saves."""
    spec = replace(optimizer_spec(base, name), angle_every=3)
    train(spec, tmp_path / "run", device="cpu")
    model = load_run(tmp_path / "run")
    weights = timed[1][name].trainer.model.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key]), key


def test_the_file_has_every_time_and_reads_back(timed, tmp_path) -> None:
    pace = timed[0]
    path = pace.write(tmp_path / "pace")
    assert re.fullmatch(r"nano-[0-9a-f]{8}-cpu.json", path.name), "not as nano is"
    usual = replace(pace, spec=replace(named_run("nano"), steps=7))
    assert usual.write(tmp_path).name == "nano-cpu.json"
    assert Pace.read(path) == pace
    content = json.loads(path.read_text())
    assert content["versions"]["torch"] == torch.__version__
    assert {"commit", "changed"} <= content["git"].keys()
    assert content["data"]
    path.write_text(path.read_text().replace('"order"', '"odor"'))
    with pytest.raises(ValueError, match="cannot be read as a pace"):
        Pace.read(path)


def _quartiles(values: list[float]) -> list[float]:
    """Quartiles by linear interpolation between the sorted values."""
    ordered = sorted(values)
    places = [share * (len(ordered) - 1) for share in (0.25, 0.5, 0.75)]
    return [
        ordered[int(x)] + (x % 1) * (ordered[min(int(x) + 1, len(ordered) - 1)] - ordered[int(x)])
        for x in places
    ]


def test_numbers_follow_from_the_raw_times(timed, tmp_path) -> None:
    pace = timed[0]
    content = json.loads(pace.write(tmp_path).read_text())
    rounds = {
        x["optim"]["name"]: [sum(seconds) / len(seconds) for seconds in x["seconds"]]
        for x in content["timed"]
    }
    tokens = content["spec"]["batch"] * content["spec"]["model"]["sequence"]
    assert [row["optimizer"] for row in pace.rows()] == [*NAMES]
    for row in pace.rows():
        times = rounds[row["optimizer"]]
        assert [*row["ms"].values()] == pytest.approx([1e3 * x for x in _quartiles(times)])
        assert row["tokens_per_second"] == pytest.approx(tokens / _quartiles(times)[1])
        ratios = [a / b for a, b in zip(times, rounds["adamw"], strict=True)]
        assert [*row["time_ratio"].values()] == pytest.approx(_quartiles(ratios))


def test_a_pace_is_found_by_what_the_time_of_a_step_depends_on(base) -> None:
    seconds = ((1.0,), (1.0,))
    optims = [optimizer_spec(base, name).optim for name in NAMES]
    pace = _pace(base, [Timed(optim, seconds) for optim in optims])
    for changes in ({"steps": 99}, {"seed": 3}, {"angle_every": 1}, {"data": "x"}):
        assert pace.find(replace(base, **changes)) is pace.of("angular_muown")
    for changes in ({"batch": 8}, {"precision": "bf16"}, {"average": (3,)}, {"compile": True}):
        assert pace.find(replace(base, **changes)) is None
    assert pace.find(replace(base, optim=OptimSpec("muon", lr=9.0))) is pace.of("muon")
    assert pace.find(replace(base, optim=OptimSpec(orthogonalize="gram"))) is None
    assert pace.find(replace(base, optim=OptimSpec("normuon"))) is None


def _pace(base, timed, use=(IDLE, IDLE)) -> Pace:
    return Pace(
        spec=base, device="NVIDIA H200", reference="adamw", warmup=5, lead_in=2, order=(),
        timed=tuple(timed), threads=2, use=tuple(use), versions={}, git={}, data="tokens",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "during", "reason"),
    [
        (IDLE, IDLE, None),
        (replace(IDLE, load=6.4), IDLE, None),
        (replace(IDLE, load=6.6), IDLE, "a load of 6.6 before the start, and 2 of 8 cores"),
        (IDLE, replace(IDLE, load=8.4), None),
        (IDLE, replace(IDLE, load=8.6), "a load of up to 8.6 on 8 cores during the rounds"),
        (replace(BUSY, others=0, others_mib=0.0), IDLE, "busy 99% of the time before the start"),
        (IDLE, replace(BUSY, others=0), None),
        (IDLE, BUSY, "2 other processes on the GPU (900 MiB)"),
        (replace(IDLE, gpu=True, others=0, memory_mib=9e3), IDLE, "9,000 MiB of the GPU were in"),
        (replace(IDLE, gpu=True), IDLE, "nvidia-smi does not answer"),
        (replace(IDLE, gpu=True, memory_mib=600.0), IDLE, None),  # the list alone is missing
        (IDLE, replace(IDLE, gpu=True, memory_mib=9e3, own_mib=5e3), None),
        (IDLE, replace(IDLE, gpu=True, memory_mib=9e3, own_mib=4e3), "5,000 MiB of the GPU were"),
        (replace(IDLE, load=None), IDLE, "the load is unknown"),
    ],
)
def test_what_disturbs_a_measurement(before, during, reason) -> None:
    """Its own load and its own work on the GPU during the rounds do not."""
    found = disturbances(before, [during], threads=2)
    assert len(found) == (reason is not None)
    assert reason is None or reason in found[0]


NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *compute-apps*) printf '{apps}' ;;
  *) echo '{state}' ;;
esac
"""


@pytest.mark.parametrize(
    ("apps", "state", "others", "mib"),
    [
        ("GPU-1, OWN, 700\\n", "0, 800", 0, 0),
        ("GPU-1, OWN, 700\\nGPU-1, 77777, 512\\n", "35, 1300", 1, 512),
        ("GPU-1, 77777, [N/A]\\n", "0, 800", 0, 0),  # the host's number for this process
        ("GPU-1, 77777, 512\\nGPU-1, 88888, 256\\n", "0, 800", 1, None),
        ("", "0, 800", None, None),  # this process is missing, so others may be, too
        ("unreadable\\n", "0, 800", None, None),
    ],
)
def test_other_processes_are_counted(tmp_path, monkeypatch, apps, state, others, mib) -> None:
    program = tmp_path / "nvidia-smi"
    # not a part of the test's name, which has to be the same in all workers of pytest-xdist
    apps = apps.replace("OWN", str(os.getpid()))
    program.write_text(NVIDIA_SMI.format(apps=apps, state=state))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    use = look("GPU-1")
    assert (use.gpu, use.others, use.others_mib) == (True, others, mib)
    assert (use.utilization, use.memory_mib) == (*map(float, state.split(",")),)
    assert not look().gpu


def test_without_nvidia_smi_the_others_are_unknown(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    use = look("GPU-1", 7.0)
    assert (use.gpu, use.others, use.memory_mib, use.own_mib) == (True, None, None, 7.0)


def _command(data: Path, *options: str) -> list[str]:
    settings = ["pace", "nano", f"data={data}", *SMALL, "steps=10"]
    return [*settings, "--optimizers", "adamw,muon", *SMALL_PACE, *options]


def test_the_command_prints_factors_of_a_free_device_only(
    data, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring, "look", lambda *_: IDLE)
    assert main(_command(data)) == 0
    free = capsys.readouterr()
    assert "time / adamw's" in free.out
    assert "shared" not in free.out + free.err
    (file,) = Path("pace").glob("*.json")
    clean = file.read_bytes()
    monkeypatch.setattr(measuring, "look", lambda *_: BUSY)
    assert main(_command(data)) == 0
    shared = capsys.readouterr()
    assert "time / adamw's" not in shared.out
    assert "×" not in shared.out
    assert "warning: the device was shared: 2 other processes on the GPU" in shared.err
    assert file.read_bytes() == clean, "a shared measurement does not replace it"
    assert {path.stem.removeprefix(file.stem) for path in Path("pace").iterdir()} == {"", "-shared"}
    assert main(_command(data, "--allow-shared")) == 0
    assert "1.000× (shared)" in capsys.readouterr().out
    assert main(_command(data, "--json")) == 0
    summary = json.loads(capsys.readouterr().out)
    assert [row["time_ratio"] for row in summary["rows"]] == [None, None]
    assert len(summary["shared"]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optimizers", "adamw,sgd"], "--optimizers sgd: it must be all, or some of adamw"),
        (["--optimizers", "muon"], "--reference adamw is not among --optimizers"),
        (["--optimizers", "muon,muon", "--reference", "muon"], "each one once"),
        (["--rounds", "1"], "--rounds 1: it must be at least 2"),
        (["--warmup", "3"], "--warmup 3: it must be at least 4"),
        (["--rounds", "4"], "steps=10: each optimizer would take 16 steps; set steps=16"),
    ],
)
def test_what_cannot_be_timed_is_refused(data, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert main(_command(data, *options)) == 2
    assert message in capsys.readouterr().err
    assert not Path("pace").exists()


def test_pace_refuses_ranks(data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(_command(data)) == 2
    assert "start it without torchrun" in capsys.readouterr().err
