"""The exported script, run where neither package can be imported, and held against the library."""

import ast
import os
import re
import struct
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from math import log
from pathlib import Path
from types import ModuleType

import pytest
import torch

from angular_lab.config.named_runs import speedrun
from angular_lab.export import inline
from angular_lab.export.inline import Script
from angular_lab.export.speedrun import export_speedrun
from angular_lab.training import build
from tests.lab.tiny import SPECS, scrambled, text

VOCABULARY, SEQUENCE, BATCH, STEPS = 64, 16, 8, 20
SIZES = {"vocabulary": VOCABULARY, "sequence": SEQUENCE, "layers": 2, "width": 32, "heads": 2,
         "mlp": 64, "batch": BATCH, "micro-batch": 4, "steps": STEPS, "warmup": 2,
         "val-tokens": 4 * SEQUENCE, "val-every": 10}  # fmt: skip
# Stands first in the subprocess: an import of either package, which are installed, ends it.
GUARD = """
import runpy, sys
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("angular_muown", "angular_lab"):
            raise SystemExit(f"imports {name}")
sys.meta_path.insert(0, Guard())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_speedrun(tmp_path_factory.mktemp("script") / "train.py")


@pytest.fixture(scope="module")
def exported(script: Path) -> ModuleType:
    spec = spec_from_file_location("exported_speedrun", script)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_shards(folder: Path) -> Path:
    """Ids that count up: the next one is easy to learn."""
    folder.mkdir()
    for name, count in (("train_000001", 1500), ("train_000002", 1500), ("val_000000", 100)):
        ids = [i % VOCABULARY for i in range(count)]
        header = struct.pack("<256i", 20240520, 1, count, *[0] * 253)
        (folder / f"fineweb_{name}.bin").write_bytes(header + struct.pack(f"<{count}H", *ids))
    return folder


def run(script: Path, folder: Path, **environment: str) -> subprocess.Popen[str]:
    options = [word for key, value in SIZES.items() for word in (f"--{key}", str(value))]
    outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.Popen(
        [sys.executable, "-I", "-c", GUARD, str(script), *options, "--device", "cpu"],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**outside, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def losses(kind: str, output: str) -> list[float]:
    return [float(x) for x in re.findall(rf"^step:\d+/{STEPS} {kind}_loss:(\S+)", output, re.M)]


def test_it_trains_where_neither_package_is(script: Path, tmp_path: Path) -> None:
    """One rank and two give the same losses; two share every batch."""
    shared = {"DATA_PATH": str(write_shards(tmp_path / "data")), "MASTER_ADDR": "127.0.0.1"}
    ranks = {"WORLD_SIZE": "2", "MASTER_PORT": str(20_000 + os.getpid() % 20_000), **shared}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    processes = [
        run(script, tmp_path / "one", **shared),
        *(run(script, tmp_path / "two", RANK=rank, **ranks) for rank in "01"),
    ]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    alone, first, second = (output for output, _ in outputs)
    trained, held_out = losses("train", alone), losses("val", alone)
    assert len(trained) == STEPS
    assert len(held_out) == 3  # before the first step, in the middle, at the end
    assert held_out[0] == pytest.approx(log(VOCABULARY), abs=1e-4)
    assert trained[-1] < 0.8 * trained[0]
    assert held_out[-1] < 0.8 * held_out[0]
    assert losses("train", first) == pytest.approx(trained, abs=1e-3)
    assert losses("val", first) == pytest.approx(held_out, abs=1e-3)
    assert not second  # the first rank speaks
    (written,) = (tmp_path / "one" / "logs").iterdir()
    assert written.read_text().startswith(script.read_text())
    assert written.read_text().endswith("\n".join(alone.splitlines()[-3:]) + "\n")


def test_the_optimizer_is_the_library_s(exported: ModuleType) -> None:
    """Same gradients, same steps: the same bits, and the recipe's values in every group."""
    spec = SPECS["gpt_speedrun"]
    ours, theirs = scrambled(spec), exported.GPTSpeedrun(exported.ModelSpec(**vars(spec)))
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours(*text()), theirs(*text()))
    recipe = speedrun()
    library = build.make_optimizer(ours, recipe)
    copied = exported.make_optimizer(theirs, recipe.schedule.warmup)
    for step in range(6):
        tokens, targets = text(step)
        for model, optimizer in ((ours, library), (theirs, copied)):
            optimizer.zero_grad()
            model(tokens, targets).backward()
            optimizer.step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert type(copied) is exported.AngularMuown
    for a, b in zip(library.param_groups, copied.param_groups, strict=True):
        assert {**a, "params": 0} == {**b, "params": 0}


