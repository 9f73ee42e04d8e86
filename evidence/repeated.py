"""Runs that were made twice, and the commits that runs were made from."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from angular_lab.report.read import TrialResult
from angular_lab.run_folder import Run, RunFolder
from evidence.kept import OURS, RESULTS, Kept, Rows, unpack
from evidence.measures import COOLDOWN, HALF, LATE, Facts


def facts(kept: Kept) -> Facts:
    return {
        "repeated": _averages(kept) | _once_more(kept) | _broken_off(kept),
        "commits": {"changed": len({row[0] for row in provenance(kept)[1:] if row[1] == "yes"})},
    }


def _before_cooldown(run: Run | None) -> dict[int, float]:
    assert run is not None
    return {step: loss for step, loss in run.values("loss").items() if step < COOLDOWN}


def _apart(a: TrialResult, b: TrialResult, horizon: int) -> float:
    """Return how far the final losses of two trials are apart."""
    ends = a.final(horizon), b.final(horizon)
    assert all(ends)
    return abs(ends[0][1] - ends[1][1])


def _averages(kept: Kept) -> Facts:
    """Nine runs of the comparison, made again with averages, which change nothing."""
    average, teaser = kept.sweeps["average"], kept.sweeps["teaser"]
    pairs = {
        (arm, seed): (trial, teaser.at_best(arm)[seed])
        for arm in average.arms
        for seed, trial in average.at_best(arm).items()
    }
    same = {
        key
        for key, (a, b) in pairs.items()
        if _before_cooldown(a.trunk) == _before_cooldown(b.trunk)
    }
    return {
        "runs": len(pairs),
        "same": len(same),
        "same_are_seed_0_and_adamw_on_seed_1": same
        == {(OURS, 0), ("normuon", 0), ("adamw", 0), ("adamw", 1)},
        "gap_45M": max(_apart(*pair, HALF) for pair in pairs.values()),
        "gap_90M": max(_apart(*pair, LATE) for pair in pairs.values()),
    }


def _once_more(kept: Kept) -> Facts:
    """AngularMuown's runs on seeds 0 to 2, made once more with the concurrent methods."""
    new, old, averaged = (
        kept.sweeps[name].at_best(OURS) for name in ("concurrent", "teaser", "average")
    )
    logs = {
        seed: [
            _before_cooldown(x)
            for x in (new[seed].ends[LATE], old[seed].trunk, averaged[seed].trunk)
        ]
        for seed in new
    }
    firsts = [{log[min(log)] for log in of_seed} for of_seed in logs.values()]
    return {
        "one_of_two_first_losses": max(map(len, firsts)) <= 2,
        "once_more_same_on_seeds_0_and_2": [s for s, (a, b, _) in logs.items() if a == b] == [0, 2],
        "once_more_gap": max(_apart(new[seed], old[seed], LATE) for seed in new),
    }


def _broken_off(kept: Kept) -> Facts:
    """Runs of `one-pass` that were broken off and made again from the start."""
    steps, identical = [], []
    with TemporaryDirectory() as folder:
        unpack(RESULTS / "again" / "one-pass.tar.xz", Path(folder))
        for path in Path(folder).glob("runs/*"):
            run = RunFolder(path)
            finished = RunFolder(kept.runs / run.info.spec.folder_name(run.info.data))
            text = run.metrics_path.read_text()
            identical.append(finished.metrics_path.read_text().startswith(text))
            steps.append(run.read_metrics()[-1].step)
    return {
        "broken_off": len(steps),
        "broken_off_steps_min": min(steps),
        "broken_off_steps_max": max(steps),
        "broken_off_identical": all(identical),
    }


def provenance(kept: Kept) -> Rows:
    """Return how many run folders each commit made."""
    keys = ((x.git["commit"][:7], x.git["changed"], x.data[:12]) for x in kept.infos.values())
    counts = sorted(Counter(keys).items(), key=lambda item: (item[0][2], item[0][0]))
    head = ["commit", "with uncommitted changes", "fingerprint of the corpus", "run folders"]
    rows = ([c, "yes" if changed else "no", data, str(n)] for (c, changed, data), n in counts)
    return [head, *rows]
