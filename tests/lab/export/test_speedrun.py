"""The speedrun script, in the package and as the exported file, where neither package exists."""

import os
import re
import struct
import subprocess
import sys
from itertools import islice
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch

from angular_lab.config.named_runs import speedrun as named_run
from angular_lab.config.spec import OptimSpec, Spec
from angular_lab.data.shards import write_shard
from angular_lab.export import speedrun, speedrun_script
from angular_lab.export.speedrun import export_speedrun
from angular_lab.training import build
from angular_lab.training.step_changes import momentum_at
from tests.lab.runs import SERVER, free_port, wait_all
from tests.lab.tiny import SPECS, scrambled

VOCABULARY, SEQUENCE, STEPS = 64, 16, 20
PERIOD = 61  # of the ids: prime, so that the windows of two ranks differ
SIZES = {"vocabulary": VOCABULARY, "sequence": SEQUENCE, "layers": 2, "width": 32, "heads": 2,
         "mlp": 64, "batch": 8, "micro-batch": 4, "steps": STEPS, "warmup": 2,
         "val-tokens": 4 * SEQUENCE, "val-every": 10}  # fmt: skip
# Run the file in a process in which the installed packages cannot be imported; then import what it
# imports lazily, on a GPU: Triton reads the source of its kernels.
ISOLATED = """
import runpy, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("angular_muown", "angular_lab"):
            raise SystemExit(f"the file lacks {name}")
sys.meta_path.insert(0, Block())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
from angular_muown.kernels import coverage
if coverage.find_spec("triton"):
    import angular_muown.kernels.fused, angular_muown.kernels.sharded
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of ids that count up: the next one is easy to learn."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train_000001", 1500), ("train_000002", 1500), ("val_000000", 100)):
        ids = [i % PERIOD for i in range(count)]
        header = struct.pack("<256i", 20240520, 1, count, *[0] * 253)
        (folder / f"fineweb_{name}.bin").write_bytes(header + struct.pack(f"<{count}H", *ids))
    return folder


def arguments(data: Path) -> list[str]:
    sizes = [word for key, value in SIZES.items() for word in (f"--{key}", str(value))]
    return [*sizes, "--data", str(data), "--device", "cpu"]


def read_log(folder: Path) -> tuple[str, list[float], list[float]]:
    """Return the only log in a folder, its training losses and its validation losses."""
    (path,) = (folder / "logs").iterdir()
    text = path.read_text()
    train, val = (
        [float(x) for x in re.findall(rf"^step:\d+/{STEPS} {kind}_loss:(\S+)", text, re.M)]
        for kind in ("train", "val")
    )
    return text, train, val


@pytest.fixture(scope="module")
def in_package(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the script that imports the packages."""
    folder = tmp_path_factory.mktemp("in_package")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        speedrun_script.main(arguments(data))
    return folder


def test_training_lowers_the_loss_and_logs_it(in_package: Path) -> None:
    text, train, val = read_log(in_package)
    assert text.startswith(Path(speedrun_script.__file__).read_text())
    assert len(train) == STEPS
    assert len(val) == 3  # before the first step, after half of the steps, at the end
    assert val[0] == pytest.approx(log(VOCABULARY), abs=1e-4)
    assert train[-1] < 0.8 * train[0]
    assert val[-1] < 0.8 * val[0]


def test_exported_file_trains_alike_without_the_packages(
    data: Path, in_package: Path, tmp_path: Path
) -> None:
    script = export_speedrun(tmp_path / "new" / "train.py")
    folder = tmp_path / "empty"
    folder.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-I", "-c", ISOLATED, str(script), *arguments(data)],
        cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text, *losses = read_log(folder)
    assert text.startswith(script.read_text())
    assert text.endswith(done.stdout)
    assert losses == [*read_log(in_package)[1:]], "the same optimizer, to the last digit"


