"""Whether a run had its device to itself: recorded while it trains, read by reports."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from angular_lab.inspect.comparison import compare, to_json, to_text
from angular_lab.report.single_runs import row
from angular_lab.report.tables import form
from angular_lab.run_folder import read_run, shared_device
from angular_lab.status import device_use
from angular_lab.training.start import train
from tests.lab.runs import tiny

UUID, OTHER = "1e8b9c1a-0000-4444-8888-aaaaaaaaaaaa", "ffffffff-0000-4444-8888-aaaaaaaaaaaa"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts an nvidia-smi with this output on the path."""

    def install(*rows: str, code: int = 0) -> None:
        text = "\n".join(["#!/bin/sh", *(f"echo '{row}'" for row in rows), f"exit {code}\n"])
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/bin:/usr/bin")

    return install


def test_other_processes_on_the_same_gpu_are_counted(nvidia_smi: Any) -> None:
    own = f"GPU-{UUID}, {os.getpid()}, 900"
    nvidia_smi(own, f"GPU-{UUID}, 1, 2048", f"GPU-{UUID}, 2, 512", f"GPU-{OTHER}, 3, 999")
    assert device_use.other_processes(UUID) == (2, 2.5)
    nvidia_smi(own, f"GPU-{OTHER}, 3, 999")
    assert device_use.other_processes(UUID) == (0, 0.0)
    nvidia_smi(own, f"GPU-{UUID}, 1, [N/A]")
    assert device_use.other_processes(UUID) == (1, None)


def test_processes_under_other_numbers_include_this_one(nvidia_smi: Any) -> None:
    """As a container may show them."""
    nvidia_smi(f"GPU-{UUID}, 4000001, 900")
    assert device_use.other_processes(UUID) == (0, 0.0)
    nvidia_smi(f"GPU-{UUID}, 4000001, 900", f"GPU-{UUID}, 4000002, 900")
    assert device_use.other_processes(UUID) == (1, None)


def test_what_cannot_be_known_is_null(nvidia_smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"GPU-{UUID}, {os.getpid()}, 900"
    for rows, code in (((), 0), ((own,), 9), (("a line without commas",), 0),
                       ((f"GPU-{OTHER}, {os.getpid()}, 900",), 0)):  # fmt: skip
        nvidia_smi(*rows, code=code)
        assert device_use.other_processes(UUID) == (None, None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert device_use.other_processes(UUID) == (None, None)
    found = device_use.device_use(1, UUID)
    assert found["other_gpu_processes"] is None
    assert "other_gpu_processes" not in device_use.device_use(1), "without a GPU there is no record"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], None),
        ([{"step": 1}], None),
        ([{"load": 0.6, "own_load": 0.5}], False),
        ([{"load": 0.6, "own_load": 0.5}, {"step": 2}, {"load": 1.5, "own_load": 0.5}], True),
        ([{"load": None, "own_load": 0.5}], None),
        # on a GPU the host's load does not count
        ([{"load": 9.0, "own_load": 0.5, "other_gpu_processes": 0}], False),
        ([{"load": 9.0, "own_load": 0.5, "other_gpu_processes": None}], None),
        ([{"other_gpu_processes": 0}, {"other_gpu_processes": 2}], True),
        ([{"other_gpu_processes": "?"}], None),
    ],
)
def test_a_device_is_shared_if_any_record_says_so(lines: list[Any], expected: bool | None) -> None:
    assert shared_device(lines) is expected


def test_a_run_records_the_load_and_tables_mark_its_speed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    folders = {}
    for name, load in (("alone", 1.0), ("shared", 4.0)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        folders[name] = train(tiny(data), tmp_path / name, device="cpu", shown="all").path
        said = "other processes used the device" in capsys.readouterr().err
        assert said == (name == "shared")
    lines = [json.loads(x) for x in (tmp_path / "shared/timing.jsonl").read_text().splitlines()]
    recorded = [line["step"] for line in lines if "load" in line]
    assert recorded == [1, 4, 8, 12], "at the start, at evaluations and at the end"
    assert {line["load"] for line in lines if "load" in line} == {1.0}
    runs = {name: read_run(folder, []) for name, folder in folders.items()}
    assert {name: run and run.shared_device for name, run in runs.items()} == {
        "alone": False, "shared": True,
    }  # fmt: skip
    cells = {name: form(row(run)["tokens/s"]) for name, run in runs.items() if run}
    assert cells["shared"].endswith(" shared")
    assert not cells["alone"].endswith("shared")
    result = compare([*folders.values()], [])
    assert json.loads(to_json(result))["shared"] == {"A": False, "B": True}
    assert f"{cells['shared']}" in to_text(result)
    assert "compare no times with this one" in to_text(result)
