"""Statistics of losses: values computed by hand, laws, and errors."""

import subprocess
import sys
from math import inf, log, nan, sqrt
from random import Random
from statistics import fmean, stdev

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from angular_lab.experiments import published as paper
from angular_lab.experiments.statistics import (
    STUDENT_95,
    best_rate,
    judging_seeds,
    paired_differences,
    seeds_to_settle,
    speed_up,
    speed_up_interval,
    speed_up_outcome,
    speedrun_passes,
    student_interval,
    tokens_to_reach,
    verdict,
)

LOSSES = st.floats(1, 10)
TOKENS = st.integers(10**3, 10**12)  # stay distinct in any unit, as neighbouring floats do not
SEEDED = st.dictionaries(st.integers(0, 5), LOSSES, max_size=6)
OURS = paper.TEASER["angular_muown"].curve


@st.composite
def curves(draw: st.DrawFn) -> list[tuple[float, float]]:
    tokens = sorted(draw(st.lists(TOKENS, min_size=2, max_size=6, unique=True)))
    return [(count, draw(LOSSES)) for count in tokens]


def falling(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    tokens, losses = zip(*curve, strict=True)
    return list(zip(tokens, sorted(losses, reverse=True), strict=True))


# Tokens to reach a loss


def test_tokens_to_reach_by_hand() -> None:
    # Half of the fall from 4 to 3, so half of the way from log 100 to log 400: sqrt(100 * 400).
    assert tokens_to_reach([(100, 4.0), (400, 3.0)], 3.5) == pytest.approx(200)
    # A quarter: 100 * 4^(1/4) = 141.42; on a line in tokens it would be 175.
    assert tokens_to_reach([(100, 4.0), (400, 3.0)], 3.75) == pytest.approx(100 * sqrt(2))


@given(curves())
def test_at_its_points_a_falling_curve_is_exact(curve) -> None:
    curve = falling(curve)
    for tokens, loss in curve:
        first = min(other for other, reached in curve if reached == loss)
        assert tokens_to_reach(curve, loss) == first <= tokens


@given(curves(), st.floats(0, 1))
def test_between_two_points_it_is_linear_in_log_tokens(curve, share) -> None:
    (left, high), (right, low) = falling(curve)[:2]
    assume(high - low > 1e-6)
    loss = max(low, high - share * (high - low))  # rounding must not lead past the second point
    tokens = tokens_to_reach(falling(curve), loss)
    assert tokens is not None
    assert log(tokens) == pytest.approx(log(left) + share * (log(right) - log(left)), abs=1e-6)


@given(curves(), LOSSES)
def test_the_first_crossing_and_nothing_beyond_the_curve(curve, loss) -> None:
    tokens = tokens_to_reach(curve, loss)
    if curve[0][1] < loss or min(reached for _, reached in curve) > loss:
        assert tokens is None
    else:
        first = next(count for count, reached in curve if reached <= loss)
        assert tokens is not None
        assert curve[0][0] <= tokens <= first * (1 + 1e-12)
        assert all(reached > loss for count, reached in curve if count < tokens * (1 - 1e-12))


def test_a_curve_that_rises_again() -> None:
    # Down through 3.5 between 100 and 400 (half: 200), up, and down again after 1600.
    curve = [(100, 4.0), (400, 3.0), (1600, 3.8), (6400, 2.0)]
    assert tokens_to_reach(curve, 3.5) == pytest.approx(200)
    # Not reached before the rise: 3.8 to 2.0 passes 2.9 at half, sqrt(1600 * 6400) = 3200.
    assert tokens_to_reach(curve, 2.9) == pytest.approx(3200)


def test_no_extrapolation() -> None:
    assert tokens_to_reach([(100, 4.0), (400, 3.0)], 2.999) is None
    assert tokens_to_reach([(100, 4.0), (400, 3.0)], 4.001) is None
    assert tokens_to_reach([(100, 4.0), (400, 3.0)], 3.0) == 400
    assert tokens_to_reach([(100, 4.0), (400, 3.0)], 4.0) == 100


@pytest.mark.parametrize(
    ("curve", "words"),
    [
        ([], "a curve of 0 points: it takes at least two"),
        ([(100, 3.0)], "a curve of 1 points"),
        ([(400, 3.0), (100, 4.0)], "100 tokens follow 400: sort the curve"),
        ([(100, 3.0), (100, 4.0)], "100 tokens follow 100"),
        ([(100, 3.0), (400, nan)], "the loss at 400 tokens is nan: leave out runs that diverged"),
        ([(100, inf), (400, 3.0)], "the loss at 100 tokens is inf"),
        ([(100, 3.0), (inf, 3.0)], "a curve's tokens is inf: it must be positive and finite"),
        ([(0, 3.0), (400, 3.0)], "a curve's tokens is 0"),
    ],
)
def test_bad_curves(curve, words) -> None:
    with pytest.raises(ValueError, match=words):
        tokens_to_reach(curve, 3.0)
    with pytest.raises(ValueError, match=words):
        speed_up(curve, OURS)
    with pytest.raises(ValueError, match=words):
        speed_up(OURS, curve)


def test_a_loss_to_reach_must_be_a_number() -> None:
    with pytest.raises(ValueError, match="the loss to reach is nan"):
        tokens_to_reach(OURS, nan)


# Speed-ups


@pytest.mark.parametrize(
    ("reference", "ratio"),
    [
        # 3.071 to 2.972 passes 2.982 at 89/99: 2.5B * 2^(89/99) = 4.662B, and 10 / 4.662 = 2.145
        ("adamw", 2.15),
        # 2.972 to 2.928 passes 2.964 at 8/44: 5B * 1.5^(8/44) = 5.383B, and 10 / 5.383 = 1.858
        ("normuon", 1.86),
        # 2.972 to 2.928 passes 2.949 at 23/44: 5B * 1.5^(23/44) = 6.180B, and 10 / 6.180 = 1.618
        ("muown", 1.62),
        ("angular_muown", 1.0),
    ],
)
def test_speed_ups_of_the_papers_numbers(reference, ratio) -> None:
    found = speed_up(OURS, paper.TEASER[reference].curve)
    assert found is not None
    assert round(found, 2) == ratio


def test_the_reference_decides_the_largest_number_of_tokens() -> None:
    # We need 200 for its 3.5, it takes 300; how far our own curve goes does not matter.
    assert speed_up([(100, 4.0), (400, 3.0)], [(50, 5.0), (300, 3.5)]) == pytest.approx(1.5)


def test_a_reference_out_of_reach() -> None:
    assert speed_up(paper.TEASER["adamw"].curve, OURS) is None


@given(curves(), curves(), st.floats(1e-3, 1e3))
def test_the_unit_of_tokens_does_not_matter(ours, reference, unit) -> None:
    before = speed_up(ours, reference)
    after = speed_up(
        [(unit * tokens, loss) for tokens, loss in ours],
        [(unit * tokens, loss) for tokens, loss in reference],
    )
    assert after == (before if before is None else pytest.approx(before))


@given(curves(), st.floats(0.1, 10))
def test_a_curve_that_needs_k_times_fewer_tokens(curve, k) -> None:
    curve = falling(curve)
    assume(curve[-2][1] > curve[-1][1])
    assert speed_up([(tokens / k, loss) for tokens, loss in curve], curve) == pytest.approx(k)


def test_speed_ups_by_seed() -> None:
    reference = [(100, 5.0), (400, 3.5)]
    fast, slow = [(100, 4.0), (400, 3.0)], [(100, 4.5), (1600, 2.5)]
    found = speed_up_interval(
        {1: slow, 0: fast, 2: [(100, 5.0), (400, 4.0)], 3: fast, 5: [(1, 3.0), (2, 2.0)],
         6: [(100, 4.0), (400, nan)]},
        {0: reference, 1: reference, 2: reference, 4: reference, 5: reference, 6: reference},
    )  # fmt: skip
    # Seed 0: 400 / 200. Seed 1: half of 4.5 to 2.5, 400 / sqrt(100 * 1600).
    assert found.by_seed == {0: pytest.approx(2.0), 1: pytest.approx(1.0)}
    assert found.mean == pytest.approx(sqrt(2))  # of what multiplies
    # The logarithms log 2 and 0 have the standard error log 2 / 2, and t is 12.706.
    assert found.interval == (pytest.approx(2**-5.853, rel=1e-3), pytest.approx(2**6.853, rel=1e-3))
    assert found.missing == {
        2: "the reference ends at 3.5000, our curve never reaches it",
        3: "the reference has no curve",
        4: "we have no curve",
        5: "the reference ends at 3.5000, our curve starts below it",
        6: "the loss at 400 tokens is nan: leave out runs that diverged, and report them",
    }


def test_no_seed_has_a_speed_up() -> None:
    found = speed_up_interval({0: OURS}, {1: OURS})
    assert (found.by_seed, found.mean, found.interval) == ({}, None, None)
    assert list(found.missing) == [0, 1]


# Student's interval


@pytest.mark.parametrize("values", [2, 3, 5, 10, 31, 40])
def test_students_interval_is_that_of_scipy(values) -> None:
    stats = pytest.importorskip("scipy.stats")
    sample = [Random(values).gauss(3, 1) for _ in range(values)]
    low, high = student_interval(sample)
    half = stats.t.ppf(0.975, min(values - 1, 30)) * stdev(sample) / sqrt(values)
    assert (low, high) == pytest.approx((fmean(sample) - half, fmean(sample) + half), rel=1e-6)


def test_students_interval_covers_the_mean_in_95_percent() -> None:
    """For three normal values at a time."""
    dice, runs = Random(0), 4000
    intervals = (student_interval([dice.gauss(1, 2) for _ in range(3)]) for _ in range(runs))
    covered = sum(low <= 1 <= high for low, high in intervals)
    assert covered / runs == pytest.approx(0.95, abs=0.0104)  # three standard deviations


@given(st.lists(LOSSES, min_size=2, max_size=6), st.floats(-3, 3), st.floats(0.1, 3))
def test_students_interval_moves_with_its_values(values, shift, factor) -> None:
    low, high = student_interval(values)
    moved = student_interval([factor * value + shift for value in values])
    assert moved == pytest.approx((factor * low + shift, factor * high + shift), abs=1e-6)


def test_values_without_an_interval() -> None:
    assert student_interval([3.0]) is None
    with pytest.raises(ValueError, match="no values"):
        student_interval([])
    with pytest.raises(ValueError, match="a value is nan: leave out runs that diverged"):
        student_interval([1.0, nan])


# Pairs


def test_pairs_and_missing_seeds() -> None:
    paired = paired_differences({2: 3.0, 0: 3.25, 7: 1.0}, {0: 3.0, 2: 3.5, 1: 1.0, 9: 1.0})
    assert paired.seeds == (0, 2)
    assert paired.differences == (0.25, -0.5)
    assert paired.mean == -0.125  # (0.25 - 0.5) / 2
    assert paired.missing_in_a == (1, 9)
    assert paired.missing_in_b == (7,)


def test_without_common_seeds_there_is_no_mean() -> None:
    assert paired_differences({0: 3.0}, {1: 3.0}).mean is None


def test_a_diverged_run_is_not_averaged() -> None:
    with pytest.raises(ValueError, match="b's loss of seed 4 is nan"):
        paired_differences({4: 3.0}, {4: nan})
    with pytest.raises(ValueError, match="a's loss of seed 4 is inf"):
        verdict({4: inf}, {4: 3.0})


@pytest.mark.parametrize(
    ("differences", "outcome", "label"),
    [
        ([-0.016, -0.015, -0.014, -0.017], "holds", "holds"),
        ([0.016, 0.015, 0.014, 0.017], "reversed", "reversed"),
        ([-0.010, -0.0101], "holds", "holds"),  # 12.7 standard errors are 0.0006
        ([-0.05, -0.06, 0.0001, -0.055, -0.05, -0.06, -0.055], "holds", "holds"),  # not one sign
        ([-0.05, -0.06], "inconclusive", "leads on 2 of 2 seeds"),  # they are 0.0635
        ([0.05, 0.06], "inconclusive", "trails on 2 of 2 seeds"),
        ([-0.001, -0.09, -0.005], "inconclusive", "leads on 3 of 3 seeds"),
        # the interval of these four includes zero
        ([-0.001, -0.09, -0.005, -0.001], "holds", "holds (sign test: 4 of 4 seeds, p = 0.125)"),
        ([0.001, 0.09, 0.005, 0.001], "reversed", "reversed (sign test: 4 of 4 seeds, p = 0.125)"),
        ([-0.05, 0.01, -0.02], "inconclusive", "inconclusive: lower on 2 of 3 seeds"),
        ([-0.03, 0.0], "inconclusive", "inconclusive: lower on 1 of 2 seeds"),
        ([-0.0030, -0.0031, -0.0029], "inconclusive", "inconclusive: less than 0.005"),
        ([-0.0030, -0.0031, -0.0029, -0.009], "inconclusive", "inconclusive: less than 0.005"),
        ([0.0, 0.0], "inconclusive", "inconclusive: less than 0.005"),
        ([-0.5], "inconclusive", "inconclusive: one seed"),
        ([], "inconclusive", "inconclusive: no seed"),
    ],
)
def test_verdicts(differences, outcome, label) -> None:
    b = {seed: 3.5 for seed, _ in enumerate(differences)}
    found = verdict({seed: 3.5 + d for seed, d in enumerate(differences)}, b)
    assert (found.outcome, found.label) == (outcome, label)


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ([3.0, 3.1], [3.01, 3.11], "-0.0100 over 2 seeds, 95% interval -0.0100 to -0.0100 excl"),
        ([3.0, 3.1], [3.05, 3.16], "-0.0550 over 2 seeds, 95% interval -0.1185 to +0.0085 incl"),
        ([3.0, 3.1], [3.004, 3.1049], "the mean is less than 0.005"),
        ([3.0, 3.002], [3.03, 3.0], "not of one sign"),
        ([3.0], [4.0], "1 common seed: it takes at least two"),
        ([], [], "0 common seeds: it takes at least two"),
        ([3.0, 3.0], [3.1], "least two; only one side has seeds 1"),
    ],
)
def test_reasons_of_verdicts(a, b, reason) -> None:
    assert reason in verdict(dict(enumerate(a)), dict(enumerate(b))).reason


