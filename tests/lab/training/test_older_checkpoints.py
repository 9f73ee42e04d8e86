"""Checkpoints of an earlier version, whose groups had fewer settings: a run goes on with them."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from angular_lab.training import checkpoint
from angular_lab.training.start import train
from tests.lab.runs import lines, tiny

SINCE = ("average", "averaged")


def test_a_run_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny(data, keep=9)
    train(spec, tmp_path / "whole", device="cpu")
    content = checkpoint._content

    def older(*args: Any) -> dict[str, Any]:
        found = content(*args)
        groups = found["optimizer"]["param_groups"]
        kept = [{k: v for k, v in group.items() if k not in SINCE} for group in groups]
        assert kept != groups
        return {**found, "optimizer": {**found["optimizer"], "param_groups": kept}}

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_content", older)
        train(spec, tmp_path / "cut", device="cpu")
    folder = tmp_path / "cut" / "checkpoints"
    for step in checkpoint.steps(folder):
        if step > 4:
            shutil.rmtree(checkpoint.step_folder(folder, step))
    (tmp_path / "cut" / "DONE").unlink()
    train(spec, tmp_path / "cut", resume=True, device="cpu")
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
