"""results/facts.json and the documents agree with the kept results."""

import re
from dataclasses import replace
from math import isclose
from statistics import fmean, stdev

import pytest

from angular_lab.experiments import one_pass
from angular_lab.experiments.comparison import EXPERIMENTS
from angular_lab.experiments.definition import TUNED_AT_S
from angular_lab.experiments.trials import LONGER
from angular_lab.run_folder import Run
from evidence import documents, facts, headline, noise, trials, verdicts, whole_corpus
from evidence.comparison import Comparison
from evidence.documents import DOCUMENTS, fill
from evidence.kept import ROOT, Kept
from evidence.titles import title
from evidence.whole_corpus import fewer_tokens

STALE = "run `make evidence` and look at what it changed"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept.unpacked(tmp_path_factory.mktemp("evidence"))


def test_facts_and_documents_are_up_to_date(kept: Kept) -> None:
    computed = facts.compute(kept)
    names = set().union(*(documents.names(path.read_text()) for path in DOCUMENTS))
    quoted = {name: computed[name] for name in names}
    stored = facts.read()
    words = {name: x for name, x in quoted.items() if isinstance(x, str)}
    assert words == {name: x for name, x in stored.items() if isinstance(x, str)}, STALE
    assert {name: x for name, x in stored.items() if name not in words} == pytest.approx(
        {name: x for name, x in quoted.items() if name not in words}, rel=1e-9
    ), STALE
    tables = facts.tables(kept)
    for path in DOCUMENTS:
        text = path.read_text()
        assert text == fill(text, computed, tables), f"{path.relative_to(ROOT)}: {STALE}"


def test_documents_show_exactly_the_kept_figures(kept: Kept) -> None:
    shown = documents.figures()
    assert shown == {path.name for path in documents.FIGURES.iterdir()}
    report = {path.name for path in (kept.folder / "figures").iterdir()}
    assert shown - report == {headline.FIGURE, whole_corpus.FIGURE}


def _dots(figure: str) -> list[tuple[str, str, str]]:
    text = (documents.FIGURES / figure).read_text()
    return re.findall(r"<title>(.+), seed (\d): (\d\.\d{4})</title>", text)


def test_the_main_figure_shows_every_seed_of_the_kept_runs(kept: Kept) -> None:
    arms = whole_corpus.WholeCorpus(kept).arms.values()
    expected = {
        (title(f"{a.name}, {a.schedule}"), str(seed), f"{loss:.4f}")
        for a in arms
        for seed, loss in a.losses.items()
    }
    shown = _dots(whole_corpus.FIGURE)
    assert set(shown) == expected
    assert len(shown) == len(expected), STALE


def test_the_figure_of_the_first_edition_shows_every_seed_of_the_kept_runs(kept: Kept) -> None:
    results = headline.Headline(kept).results
    expected = {
        (r.title.replace("`", ""), str(s), f"{x:.4f}") for r in results for s, x in r.losses.items()
    }
    shown = _dots(headline.FIGURE)
    assert set(shown) == expected
    assert len(shown) == len(expected) == 8 * 3, STALE


def _with_new_runs(kept: Kept) -> Kept:
    """Return the kept runs with one more judging seed of two arms, and a variant in a sweep of its
    own that is lower by 0.05 than AngularMuown."""
    ours, other = "angular_muown, cooldown 50%", "normuon, decay 0.1, linear to zero"
    long = kept.sweeps["one-pass-long"]
    fifth = [replace(long.at_best(arm)[3], seed=5) for arm in (ours, other)]
    more = replace(long, trials=long.trials + fifth)
    lower = [
        replace(trial, arm="mixed momentum", ends={h: _lower(r) for h, r in trial.ends.items()})
        for seed, trial in more.at_best(ours).items()
        if seed
    ]
    best = {"mixed momentum": long.best[ours]}
    arms = (replace(long.record.arms[2], label="mixed momentum", optimizer="angular_muown"),)
    record = replace(long.record, experiment="mixed", arms=arms)
    mixed = replace(long, record=record, arms=[*best], trials=lower, best=best)
    new = Kept(kept.folder)
    new.__dict__["sweeps"] = kept.sweeps | {"one-pass-long": more, "mixed": mixed}
    return new


def _lower(run: Run) -> Run:
    rows = []
    for row in run.metrics:
        loss = row.get("val_loss")
        more = row.more if loss is None else {**row.more, "val_loss": loss - 0.05}
        rows.append(replace(row, more=more))
    return replace(run, metrics=tuple(rows))