@pytest.mark.parametrize(
    ("differences", "further", "text"),
    [
        ([-0.016, -0.015, -0.014, -0.017], 0, None),
        ([-0.05, -0.06], 1, "1 more seed"),  # 4.303 * 0.00707 / sqrt(3) = 0.0176
        ([-0.05, 0.01, -0.02], 9, "9 more seeds"),  # 2.201 * 0.03 / sqrt(12) = 0.01906 < 0.02
        ([-0.1, 0.089], None, "not within 100"),
        ([-0.004, 0.002], 5, "5 more seeds"),  # 2.447 * 0.00424 / sqrt(7) = 0.00392 < 0.004
        ([-0.0001, 0.0001], 0, None),  # known to be too small
        ([-0.5], None, "at least 1 more seed"),
        ([], None, "at least 2 more seeds"),
    ],
)
def test_how_many_seeds_settle_a_pair(differences, further, text) -> None:
    b = {seed: 3.5 for seed, _ in enumerate(differences)}
    found = verdict({seed: 3.5 + d for seed, d in enumerate(differences)}, b)
    assert (found.further_seeds, found.to_settle) == (further, text)
    assert found.settled == (further == 0)


@given(st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=6))
def test_the_number_of_seeds_is_the_smallest_that_settles(differences) -> None:
    """By the definition: an interval with that mean, that deviation and so many seeds."""
    mean, deviation = fmean(differences), stdev(differences)
    further = seeds_to_settle(differences)

    def settles(count: int) -> bool:
        half = STUDENT_95[min(count - 1, 30) - 1] * deviation / sqrt(count)
        if abs(mean) >= 0.005 - 1e-9:
            return mean - half > 0 or mean + half < 0
        return max(abs(mean - half), abs(mean + half)) < 0.005 - 1e-9

    checked = range(len(differences), len(differences) + (101 if further is None else further))
    assert not any(settles(count) for count in checked)
    assert further is None or settles(len(differences) + further)


