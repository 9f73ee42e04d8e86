"""The result comes first: a figure, three sentences, and the same numbers as in metrics.jsonl."""

import json
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest

from angular_lab.report.headlines import listed, sentences
from angular_lab.report.read import collect
from angular_lab.report.report import make_report, write_report
from angular_lab.run_folder import RUNS
from tests.lab.report.made import (
    OURS,
    Grid,
    choosing,
    one_horizon,
    paper_teaser,
    spec_of,
    table,
    visible,
    write_run,
    write_sweep,
)


def final(store: Path, name: str) -> float:
    """Return the last validation loss of a run, from its log alone."""
    lines = (store / RUNS / name / "metrics.jsonl").read_text().splitlines()
    return [line["val_loss"] for line in map(json.loads, lines) if "val_loss" in line][-1]


def of(root: Path) -> list[str]:
    (sweep,), _ = collect([root], [])
    return sentences(sweep)


def test_the_sentences_of_a_comparison_that_holds(tmp_path: Path) -> None:
    root = choosing(tmp_path / "small")
    ours = [final(root, f"angular-muown-lr0.02-seed{seed}-to200") for seed in (1, 2)]
    theirs = [final(root, f"adamw-lr0.002-seed{seed}-to200") for seed in (1, 2)]
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    half = 12.7062 * stdev(apart) / 2**0.5
    assert of(root) == [
        f"angular_muown has the lowest loss at 200k tokens: {fmean(ours):.4f} (the mean of 2 "
        f"seeds), {-fmean(apart):.4f} below adamw (angular_muown minus adamw: {fmean(apart):+.4f}, "
        f"95% interval {fmean(apart) - half:+.4f} to {fmean(apart) + half:+.4f}).",
        "The comparison with adamw at 200k tokens holds; at the earlier horizon it holds.",
        "Seeds 1 and 2 judge, seed 0 chose the values; the best lr of adamw (0.002) is at the edge "
        "of its grid, so a wider one may change the order; all 9 trials are finished.",
    ]


def test_the_sentences_of_an_open_comparison(tmp_path: Path) -> None:
    """-0.1 and -0.06 have one sign, but the interval of two seeds includes zero."""
    root = one_horizon(tmp_path / "small")
    apart = [
        final(root, f"angular-muown-lr0.02-seed{seed}") - final(root, f"adamw-lr0.016-seed{seed}")
        for seed in (1, 2)
    ]
    half = 12.7062 * stdev(apart) / 2**0.5
    best, verdict, limits = of(root)
    low, high = fmean(apart) - half, fmean(apart) + half
    difference = f"angular_muown minus adamw: {fmean(apart):+.4f}"
    interval = f"95% interval {low:+.4f} to {high:+.4f}"
    assert f"{-fmean(apart):.4f} below adamw ({difference}, {interval})." in best
    assert low < fmean(apart) < 0 < high
    assert verdict == (
        "The comparison with adamw at 400k tokens is open: leads on 2 of 2 seeds, 1 more seed to "
        "settle."
    )
    assert "the best aux_lr of adamw (0.016) is at the edge of its grid" in limits
    page = visible(make_report([root], tmp_path / "out"))
    assert f"95% interval −{-low:.4f} to +{high:.4f})" in page, "a minus sign, not a hyphen"
    (row,) = table(tmp_path / "out", "small-pairs")
    assert row["95% interval"] == f"{low:+.4f} to {high:+.4f}", "the same as in the sentence"


def grids(*losses: tuple[str, list[float]]) -> dict[str, tuple[str, Grid]]:
    """Return methods with one learning rate, one horizon and seeds from 0."""
    return {
        label: (label.partition(",")[0], {0.02: {s: {100: x} for s, x in enumerate(values)}})
        for label, values in losses
    }


