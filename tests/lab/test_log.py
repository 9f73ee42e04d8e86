"""Messages of several ranks: the first one's, and errors of all."""

import logging

import pytest

from angular_lab.log import configure_logging


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (None, ["info", "warning", "error"]),
        ("0", ["info", "warning", "error"]),
        ("3", ["error"]),
    ],
)
def test_only_the_first_rank_logs_but_every_rank_reports_errors(
    rank: str | None,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    for _ in range(2):
        configure_logging()  # a second time: no line appears twice
    logger = logging.getLogger("angular_lab.training.start")
    for level in ("debug", "info", "warning", "error"):
        getattr(logger, level)(level)
    printed = capsys.readouterr()
    assert printed.err.splitlines() == expected
    assert printed.out == "", "standard output is for results"
