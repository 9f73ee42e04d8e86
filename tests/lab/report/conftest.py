import logging

import pytest

from angular_lab import run_folder
from angular_lab.report import page


@pytest.fixture
def drawn() -> None:
    """Draw the figures of a page in this test."""


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out git and, without the fixture `drawn`, matplotlib: they take most of the time."""
    monkeypatch.setattr(run_folder, "git_state", dict)
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(page, "save", lambda panel, stem: "<svg></svg>")


@pytest.fixture(autouse=True)
def logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `caplog` see the lab's messages, also after a command has configured logging."""
    monkeypatch.setattr(logging.getLogger("angular_lab"), "propagate", True)
