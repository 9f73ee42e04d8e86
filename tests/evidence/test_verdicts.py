"""Documents show the lab's verdicts, and methods have readable names."""

import pytest

from angular_lab.experiments.statistics import verdict
from evidence.titles import title, titled
from evidence.verdicts import judge


@pytest.mark.parametrize(
    ("differences", "label"),
    [
        ([-0.016, -0.015, -0.014, -0.017], "holds"),
        ([-0.05, -0.06], "leads on 2 of 2 seeds"),  # 12.7 standard errors
        ([-0.001, -0.09, -0.005, -0.001], "holds (sign test: 4 of 4 seeds, p = 0.125)"),
        ([], "inconclusive: no seed"),
    ],
)
def test_documents_follow_the_rule_of_the_lab(differences: list[float], label: str) -> None:
    other = {seed: 3.5 for seed, _ in enumerate(differences, 1)}
    ours = {seed: 3.5 + x for seed, x in enumerate(differences, 1)}
    assert judge(ours, other) == verdict(ours, other).label == label


def test_seeds_of_one_side_do_not_count() -> None:
    assert judge({1: 3.0, 2: 3.0}, {1: 3.1}) == "inconclusive: one seed"


def test_arms_get_the_names_of_the_library() -> None:
    assert title("normuon, decay 0.1") == "NorMuon, decay 0.1"
    assert title("angular_muown, kappa = 1") == "AngularMuown, κ = 1"
    assert title("aux rate x 0.3") == "`aux_lr` x 0.3"


def test_only_columns_of_methods_are_renamed() -> None:
    table = [["method", "at 90M", "file"], ["muon", "3.6", "muon.json"]]
    assert titled(table) == [["method", "at 90M", "file"], ["Muon", "3.6", "muon.json"]]