def test_the_numbers_are_the_recipe_s(exported: ModuleType) -> None:
    spec = speedrun()
    options = exported.parse([])
    assert (options.steps, options.batch) == (spec.steps, spec.batch)
    for part in ("model", "optim", "schedule"):
        assert vars(getattr(exported, part.upper())) == vars(getattr(spec, part))
    assert options.batch * options.sequence == 524_288
    assert (options.val_tokens, options.val_every) == (10_485_760, 125)
    assert exported.CLIP == spec.clip
    assert options.data == Path(os.environ.get("DATA_PATH", "data/fineweb10B"))


def test_it_is_self_contained_and_the_same_every_time(script: Path, tmp_path: Path) -> None:
    source = script.read_text()
    assert export_speedrun(tmp_path / "new" / "again.py").read_bytes() == script.read_bytes()
    allowed = {"torch", *sys.stdlib_module_names}
    for node in ast.walk(compile(source, "train.py", "exec", ast.PyCF_ONLY_AST)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        assert {name.split(".")[0] for name in names} <= allowed
    for unused in ("triton", "TYPE_CHECKING", "class Muon", "class SwiGLU", "def cosine"):
        assert unused not in source
    assert "# angular_muown/stages/orthogonalize.py\n" in source


def test_damaged_or_missing_data_is_named(exported: ModuleType, tmp_path: Path) -> None:
    place = exported.Place(0, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="0 files fineweb_train"):
        next(exported.batches(tmp_path, "train", 8, 4, place))
    path = tmp_path / "fineweb_train_1.bin"
    path.write_bytes(struct.pack("<256i", 20240520, 1, 9, *[0] * 253) + bytes(10))
    with pytest.raises(ValueError, match="9 tokens announced and 5 there"):
        next(exported.batches(tmp_path, "train", 8, 4, place))
    with pytest.raises(ValueError, match="divisible by the 3 ranks"):
        exported.check_sizes(exported.parse(["--batch", "8"]), 3)


def test_ranks_share_a_batch_in_order(exported: ModuleType, tmp_path: Path) -> None:
    data, device = write_shards(tmp_path / "data"), torch.device("cpu")
    alone = exported.batches(data, "train", 64, 16, exported.Place(0, 1, device))
    whole = list(islice(alone, 40))  # over the end of the first file
    assert [len(windows) for windows in whole] == [4] * 40
    assert whole[1][0].tolist() == [i % VOCABULARY for i in range(64, 81)]
    for rank in (0, 1):
        parts = exported.batches(data, "train", 64, 16, exported.Place(rank, 2, device))
        for windows, part in zip(whole, parts, strict=False):
            assert torch.equal(part, windows[2 * rank : 2 * rank + 2])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package to inline from, with modules that each test writes."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "__init__.py").write_text("from toy.b import size as length\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(inline, "PACKAGES", ("toy",))
    for name in [name for name in sys.modules if name.split(".")[0] == "toy"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def inlined(folder: Path, root: str, **modules: str) -> str:
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    return str(Script("toy.root", "main", root, "toy.gone"))


A = """from math import sqrt

def _hash(d): return sqrt(d)

def d(x): return _hash(x)
"""
B = """import math

# kept
K = 3
UNUSED = 4

def _hash(x): return K * x

def size(x): return _hash(x) + math.floor(x)
"""
ROOT = """from toy import a, length

def main():
    from toy.a import d as e
    return a.d(4), length(2), e(9)
"""


def test_names_that_clash_are_kept_apart(package: Path) -> None:
    source = inlined(package, ROOT, a=A, b=B)
    space: dict[str, object] = {}
    exec(source, space)
    assert eval("main()", space) == (2.0, 8, 3.0)
    assert {"a_hash", "b_hash"} <= space.keys()
    assert "# kept\nK = 3" in source
    assert "UNUSED" not in source


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("from toy.a import _hash\nfrom toy import length\n\ndef main(a_hash): _hash, length\n",
         "_hash has to become a_hash"),
        ("from toy import a\n\ndef main():\n    return a\n", "a is a whole module"),
        ("def main():\n    return nothing\n", "nothing is not defined"),
        ("def main():\n    global x\n    x = 1\n", "'global x' cannot be exported"),
        ("for i in (1, 2):\n    pass\n\ndef main():\n    pass\n", "line 1: only imports"),
        ("from toy.gone import kernel\n\ndef main():\n    kernel()\n", "kernel is left out"),
        ("from toy.a import *\n\ndef main():\n    d()\n", "by full names"),
        ("from cmath import sqrt\nfrom toy.a import d\n\ndef main():\n    return d(sqrt(1))\n",
         "sqrt would mean two things"),
    ],
)  # fmt: skip
def test_what_cannot_be_inlined_is_refused(package: Path, root: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inlined(package, root, a=A, b=B)
