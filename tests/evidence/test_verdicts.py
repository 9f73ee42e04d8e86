"""A difference holds only where its interval excludes zero, and methods have readable names."""

import pytest

from evidence.titles import title, titled
from evidence.verdicts import judge


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([-0.016, -0.015, -0.014, -0.017], "holds"),
        ([0.016, 0.015, 0.014, 0.017], "reversed"),
        ([-0.05, -0.06], "inconclusive: lower on 2 of 2 seeds"),  # 12.7 standard errors
        ([0.02, 0.03], "inconclusive: higher on 2 of 2 seeds"),
        ([-0.05, 0.01, -0.02], "inconclusive: lower on 2 of 3 seeds"),
        ([-0.0030, -0.0031, -0.0029], "inconclusive: less than 0.005"),
        ([-0.5], "inconclusive: one seed"),
        ([], "inconclusive: no seed"),
    ],
)
def test_verdicts_follow_the_interval(differences: list[float], verdict: str) -> None:
    other = {seed: 3.5 for seed, _ in enumerate(differences, 1)}
    ours = {seed: 3.5 + x for seed, x in enumerate(differences, 1)}
    assert judge(ours, other) == verdict


def test_seeds_of_one_side_do_not_count() -> None:
    assert judge({1: 3.0, 2: 3.0}, {1: 3.1}) == "inconclusive: one seed"


def test_arms_get_the_names_of_the_library() -> None:
    assert title("normuon, decay 0.1") == "NorMuon, decay 0.1"
    assert title("angular_muown, kappa = 1") == "AngularMuown, κ = 1"
    assert title("aux rate x 0.3") == "`aux_lr` x 0.3"


def test_only_columns_of_methods_are_renamed() -> None:
    table = [["method", "ours at 90M", "file"], ["muon", "3.6", "muon.json"]]
    assert titled(table) == [["method", "at 90M", "file"], ["Muon", "3.6", "muon.json"]]