@pytest.mark.parametrize(
    ("interval", "outcome"),
    [
        ((1.85, 2.5), "holds"),
        ((1.3, 1.95), "missed"),
        ((0.7, 0.9), "reversed"),
        ((0.9, 1.7), "missed"),
        ((1.3, 2.1), "inconclusive"),
    ],
)
def test_a_claimed_speed_up_is_judged_by_its_interval(interval, outcome) -> None:
    assert speed_up_outcome(interval, 2.0) == outcome


def test_the_seed_that_chose_judges_only_alone() -> None:
    assert judging_seeds([0, 1, 2], 0) == [1, 2]
    assert judging_seeds([0, 1, 2], None) == [0, 1, 2]
    assert judging_seeds([0], 0) == [0]


def test_missing_seeds_are_in_the_reason_of_a_verdict_that_holds() -> None:
    found = verdict({0: 3.0, 1: 3.0, 2: 3.0, 4: 3.0}, {0: 3.1, 1: 3.1, 3: 3.1})
    assert found.outcome == "holds"
    assert found.reason.endswith("; only one side has seeds 2, 3, 4")
    assert found.paired.missing_in_b == (2, 4)


@pytest.mark.parametrize("a", [3.15, 3.053, 2.982, 2.9])
def test_rounding_does_not_decide_at_the_threshold(a) -> None:
    b = round(a + 0.005, 3)
    assert verdict({0: a, 1: a}, {0: b, 1: b}).outcome == "holds"


