"""Factors in wall-clock time come from the kept pace of model S."""

from dataclasses import replace
from statistics import median

import pytest

from angular_lab.config.named_runs import named_run
from angular_lab.config.spec import OptimSpec
from angular_lab.pace.record import Pace, Timed
from angular_lab.status.device_use import DeviceUse
from evidence import speed
from evidence.kept import read_json

IDLE = DeviceUse(0.5, 16, True, 0, 0.0, 0.0, 600.0)
ADAMW, OURS = ((0.010, 0.012), (0.020, 0.022), (0.011, 0.011)), ((0.012,), (0.025,), (0.014,))


@pytest.fixture
def pace(tmp_path, monkeypatch) -> Pace:
    timed = Timed(OptimSpec("adamw"), ADAMW, 2.0), Timed(OptimSpec(), OURS, 2.5)
    pace = Pace(
        spec=named_run("s"), device="NVIDIA H200", reference="adamw", warmup=5, lead_in=2,
        order=(), timed=timed, threads=2, use=(IDLE, IDLE), versions={}, git={}, data="tokens",
    )  # fmt: skip
    monkeypatch.setattr(speed, "PACE", pace.write(tmp_path))
    return pace


def test_a_pace_gives_the_factor(pace) -> None:
    ratios = (0.011 / 0.012, 0.021 / 0.025, 0.011 / 0.014)
    assert speed.time_ratio("adamw") == pytest.approx(median(ratios))
    facts = speed.facts()["pace"]["angular_muown"]
    assert facts["ms"] == pytest.approx(14.0)
    assert facts["time_ratio"]["median"] == pytest.approx(median(1 / x for x in ratios))
    head, *rows = speed.pace_table()
    assert [len(row) for row in rows] == [len(head)] * 2
    assert rows[1][:3] == ["angular_muown", f"{16_384 / 0.014:,.0f}", "14.00"]


def test_factors_in_time_are_those_in_tokens_times_the_pace() -> None:
    facts, ratio = read_json("facts")["facts"], speed.time_ratio("adamw")
    assert 0.8 < ratio < 1, "a step of AdamW is shorter"
    name = "tuned_adamw.speed_up"
    assert facts[f"{name}.wall_clock"] == pytest.approx(facts[f"{name}.mean"] * ratio)


def test_a_pace_of_a_shared_gpu_is_refused(pace, tmp_path, monkeypatch) -> None:
    shared = replace(pace, use=(IDLE, replace(IDLE, others=1)))
    monkeypatch.setattr(speed, "PACE", shared.write(tmp_path))
    with pytest.raises(ValueError, match="gives no factor: 1 other process on the GPU"):
        speed.time_ratio("adamw")