def test_new_arms_seeds_and_verdicts_fill_in_by_themselves(kept: Kept) -> None:
    new = _with_new_runs(kept)
    whole = whole_corpus.WholeCorpus(new)
    rows = {row[0]: row for row in whole.table()[1:]}
    assert rows["AngularMuown, mixed momentum"][1] == "cooldown 50%, 0.025 †"
    assert rows["NorMuon, decay 0.1"][4] == "1, 2, 3, 4, 5"
    pairs = {(row[0], row[1]): row[2:] for row in whole.pairs_table()[1:]}
    variant = pairs["mixed momentum", "AngularMuown as it is"]
    assert (variant[0], variant[3]) == ("0.050", "holds")
    normuon = pairs["as it is", "NorMuon, decay 0.1"]
    assert normuon[2] == "1, 2, 3, 4, 5"
    assert normuon[3].startswith("holds")
    long = whole_corpus.pairs_of_schedules(new.sweeps["one-pass-long"])
    assert 5 in long.judged("angular_muown, cooldown 50%", long.horizons[0])
    *_, variant = whole_corpus.WholeCorpus(new).goals()
    assert variant[1:] == ["0.050 lower on 4 seeds, AngularMuown, mixed momentum", "reached"]
    assert "seed 5: " not in whole_corpus.WholeCorpus(kept).figure()
    assert "mixed momentum, cooldown 50%, seed 5" in whole_corpus.WholeCorpus(new).figure()
    assert whole_corpus.facts(new)["one_pass_long"]["outcome"]["normuon_decay"] == "holds"


def test_a_changed_method_is_compared_with_angular_muown_changed_alike(kept: Kept) -> None:
    whole, closest = whole_corpus.WholeCorpus(kept), kept.sweeps["one-pass-closest"]
    ours = closest.finals(LONGER, *closest.horizons)
    changed = [arm for arm in whole.others if arm.change]
    assert changed
    for arm in changed:
        by_hand = [arm.losses[seed] - ours[seed] for seed in sorted(arm.losses.keys() & ours)]
        assert whole.lead(arm) == pytest.approx(fmean(by_hand))
        expected = fewer_tokens(whole.curves[whole.changed.name], fmean(by_hand))
        assert whole.fewer_tokens(arm) == pytest.approx(expected)
        rows = [row for row in whole.pairs_table() if row[1] == title(arm.name)]
        assert [row[0] for row in rows] == ["as it is", title(LONGER)]
        assert rows[1][2] == f"{fmean(by_hand):.3f}"
    for arm in (whole.best["normuon, decay 0.1"], whole.changed):
        assert whole.reference(arm) is whole.ours, "a variant is compared with the method"


def test_a_changed_method_may_have_one_seed_or_none_that_judges(kept: Kept) -> None:
    whole = whole_corpus.WholeCorpus(kept)
    arm = next(arm for arm in whole.others if arm.method == "adamw" and arm.change)
    whole.best[arm.name] = replace(arm, losses={1: arm.losses[1]})
    rows = [row for row in whole.pairs_table() if row[1] == title(arm.name)]
    assert [row[3:6] for row in rows] == [["-", "1", "inconclusive: one seed"]] * 2
    whole.best[arm.name] = replace(arm, losses={0: arm.losses[1]})
    rows = [row for row in whole.pairs_table() if row[1] == title(arm.name)]
    assert [(row[0], *row[3:6]) for row in rows] == [("as it is", "-", "0", "not judged")]


def test_every_method_is_compared_and_each_pair_once(kept: Kept) -> None:
    """AngularMuown as it is with every other method; changed with those that are changed alike."""
    whole = whole_corpus.WholeCorpus(kept)
    pairs = [tuple(row[:2]) for row in whole.pairs_table()[1:]]
    assert len(set(pairs)) == len(pairs)
    names = {title(arm.name) for arm in whole.best.values()}
    ours = {title(arm.name) for arm in (whole.ours, whole.changed)}
    assert {against for which, against in pairs if which == "as it is"} == names - ours
    changed = {title(arm.name) for arm in whole.others if arm.change}
    assert {against for which, against in pairs if which == title(LONGER)} == changed | {
        "AngularMuown as it is"
    }