@given(SEEDED, SEEDED, st.floats(1e-4, 1))
def test_exchanged_sides_give_the_opposite_verdict(a, b, threshold) -> None:
    opposite = {"holds": "reversed", "reversed": "holds", "inconclusive": "inconclusive"}
    there, back = verdict(a, b, threshold), verdict(b, a, threshold)
    assert back.outcome == opposite[there.outcome]
    assert back.paired.differences == tuple(-d for d in there.paired.differences)
    assert back.paired.missing_in_a == there.paired.missing_in_b


@given(st.dictionaries(st.integers(0, 5), LOSSES, min_size=2), st.floats(0.006, 1))
def test_a_clear_difference_holds_and_none_is_inconclusive(losses, lead) -> None:
    ahead = {seed: loss - lead for seed, loss in losses.items()}
    assert verdict(ahead, losses).outcome == "holds"
    assert verdict(losses, losses).outcome == "inconclusive"
    assert verdict(ahead, losses, threshold=2 * lead).outcome == "inconclusive"


@pytest.mark.parametrize("threshold", [0, -0.005, nan])
def test_bad_thresholds(threshold) -> None:
    with pytest.raises(ValueError, match=f"threshold is {threshold}: it must be positive"):
        verdict({}, {}, threshold)


# Speedrun


