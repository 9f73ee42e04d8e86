"""Runs and sweeps of the first edition, converted: nothing lost, copies become references."""

import json
from pathlib import Path
from typing import Any

import pytest

from angular_lab.cli.main import main
from angular_lab.config.spec import Spec
from angular_lab.convert import convert, convert_spec
from angular_lab.errors import UserError
from angular_lab.report.read import collect
from angular_lab.run_folder import RunFolder
from angular_lab.sweeps.sweep_file import SweepRecord

# What the first edition wrote for a spec at its defaults, apart from steps, batch and schedule.
SPEC: dict[str, Any] = {
    "recipe": "nano", "data": "data", "steps": 8, "batch": 4, "micro_batch": 0, "seed": 0,
    "clip": 0.0, "eval_every": 4, "eval_tokens": 64, "save_every": 0, "keep": 2, "pins": "",
    "log_every": 4, "angle_every": 0, "average": "", "on_nan": "stop", "precision": "fp32",
    "compile": False, "deterministic": True, "parallel": "ddp", "tensor": 1, "loggers": "",
    "parent": "", "parent_step": 0,
    "model": {"vocabulary": 257, "sequence": 8, "kv_heads": 0, "mlp": 0, "soft_cap": 0.0},
    "optim": {"name": "adamw", "lr": 0.01, "aux_lr": 0.0, "radius_lr": 0.0, "scale": "",
              "row_beta": 0.0, "tangent_momentum": False, "exact_angle": False,
              "column_gains": False},
    "schedule": {"kind": "wsd", "warmup": 0, "decay": 0.25, "decay_steps": 0, "fall": 0.0},
}  # fmt: skip


def write(folder: Path, loss: float = 3.0, made_in: str = "", **changes: Any) -> None:
    """Write a finished run as the first edition did."""
    folder.mkdir(parents=True)
    spec = {**SPEC, **changes}
    content = {"spec": spec, "versions": {}, "git": {"commit": "abc"}, "data": "tokens"}
    (folder / "spec.json").write_text(
        json.dumps(content | ({"made_in": made_in} if made_in else {}))
    )
    line = {"step": spec["steps"], "tokens": spec["steps"] * 32, "loss": 3.1, "val_loss": loss}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "DONE").touch()
    (folder / "LOCK").touch()


