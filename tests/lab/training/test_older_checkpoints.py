"""Checkpoints of earlier versions, whose param groups had fewer settings, can be resumed."""

from pathlib import Path
from typing import Any

import pytest

from angular_lab.training import checkpoint
from angular_lab.training.start import train
from tests.lab.runs import lines, stopped_copy, tiny

ADDED_SINCE = ("average", "averaged")


def test_a_run_resumes_from_an_older_checkpoint(
    data: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny(data, keep=9)
    content = checkpoint._content

    def older(*args: Any) -> dict[str, Any]:
        saved = content(*args)
        groups = saved["optimizer"]["param_groups"]
        fewer = [{k: v for k, v in group.items() if k not in ADDED_SINCE} for group in groups]
        assert fewer != groups
        return {**saved, "optimizer": {**saved["optimizer"], "param_groups": fewer}}

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_content", older)
        train(spec, tmp_path / "older", device="cpu")
    out = stopped_copy(tmp_path / "older", tmp_path / "run", 4)
    train(spec, out, resume=True, device="cpu")
    assert lines(out) == lines(whole)