def _run_rank(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    speedrun_script.main(words)


def test_two_ranks_train_like_one(data: Path, in_package: Path, tmp_path: Path) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    processes = [
        SERVER.Process(target=_run_rank, args=(arguments(data), tmp_path, {"RANK": rank, **shared}))
        for rank in "01"
    ]
    for process in processes:
        process.start()
    wait_all(processes)
    _, *losses = read_log(tmp_path)
    for values, expected in zip(losses, read_log(in_package)[1:], strict=True):
        assert values == pytest.approx(expected, abs=1e-3)


def test_first_steps_of_the_schedule_on_shards_of_the_lab(
    in_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(1500, dtype=np.uint16) % PERIOD
    write_shard(tmp_path / "train_00000.bin", ids)
    write_shard(tmp_path / "val_00000.bin", ids[:100])
    monkeypatch.chdir(tmp_path)
    speedrun_script.main([*arguments(tmp_path), "--stop-after", "11"])
    _, train, val = read_log(tmp_path)
    _, all_train, all_val = read_log(in_package)
    assert train == all_train[:11], "the same schedule: only its end is missing"
    assert val[:2] == all_val[:2]
    assert len(val) == 3  # and one at the stop


def matrix_groups(groups: list[dict]) -> list[dict]:
    """Return the matrices' groups without what the entry sets itself."""
    own = {"params", "lr", "base_lr", "decay_scale", "warmup_steps"}
    return [
        {key: value for key, value in group.items() if key not in own}
        for group in groups
        if group["algorithm"] == "matrix"
    ]


def test_settings_of_the_entry() -> None:
    run, options = named_run(), speedrun_script.parse([])
    assert options.steps == options.stop_after < 3025
    assert options.batch * options.sequence == 524_288
    assert (options.layers, options.width, options.heads) == (12, 768, 6)
    assert (options.val_tokens, options.val_every) == (10_485_760, 125)
    # The numbers of examples/speedrun/README.md:
    assert speedrun_script.kappa(options.steps - 1, options) == pytest.approx(0.25, abs=0.005)
    assert speedrun_script.total_angle(options) == pytest.approx(35, abs=0.5)
    scaled = speedrun_script.parse(["--decay-scale", str(13 / 3000)])
    assert speedrun_script.total_angle(scaled) == pytest.approx(17, abs=0.5)
    shorter = speedrun_script.parse(["--lr", "0.025", "--steps", "3250", "--warmup", "100"])
    assert speedrun_script.total_angle(shorter) == pytest.approx(31, abs=0.5)
    model = scrambled(SPECS["gpt_speedrun"])
    groups = speedrun_script.make_optimizer(model, options).param_groups
    rates = {name: group["lr"] for group in groups for name in group["param_names"]}
    assert (rates["embedding.weight"], rates["lm_head.weight"]) == (0.6, 0.009375)
    assert rates["layers.0.attn.qkv.weight"] == options.lr == 0.03
    vectors = [name for name, p in model.named_parameters() if p.ndim < 2]
    assert {rates[name] for name in vectors} == {0.03}
    of_the_lab = build.make_optimizer(model, run).param_groups
    assert matrix_groups(groups) == matrix_groups(of_the_lab)
    for group in groups:
        if group["algorithm"] == "adamw":
            assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-10)


def test_flags_reach_the_optimizer_and_the_schedule() -> None:
    words = ["--lr", "0.04", "--decay-scale", "0.002", "--radius-lr", "0.005", "--warmup", "7",
             "--embedding-lr", "0.3", "--head-lr", "0.004", "--vector-lr", "0.01",
             "--cooldown", "0.7", "--steps", "100", "--device", "cpu", "--layers", "1",
             "--width", "16", "--heads", "2", "--mlp", "16", "--vocabulary", "9"]  # fmt: skip
    options = speedrun_script.parse(words)
    training = speedrun_script.Training(options, speedrun_script.Ranks("cpu"))
    groups = training.optimizer.param_groups
    keys = ("lr", "decay_scale", "radius_lr", "warmup_steps")
    values = {tuple(g[key] for key in keys) for g in groups if g["algorithm"] == "matrix"}
    assert values == {(0.04, 0.002, 0.005, 7)}
    assert sorted(set(training.lrs)) == [0.004, 0.01, 0.04, 0.3]
    factors = [speedrun_script.schedule(step, options) for step in range(101)]
    assert [i for i, factor in enumerate(factors) if factor == 1.0] == list(range(7, 30))
    assert factors[100] == 0.0
    assert speedrun_script.kappa(99, options) == pytest.approx(1 / (1 + 0.002 * 92))


def test_the_momentum_rises_and_falls_as_in_the_trials() -> None:
    words = ["--momentum-start", "0.85", "--aux-beta2", "0.99", "--steps", "700"]
    options = speedrun_script.parse(words)
    optim = OptimSpec(momentum_start=0.85, momentum_ramp=speedrun_script.MOMENTUM_RAMP)
    spec = Spec(steps=700, optim=optim)
    for step in (0, 1, 150, 299, 300, 399, 400, 550, 699):
        assert speedrun_script.momentum(step, 0.95, options) == momentum_at(spec, step)
        assert speedrun_script.momentum(step, 0.95, speedrun_script.parse([])) == 0.95
    model = scrambled(SPECS["gpt_speedrun"])
    groups = speedrun_script.make_optimizer(model, options).param_groups
    assert {g["betas"] for g in groups if g["algorithm"] == "adamw"} == {(0.8, 0.99)}


def test_steps_use_the_momentum_of_the_ramp(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedrun_script, "MOMENTUM_RAMP", 2)
    options = speedrun_script.parse([*arguments(data), "--momentum-start", "0.85"])
    ranks = speedrun_script.Ranks("cpu")
    training, used = speedrun_script.Training(options, ranks), []
    tokens = options.batch * options.sequence
    windows = next(speedrun_script.batches(data, "train", tokens, options.sequence, ranks))
    for index in (0, 1, 2):
        training.step(index, windows)
        groups = training.optimizer.param_groups
        [now] = {g["momentum"] for g in groups if g["algorithm"] == "matrix"}
        used.append(now)
    assert used == pytest.approx([0.85, 0.9, 0.95])


def test_residual_stream_has_the_dtype_of_the_tracks() -> None:
    model = scrambled(SPECS["gpt_speedrun"])
    dtypes: list[torch.dtype] = []
    for dtype in (torch.float32, torch.bfloat16):
        track = speedrun_script.TrackModel(SPECS["gpt_speedrun"], dtype)
        track.load_state_dict(model.state_dict())
        track.layers[-1].register_forward_hook(lambda *hook: dtypes.append(hook[2].dtype))
        tokens = torch.arange(8).reshape(2, 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = track(tokens).float()
        expected = model(tokens)
        assert torch.allclose(logits, expected, atol=0.05 if len(dtypes) > 1 else 0)
    assert dtypes == [torch.float32, torch.bfloat16]


def test_validation_is_more_frequent_near_the_end() -> None:
    options = speedrun_script.parse([])
    steps = [step for step in range(3001) if speedrun_script.is_validated(step, options)]
    assert steps[:3] == [0, 125, 250]
    assert steps[-14:] == [2625, *range(2700, 3001, 25)]


def test_export_is_reproducible_and_rejects_other_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [export_speedrun(tmp_path / name) for name in ("a.py", "b.py")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    monkeypatch.setattr(speedrun, "ALLOWED", speedrun.ALLOWED - {"heapq"})
    with pytest.raises(ValueError, match="would import heapq, but it may need torch only"):
        export_speedrun(tmp_path / "c.py")


def test_ranks_share_each_batch_in_order(data: Path) -> None:
    def read(rank: int, world: int) -> list[torch.Tensor]:
        ranks = speedrun_script.Ranks("cpu")
        ranks.rank, ranks.world = rank, world
        return list(islice(speedrun_script.batches(data, "train", 64, 16, ranks), 40))

    batches = read(0, 1)  # across the end of the first file
    assert [len(windows) for windows in batches] == [4] * 40
    assert batches[1][0].tolist() == [i % PERIOD for i in range(64, 81)]
    for rank in (0, 1):
        for windows, part in zip(batches, read(rank, 2), strict=True):
            assert torch.equal(part, windows[2 * rank : 2 * rank + 2])


def test_unusable_data_and_sizes_are_named(tmp_path: Path) -> None:
    ranks = speedrun_script.Ranks("cpu")
    with pytest.raises(ValueError, match=r"0 files \*train"):
        next(speedrun_script.batches(tmp_path, "train", 8, 4, ranks))
    path = tmp_path / "fineweb_train_1.bin"
    path.write_bytes(struct.pack("<256i", 20240520, 1, 9, *[0] * 253) + bytes(10))
    with pytest.raises(ValueError, match="version 1 and 9 tokens; expected 20240520, 1 and 5"):
        next(speedrun_script.batches(tmp_path, "train", 8, 4, ranks))
    path.write_bytes(bytes(10))
    with pytest.raises(ValueError, match="shorter than a header"):
        next(speedrun_script.batches(tmp_path, "train", 8, 4, ranks))
    for words, world, message in (
        (["--batch", "8"], 3, "divisible by the 3 ranks"),
        (["--val-tokens", "7"], 1, "--val-tokens 7 must be a multiple of 1024"),
        (["--stop-after", "3001"], 1, "--stop-after 3001 must be from 1 to --steps, 3000"),
        (["--momentum-start", "1"], 1, "--momentum-start 1 must be from 0 to below 1"),
        (["--momentum-start", "0.96"], 1, "--momentum-start 0.96 .* usual momentum, 0.95"),
        (["--momentum-start", "nan"], 1, "--momentum-start nan must be from 0"),
        (["--aux-beta2", "1"], 1, "--aux-beta2 1 must be from 0 to below 1"),
        (["--aux-beta2", "-0.1"], 1, "--aux-beta2 -0.1 must be from 0 to below 1"),
        (["--momentum-start", "0.8", "--steps", "599"], 1, "at least 600 steps; --steps is 599"),
        (["--cooldown", "50"], 1, "--cooldown 50 is a share of the steps, from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            speedrun_script.check_options(speedrun_script.parse(words), world)