def test_several_outcomes_are_counted_and_named(tmp_path: Path) -> None:
    methods = grids(
        (OURS, [3.0, 3.01, 3.02]),
        ("adamw", [3.1, 3.11, 3.12]),
        ("muon", [2.9, 2.91, 2.92]),
        ("muown", [3.01, 3.0, 3.05]),
        ("normuon, decay 0.1", [3.02, 3.04, 3.02]),
        ("hyperball", []),
    )
    best, verdicts, limits = of(write_sweep(tmp_path / "small", methods))
    assert best == (
        "muon has the lowest loss at 100k tokens: 2.9100 (the mean of 3 seeds), 0.1000 below "
        "angular_muown (angular_muown minus muon: +0.1000, 95% interval +0.1000 to +0.1000)."
    )
    assert verdicts.startswith(
        "Of the 5 comparisons of angular_muown at 100k tokens, 1 holds (adamw), 1 is reversed "
        "(muon), 2 are open (muown: lower on 2 of 3 seeds, "
    )
    assert "; “normuon, decay 0.1”: " in verdicts  # a name with a space is quoted
    assert verdicts.endswith(") and 1 has no judging seed yet.")
    assert limits == "Seeds 0, 1 and 2 judge; all 15 trials are finished."


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([2.999, 3.012], "muon and normuon cannot be told apart yet in small (2 seeds)."),
        ([2.9, 2.91], "muon is below normuon in small (2 seeds)."),
        ([3.1, 3.11], "muon is above normuon in small (2 seeds)."),
    ],
)
def test_a_single_comparison_is_told_not_counted(
    tmp_path: Path, losses: list[float], told: str
) -> None:
    methods = grids(("normuon", [3.0, 3.01]), ("muon", losses))
    write_sweep(
        tmp_path / "runs" / "small", methods, experiment="small", pairs=(("muon", "normuon"),)
    )
    write_sweep(tmp_path / "runs" / "other", grids(("muon", [3.0])), experiment="other")
    words = visible(make_report([tmp_path / "runs"], tmp_path / "out"))
    assert told in words
    assert "1 comparison" not in words


def test_several_comparisons_are_counted(tmp_path: Path) -> None:
    for name in ("first", "second"):
        choosing(tmp_path / "runs" / name)
    words = visible(make_report([tmp_path / "runs"], tmp_path / "out"))
    assert "At the last horizon 2 comparisons on two seeds or more were judged: 2 hold." in words


def test_one_seed_settles_nothing(tmp_path: Path) -> None:
    best, verdicts, limits = of(paper_teaser(tmp_path / "teaser-s"))
    assert best.endswith("0.0470 below muown (no interval: one seed).")
    assert "3 are open (" in verdicts
    assert limits.startswith("One seed (0) judges, so nothing is settled; ")


def test_unfinished_and_diverged_trials_are_counted(tmp_path: Path) -> None:
    root = write_sweep(
        tmp_path / "small",
        {
            OURS: (OURS, {0.02: {0: {400: 3.0}}, 0.04: {0: None}, 0.01: {0: {400: 3.1}}}),
            "adamw": ("adamw", {0.002: {0: {400: 3.2}}}),
        },
    )
    (root / RUNS / "adamw-lr0.002-seed0" / "DONE").unlink()
    best, verdicts, limits = of(root)
    assert best.endswith("(one seed); no other method has a finished run yet.")
    assert verdicts == "No comparison at 400k tokens has a seed that judges it yet."
    assert limits.endswith("of 4 trials 1 unfinished and 1 diverged.")


def test_sizes_do_not_compete(tmp_path: Path) -> None:
    widths: dict[str, tuple[str, Grid]] = {
        f"d = {n}": (OURS, {lr: {0: {100: 3 + lr}} for lr in (0.01, 0.02)}) for n in (8, 16)
    }
    root = write_sweep(tmp_path / "width-s", widths, experiment="width", pairs=())
    best, verdicts, _ = of(root)
    assert best == "The losses at 100k tokens are 3.0100 (“d = 8”) and 3.0100 (“d = 16”)."
    assert verdicts == "Nothing is judged: no methods compete."
    text = make_report([root], tmp_path / "out").read_text()
    lead = text[text.index('class="lead"') :]
    assert lead.index("fig-width-s-loss-by-value") < lead.index('class="result"')


def test_methods_that_end_at_different_tokens_are_not_ranked_together(tmp_path: Path) -> None:
    """By the number of steps, or by batch. Every comparison counts at its own last horizon."""
    ends = {"short": {100: 3.0}, "short, b": {100: 2.8}, "long": {400: 2.5}, "wide": {100: 2.7}}
    methods: dict[str, tuple[str, Grid]] = {
        arm: (OURS, {0.02: {s: {h: x + s / 100 for h, x in losses.items()} for s in (0, 1, 2)}})
        for arm, losses in ends.items()
    }
    pairs = ("short, b", "short"), ("wide", "short")
    root = write_sweep(tmp_path / "ends", methods, {"wide": 8}, pairs=pairs, tuning_seed=0)
    best, verdicts, limits = of(root)
    assert best == (
        "Methods end at different numbers of tokens, where losses do not compare. The lowest are "
        "2.5150 at 400k (long), 2.7150 at 200k (wide) and 2.8150 at 100k (“short, b”)."
    )
    assert verdicts.startswith("Of the 2 comparisons at 100k or 200k tokens, 2 hold (")
    assert limits.startswith("Seeds 1 and 2 judge, seed 0 chose the values; ")
    page = visible(make_report([root], tmp_path / "out"))
    assert "2 horizons, step 100, 400." in page
    assert "off one trunk" not in page
    rows = {row["method"]: row for row in table(tmp_path / "out", "ends-final-loss")}
    cells = {arm: {k: v for k, v in row.items() if "at " in k and v} for arm, row in rows.items()}
    assert [*rows["long"]][2:5] == ["at 100k", "at 200k", "at 400k"]
    assert {arm: [*columns] for arm, columns in cells.items()} == {
        "short": ["at 100k"], "short, b": ["at 100k"], "long": ["at 400k"], "wide": ["at 200k"],
    }  # fmt: skip
    markdown = (tmp_path / "out" / "tables" / "ends-final-loss.md").read_text()
    assert markdown.count("**") == 2 + 2 * 3, "the lowest of each number of tokens, and the title"
    trials = table(tmp_path / "out", "ends-runs")
    assert {row["200k tokens"] for row in trials if row["method"] != "wide"} == {""}
    pairs_table = table(tmp_path / "out", "ends-pairs")
    assert [row["tokens"] for row in pairs_table] == ["100000.0", ""], "two numbers are no number"


