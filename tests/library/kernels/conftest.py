"""Settings for tests of the kernels: without a GPU, they run in Triton's interpreter."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        from angular_muown.kernels import launch
        from tests.library.kernels import interpreter

        interpreter.speed_up()
        monkeypatch.setattr(launch, "ROW_ELEMENTS", interpreter.ROW_ELEMENTS)