def test_goals_show_a_method_with_and_without_the_change(kept: Kept) -> None:
    whole = whole_corpus.WholeCorpus(kept)
    _, _, adamw, normuon, _ = whole.goals()
    for method, measured in (("adamw", adamw[1]), ("normuon, decay 0.1", normuon[1])):
        arms = [arm for arm in whole.others if arm.method == method]
        assert sorted(bool(arm.change) for arm in arms) == [False, True]
        shown = {f"{whole.fewer_tokens(arm):.2f}" for arm in arms}
        assert {part.strip().split()[0].rstrip(",") for part in measured.split("; ")} == shown


def test_each_other_method_counts_once_at_its_best(kept: Kept) -> None:
    whole = whole_corpus.WholeCorpus(kept)
    best = whole.best_of_others()
    for arm in whole.others:
        assert best[arm.method].shown(best[arm.method].losses) <= arm.shown(arm.losses)
    assert best["adamw"].change


def test_gains_of_the_best_trial_are_paired_by_seed(kept: Kept) -> None:
    closest = kept.sweeps["one-pass-closest"]
    usual = "normuon, decay 0.1, linear to zero"
    before, after = (closest.finals(x, *closest.horizons) for x in (usual, f"{usual}, {LONGER}"))
    gains = trials.facts(kept)["trials"]["whole"]
    by_hand = fmean(before[seed] - after[seed] for seed in after if seed)
    assert gains["normuon_decay"]["gain"] == pytest.approx(by_hand)
    assert gains["normuon_decay"]["seeds"] == len(after)


def test_a_trial_is_compared_with_what_it_changes(kept: Kept) -> None:
    """What has the best trial's changes and more is compared with the best trial."""
    for name, _, against, *_ in trials.table(kept)[1:]:
        base = against.rpartition(", ")[0]
        if name.startswith(("AdamW", "NorMuon", "Muon")):
            assert name.startswith(base)
        else:
            assert (base == title(LONGER)) == (title(LONGER) in name and name != title(LONGER))


def test_a_trial_differs_by_more_than_noise_if_it_exceeds_two_deviations(kept: Kept) -> None:
    threshold = noise.one_seed(kept)
    rows = trials.table(kept)[1:]
    assert {row[-1] for row in rows} == {"yes", "no"}
    for *_, difference, answer in rows:
        assert (answer == "yes") == (abs(float(difference)) > threshold)


def test_a_pooled_deviation_ignores_means_and_weighs_samples_by_their_sizes() -> None:
    first, second = [1.0, 2.0, 4.0, 5.0], [3.0, 3.5, 4.0]
    shifted = [x + 10 for x in second]
    assert noise.pooled([first, shifted]) == pytest.approx(noise.pooled([first, second]))
    assert noise.pooled([first]) == pytest.approx(stdev(first))
    # sums of squares 10 and 0.5, with 3 and 2 degrees of freedom
    assert noise.pooled([first, second]) == pytest.approx((10.5 / 5) ** 0.5)


def test_ablations_use_the_learning_rates_that_the_comparison_chose(kept: Kept) -> None:
    assert Comparison(kept).best == TUNED_AT_S


FACTS = {"lead": 0.0154, "behind": -0.25, "runs": 9, "tokens": 13000, "lowest": True, "even": False}
TABLES = {
    "runs": [["method", "seed", "loss", "note"], ["a", "0", "**1.5**", "-"], ["b", "1", "2", "-"]],
}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("by <!--=lead:.3f-->0.016.", "by <!--=lead:.3f-->0.015."),
        ("by <!--=lead:.2f--> nat", "by <!--=lead:.2f-->0.02 nat"),
        ("<b><!--=behind:-.0%-->30% lower", "<b><!--=behind:-.0%-->25% lower"),
        ("all <!--=runs:word-->four runs", "all <!--=runs:word-->nine runs"),
        ("in <!--=tokens:,-->12,000, or", "in <!--=tokens:,-->13,000, or"),
        ("the lowest<!--?lowest-->", "the lowest<!--?lowest-->"),
        (
            "<!-- table: runs -->\n\n| loss |\n| --- |\n| 3 |\n\nEnd",
            "<!-- table: runs -->\n\n| method | seed | loss |\n| --- | --- | --- |\n"
            "| a | 0 | **1.5** |\n| b | 1 | 2 |\n\nEnd",
        ),
        (
            "<!-- table: runs; rows: 1.* | c; without: seed -->\n\nEnd",
            "<!-- table: runs; rows: 1.* | c; without: seed -->\n\n| method | loss |\n"
            "| --- | --- |\n| a | **1.5** |\n\nEnd",
        ),
    ],
)
def test_marks_are_filled_in(text: str, filled: str) -> None:
    assert fill(text, FACTS, TABLES) == filled
    assert fill(filled, FACTS, TABLES) == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("by <!--=leads:.3f-->0.015", "'leads', which is not computed"),
        ("lowest<!--?lowest_of_all-->", "'lowest_of_all', which is not computed"),
        ("level<!--?even-->", "even is not true: rewrite the text"),
        ("of 9<!--?runs-->", "runs is not true"),
        ("- <!--=runs--> runs", "a mark begins a line or a list item: - <!--=runs-->"),
        ("by <!--=lead:.3f->0.015", "a mark that cannot be read"),
        ("<!-- table: runs -->\n| a |\n", "a mark that cannot be read"),
        ("<!-- table: pairs -->\n\n", "'pairs', which is not computed"),
        ("<!-- table: runs; without: reason -->\n\n", "seed, loss, note has no without: reason"),
        ("<!-- table: runs; rows: c -->\n\n", "has no rows: c"),
    ],
)
def test_marks_that_cannot_be_filled_in_are_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        fill(text, FACTS, TABLES)