def entry(label: str, folders: dict[str, str], **more: Any) -> dict[str, Any]:
    common = {"axis": "optim.lr", "value": 0.01, "seed": 0, "status": "done"}
    return {"label": label, "folders": folders, **common, **more}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A sweep with a trunk, two cooldowns and a longer one; another with a copy and a new run."""
    root = tmp_path / "old"
    first, second = root / "teaser-nano", root / "closest-nano"
    constant = {**SPEC["schedule"], "kind": "constant"}
    write(first / "a", pins="4,6", steps=6, schedule=constant)
    branch = {"parent": "somewhere/else/a", "parent_step": 6}
    write(first / "a-to8", 2.5, **branch, schedule={**SPEC["schedule"], "decay_steps": 2})
    write(first / "a-to4", 2.9, steps=4, parent="somewhere/else/a", parent_step=3,
          schedule={**SPEC["schedule"], "decay_steps": 1})  # fmt: skip
    write(first / "a-to8-longer", 2.4, parent="x/a", parent_step=4,
          schedule={**SPEC["schedule"], "decay_steps": 4})  # fmt: skip
    entries = [entry("adamw", {"4": "a-to4", "8": "a-to8"}, longer="a-to8-longer")]
    write(second / "b", 2.5, made_in="teaser-nano/a-to8")
    write(second / "c", 2.6, seed=1)
    others = [entry("normuon, cool-down 50%", {"8": "b"}), entry("c", {"8": "c"}, seed=1)]
    for folder, name, found, horizons in (
        (first, "teaser", entries, [4, 8]),
        (second, "rivals", others, [8]),
    ):
        content = {
            "experiment": name, "scale": "nano", "title": "A test", "horizons": horizons,
            "lines": [e["label"] for e in found], "seeds": [0, 1], "settled_by": None,
            "entries": found, "chosen": {found[0]["label"]: {"value": 0.01, "edge": []}},
        }  # fmt: skip
        (folder / "sweep.json").write_text(json.dumps(content))
    write(root / "single", 1.0, average="55,0.1")
    return root


def test_settings_that_were_not_given_become_none() -> None:
    spec = convert_spec(SPEC)
    assert (spec.clip, spec.save_every, spec.angle_every, spec.micro_batch) == (None,) * 4
    assert (spec.optim.aux_lr, spec.optim.scale, spec.model.mlp) == (None,) * 3
    assert spec.schedule.decay_steps is None
    assert (spec.parent, spec.pins, spec.loggers, spec.optim.retired) == (None, (), (), ())
    changed = convert_spec({
        **SPEC, "pins": "4,6", "average": "55,0.1", "parent": "x",
        "optim": {**SPEC["optim"], "aux_lr": 0.5, "exact_angle": True},
    })  # fmt: skip
    assert (changed.pins, changed.average, changed.parent) == ((4, 6), (55, 0.1), "x")
    assert (changed.optim.aux_lr, changed.optim.retired) == (0.5, ("exact_angle",))
    assert Spec.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed


def test_runs_are_kept_once_and_copies_become_references(old: Path, tmp_path: Path) -> None:
    assert convert([old], tmp_path / "new").startswith("6 runs and 2 sweeps")
    teaser, rivals = (
        SweepRecord.read(tmp_path / "new" / "sweeps" / f"{name}-nano.json")
        for name in ("teaser", "concurrent")
    )
    (normal, longer) = teaser.trials
    assert (longer.arm, longer.trunk) == ("adamw, cooldown 50%", normal.trunk)
    assert teaser.arms[1].variant_of == "adamw"
    assert [arm.label for arm in rivals.arms] == ["normuon, cooldown 50%", "c"]
    assert rivals.trials[0].runs[8] == normal.runs[8], "the copy is the run itself"
    assert rivals.trials[0].trunk is None
    runs = {path.name: RunFolder(path) for path in (tmp_path / "new" / "runs").iterdir()}
    assert {*normal.all_runs, *longer.all_runs, *rivals.trials[1].all_runs, "single"} == {*runs}
    assert runs[normal.runs[8]].read_spec().parent == normal.trunk
    assert runs[normal.runs[8]].read_metrics()[-1].get("val_loss") == 2.5
    assert not (runs["single"].path / "LOCK").exists()
    for name, run in runs.items():
        assert name == "single" or name == run.read_spec().folder_name("tokens")


def test_runs_trained_twice_are_both_kept(old: Path, tmp_path: Path) -> None:
    spec = old / "closest-nano" / "b" / "spec.json"
    spec.write_text(
        json.dumps({k: v for k, v in json.loads(spec.read_text()).items() if k != "made_in"})
    )
    (old / "closest-nano" / "b" / "metrics.jsonl").write_text('{"step": 8, "tokens": 256}\n')
    assert convert([old], tmp_path / "new").startswith("7 runs")
    names = sorted(path.name for path in (tmp_path / "new" / "runs").iterdir())
    (second,) = (name for name in names if name.endswith("-2"))
    assert second.removesuffix("-2") in names


def test_conversions_into_one_store_add_up(old: Path, tmp_path: Path) -> None:
    """A second call keeps what is there: the same runs once, others under numbered names."""
    convert([old], tmp_path / "new")
    before = sorted(path.name for path in (tmp_path / "new" / "runs").iterdir())
    convert([old], tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new" / "runs").iterdir()) == before
    (old / "single" / "metrics.jsonl").write_text('{"step": 8, "tokens": 256}\n')
    sweep = old / "teaser-nano" / "sweep.json"
    content = json.loads(sweep.read_text())
    sweep.write_text(json.dumps({**content, "seeds": [0]}))
    convert([old], tmp_path / "new")
    after = {path.name for path in (tmp_path / "new" / "runs").iterdir()}
    assert after - {*before} == {"single-2"}
    names = sorted(path.name for path in (tmp_path / "new" / "sweeps").iterdir())
    assert names == ["concurrent-nano.json", "teaser-nano-2.json", "teaser-nano.json"]


def test_the_old_layout_names_the_command_that_converts_it(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = "convert it.* with angular-lab convert-runs"
    with pytest.raises(UserError, match=expected):
        RunFolder(old / "single").read_spec()
    with pytest.raises(UserError, match=expected):
        collect([old], [])
    assert main(["convert-runs", str(old), "--out", str(tmp_path / "new")]) == 0
    sweeps, single = collect([tmp_path / "new"], [])
    assert [sweep.experiment for sweep in sweeps] == ["teaser", "concurrent"]
    assert [run.name for run in single] == ["single"]
    assert main(["convert-runs", str(tmp_path / "new"), "--out", str(tmp_path / "x")]) == 2
    assert "no run of the first edition" in capsys.readouterr().err