@pytest.mark.parametrize(
    ("losses", "statistic", "passes", "further"),
    [
        ([3.276], 0.004, True, 0),  # 0.004 * 1
        ([3.278, 3.278, 3.278, 3.278], 0.004, True, 0),  # 0.002 * 2
        ([3.278], 0.002, False, 3),  # 0.002 * sqrt(4)
        ([3.27, 3.286], 0.002 * sqrt(2), False, 2),  # the mean is 3.278 too, two of four are there
        ([3.279] * 15, 0.001 * sqrt(15), False, 1),  # 0.001 * sqrt(16)
        ([3.277], 0.003, False, 1),  # (4/3)^2 = 1.78, so two
        ([3.28], 0.0, False, None),
        ([3.29, 3.28], -0.005 * sqrt(2), False, None),
    ],
)
def test_the_speedruns_rule(losses, statistic, passes, further) -> None:
    found = speedrun_passes(losses)
    assert found.statistic == pytest.approx(statistic)
    assert (found.passes, found.further_runs) == (passes, further)


@given(st.floats(3.2795, 3.2799), st.integers(1, 50))
def test_the_number_of_further_runs_is_the_smallest_that_passes(loss, runs) -> None:
    further = speedrun_passes([loss] * runs).further_runs
    assert further is not None
    assert speedrun_passes([loss] * (runs + further)).passes
    assert further == 0 or not speedrun_passes([loss] * (runs + further - 1)).passes