def test_the_sentences_of_single_runs(tmp_path: Path) -> None:
    for name, end in (("adamw", 3.2), ("muon", 3.05), ("muown", 3.1)):
        write_run(tmp_path / "runs" / name, spec_of(name), end)
    (tmp_path / "runs" / "muown" / "DONE").unlink()
    words = visible(make_report([tmp_path / "runs"], tmp_path / "out"))
    assert "muon ends lowest, at a validation loss of 3.0500 after 400k tokens: " in words
    assert "0.0500 below muown and 0.1500 below adamw." in words
    assert "1 of 3 runs is not finished: muown (unfinished at step 400)." in words
    one = visible(write_report([tmp_path / "runs" / "muon"], tmp_path / "one", "One"))
    assert "muon ends at a validation loss of 3.0500 after 400k tokens." in one
    assert "It is finished." in one


@pytest.mark.parametrize("kind", ["sweep", "runs", "both"])
def test_figures_come_before_tables_and_tables_are_folded(tmp_path: Path, kind: str) -> None:
    if kind != "runs":
        choosing(tmp_path / "runs" / "small")
    if kind != "sweep":
        write_run(tmp_path / "runs" / "muon", spec_of("muon"), 3.1)
    text = make_report([tmp_path / "runs"], tmp_path / "out").read_text()
    for section in re.findall(r"<section .*?</section>", text, re.DOTALL):
        order = ['class="lead"', "<figure", 'class="result"', "<table"]
        places = [section.index(part) for part in order]
        assert places == sorted(places)
        last_figure = section.rindex("<figure")
        assert last_figure < section.index("<table"), "all figures come first"
        assert len(re.findall(r"<p>", section[places[2] :].partition("</div>")[0])) >= 2
    folds = re.findall(r'<details class="fold" id="([^"]+)"( open)?>', text)
    opened = {key for key, is_open in folds if is_open}
    assert opened == ({"single-runs-1-summary"} if kind != "sweep" else set())
    assert text.count("<table") == len(folds) - 1  # and how to read the page


def test_a_sweeps_whiskers_follow_its_result_and_its_warnings_follow_them(tmp_path: Path) -> None:
    text = make_report([choosing(tmp_path / "small")], tmp_path / "out").read_text()
    order = ["fig-small-horizons", 'class="result"', "fig-small-differences", 'class="warnings"',
             "fig-small-above-ours", 'id="small-pairs"']  # fmt: skip
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    summary = re.search(r'id="small-pairs">\s*<summary>(.*?)</summary>', text, re.DOTALL)
    assert summary
    assert "holds: 2" in summary[1]


def test_the_contents_link_to_every_section_and_all_links_lead_somewhere(tmp_path: Path) -> None:
    choosing(tmp_path / "runs" / "small")
    write_run(tmp_path / "runs" / "muon", spec_of("muon"), 3.1)
    text = make_report([tmp_path / "runs"], tmp_path / "out").read_text()
    contents = text[: text.index("</nav>")]
    links = re.findall(r'href="#([^"]+)"', contents)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert set(links) <= set(ids)
    assert len(ids) == len(set(ids))
    sections = re.findall(r'<section id="([^"]+)"', text)
    assert sections == ["short", "small-sweep", "single-runs-1"]
    assert set(sections) <= set(links)
    assert {"small-sweep--differences", "small-sweep--tables", "how-to-read"} <= set(links)
    assert {"small-pairs", "small-runs", "fig-small-angles"} <= set(ids), "anchors stay valid"


def test_names_are_listed_as_in_a_sentence() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdef")) == "a, b, c and 3 more"