def test_a_stale_number_or_table_in_a_document_is_found() -> None:
    text = (ROOT / "docs" / "evidence" / "what-did-not-help.md").read_text()
    text = re.sub(r"<!-- table:.*-->\n", "", text)
    quoted = facts.read()
    assert fill(text, quoted, {}) == text
    mark = "<!--=variants.loss.log_radius:.4f-->"
    stale = text.replace(f"{mark}3.5999", f"{mark}3.5998")
    assert stale != text
    assert fill(stale, quoted, {}) == text


def test_tokens_are_interpolated_between_horizons(kept: Kept) -> None:
    """By hand: losses fall by 0.6 and by 0.2 in two doublings."""
    whole = whole_corpus.WholeCorpus(kept)
    for curve in whole.curves.values():
        assert [steps for steps, _ in curve] == [3250, 13_000]
    curve = [(1000, 4.0), (2000, 3.4), (4000, 3.2)]
    assert fewer_tokens(curve, 0.0) == pytest.approx(1)
    assert fewer_tokens(curve, 0.1) == pytest.approx(2**0.5)
    assert fewer_tokens(curve, 0.5) == pytest.approx(2 * 2**0.5)
    assert fewer_tokens(curve, 1.4) == pytest.approx(8), "beyond the first horizon"
    assert fewer_tokens(curve, -0.2) == pytest.approx(1 / 2), "beyond the last"


def test_another_model_is_not_a_horizon(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of a larger model may have the same label, corpus and learning rate."""
    whole, quarter = whole_corpus.WholeCorpus(kept), kept.sweeps["one-pass"]
    assert whole._has(quarter, whole.ours)
    spec = quarter.settings(whole.ours.label)
    larger = replace(spec, model=replace(spec.model, layers=12))
    monkeypatch.setattr(
        type(quarter), "settings", lambda self, _: larger if self is quarter else spec
    )
    assert not whole._has(quarter, whole.ours)


def test_views_of_a_sweep_have_names_of_their_own(kept: Kept) -> None:
    """A view named like an experiment would hide that experiment's verdicts."""
    names = {name.removeprefix("verdicts-") for name in verdicts.tables(kept)} - kept.sweeps.keys()
    assert "one-pass-schedules" in names
    assert not names & EXPERIMENTS.keys()


def test_plans_hold_the_learning_rates_that_the_whole_corpus_chose(kept: Kept) -> None:
    best = whole_corpus.WholeCorpus(kept).best
    assert best[whole_corpus.OURS].lr == one_pass.OURS_RATE
    assert best["adamw"].lr == one_pass.ADAMW_RATE


def test_plans_hold_what_a_quarter_of_the_corpus_chose(kept: Kept) -> None:
    """Every method under its best schedule, each at its best learning rate."""
    sweep = kept.sweeps["one-pass"]
    [horizon] = sweep.horizons
    losses = {label: sweep.finals(label, horizon)[0] for label in sweep.best}
    for method in {label.rpartition(", ")[0] for label in losses}:
        schedules = [s for s in one_pass.SCHEDULES if f"{method}, {s}" in losses]
        best = min(schedules, key=lambda schedule: losses[f"{method}, {schedule}"])
        assert (method, best) in one_pass.AT_A_QUARTER
    for (method, schedule), lr in one_pass.AT_A_QUARTER.items():
        assert isclose(sweep.best[f"{method}, {schedule}"].lr, lr)