def test_another_target_and_bad_runs() -> None:
    assert speedrun_passes([3.276], target=3.0).further_runs is None
    assert speedrun_passes([2.9], target=3.0).passes
    with pytest.raises(ValueError, match="no losses to judge"):
        speedrun_passes([])
    with pytest.raises(ValueError, match="a run's loss is nan"):
        speedrun_passes([3.27, nan])
    with pytest.raises(ValueError, match="target is nan"):
        speedrun_passes([3.27], target=nan)


# Learning rates


@pytest.mark.parametrize(
    ("by_rate", "lr", "extend"),
    [
        ({4e-3: 3.1, 1e-3: 3.2, 2e-3: 3.0}, 2e-3, ()),
        ({4e-3: 3.1, 1e-3: 2.9, 2e-3: 3.0}, 1e-3, ("below",)),
        ({4e-3: 2.9, 1e-3: 3.1, 2e-3: 3.0}, 4e-3, ("above",)),
        ({2e-3: 3.0}, 2e-3, ("below", "above")),
        # A run that diverged is the worst, and bounds the grid.
        ({4e-3: nan, 1e-3: 3.1, 2e-3: 3.0}, 2e-3, ()),
        ({4e-3: 3.0, 1e-3: nan, 2e-3: -inf, 8e-3: inf}, 4e-3, ()),
        ({4e-3: 3.0, 2e-3: 3.0, 1e-3: 3.1}, 2e-3, ()),
    ],
)
def test_best_rates(by_rate, lr, extend) -> None:
    found = best_rate(by_rate)
    assert (found.lr, found.loss) == (lr, by_rate[lr])
    assert (found.extend, found.at_edge) == (extend, bool(extend))


@given(st.dictionaries(st.floats(1e-5, 1), LOSSES | st.just(nan) | st.just(inf), min_size=1))
def test_the_order_of_the_rates_does_not_matter(by_rate) -> None:
    assume(any(loss < inf for loss in by_rate.values()))
    found = best_rate(by_rate)
    assert found == best_rate(dict(reversed(by_rate.items())))
    assert all(not loss < found.loss for loss in by_rate.values())


def test_sweeps_without_a_best_value() -> None:
    with pytest.raises(ValueError, match=r"no finite loss in \{0.1: nan, 0.2: inf\}: try smaller"):
        best_rate({0.1: nan, 0.2: inf})
    with pytest.raises(ValueError, match="no finite loss"):
        best_rate({})
    with pytest.raises(ValueError, match="a learning rate is 0"):
        best_rate({0: 3.0, 0.1: 3.0})


# The paper's numbers


@pytest.mark.parametrize(
    ("sweeps", "best"),
    [
        (paper.QWEN2, [(4e-2, 2.648, ("above",)), (6e-3, 2.694, ()), (1e-2, 2.692, ())]),
        (paper.MOE, [(2e-3, 2.4807, ("above",)), (8e-3, 2.4914, ("above",)), (6e-4, 2.5255, ())]),
    ],
)
def test_the_papers_best_rates(sweeps, best) -> None:
    found = [best_rate(sweep.losses) for sweep in sweeps]
    assert [(row.lr, row.loss, row.extend) for row in found] == best


def test_the_papers_teaser_is_complete() -> None:
    assert list(paper.TEASER) == ["adamw", "normuon", "muown", "angular_muown"]
    assert paper.CLAIMED_SPEED_UPS.keys() == paper.TEASER.keys() - {"angular_muown"}
    for row in paper.TEASER.values():
        assert min(row.rates) < row.best_rate < max(row.rates), "P: no best rate at an edge"
        assert row.best_rate in row.rates
        assert list(row.losses) == sorted(row.losses, reverse=True)
        assert all(ours <= loss for ours, loss in zip(OURS, row.curve, strict=True))
    assert paper.WIDTH_RATES[0] == 2**-8
    assert paper.WIDTH_RATES[-1] == 2**-3


def test_statistics_do_not_need_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import angular_lab.experiments.statistics"
    subprocess.run([sys.executable, "-c", code], check=True)
