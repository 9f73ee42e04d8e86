from pathlib import Path

import pytest

from angular_lab.training.start import train
from tests.lab.runs import tiny


@pytest.fixture(scope="session")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 12 steps with all of its checkpoints. Tests that change it copy it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(tiny(data, keep=9), out, device="cpu")
    return out
