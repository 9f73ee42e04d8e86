"""Runs that were made twice, and the commits that runs were made from."""

from collections import Counter
from collections.abc import Sequence
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory

from angular_lab.experiments.trials import FORMS, LONGER
from angular_lab.report.read import SweepResults
from angular_lab.run_folder import Run, RunFolder
from evidence.kept import OURS, RESULTS, Kept, Rows, unpack
from evidence.measures import CHOOSER, COOLDOWN, HALF, LATE, Facts

SUMS = {"radial_mean", "orthogonality_error"}  # over chunks, whose sizes changed in between


def facts(kept: Kept) -> Facts:
    return {
        "repeated": _averages(kept) | _once_more(kept) | _broken_off(kept) | _trial(kept),
        "commits": {"changed": len({row[0] for row in provenance(kept)[1:] if row[1] == "yes"})},
    }


def _before_cooldown(run: Run | None) -> dict[int, float]:
    assert run is not None
    return {step: loss for step, loss in run.values("loss").items() if step < COOLDOWN}


def _apart(a: SweepResults, b: SweepResults, arms: Sequence[str], horizon: int) -> float:
    """Return how far the final losses of two sweeps are apart at most."""
    finals = ((a.finals(arm, horizon), b.finals(arm, horizon)) for arm in arms)
    return max(abs(loss - y[seed]) for x, y in finals for seed, loss in x.items())


def _averages(kept: Kept) -> Facts:
    """Nine runs of the comparison, made again with averages, which change nothing."""
    again, teaser = kept.sweeps["average"], kept.sweeps["teaser"]
    same = {
        (arm, seed): _before_cooldown(trial.trunk)
        == _before_cooldown(teaser.at_best(arm)[seed].trunk)
        for arm in again.arms
        for seed, trial in again.at_best(arm).items()
    }
    return {
        "runs": len(same),
        "same": sum(same.values()),
        "same_are_seed_0_and_adamw_on_seed_1": {key for key, equal in same.items() if equal}
        == {(OURS, 0), ("normuon", 0), ("adamw", 0), ("adamw", 1)},
        "gap_45M": _apart(again, teaser, again.arms, HALF),
        "gap_90M": _apart(again, teaser, again.arms, LATE),
    }


def _once_more(kept: Kept) -> Facts:
    """AngularMuown's runs on seeds 0 to 2, made once more with the concurrent methods."""
    again, teaser, average = (kept.sweeps[name] for name in ("concurrent", "teaser", "average"))
    first_losses, same = [], []
    for seed, trial in again.at_best(OURS).items():
        earlier = (sweep.at_best(OURS)[seed].trunk for sweep in (teaser, average))
        new, old, averaged = map(_before_cooldown, (trial.ends[LATE], *earlier))
        first_losses.append({log[min(log)] for log in (new, old, averaged)})
        same += [seed] if new == old else []
    return {
        "one_of_two_first_losses": max(map(len, first_losses)) <= 2,
        "once_more_same_on_seeds_0_and_2": same == [0, 2],
        "once_more_gap": _apart(again, teaser, [OURS], LATE),
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


def _trial(kept: Kept) -> Facts:
    """The best trial, made once more on another machine to evaluate averages in more forms."""
    sweep = kept.sweeps["trials"]
    first, again = (sweep.at_best(arm)[CHOOSER] for arm in (LONGER, f"{LONGER}, {FORMS}"))
    [horizon] = sweep.horizons
    a, b = ([row.to_dict() for row in x.ends[horizon].metrics] for x in (first, again))
    pairs = [(key, x[key], y[key]) for x, y in zip(a, b, strict=True) for key in x]
    differ = {key for key, x, y in pairs if x != y}
    close = all(isclose(x, y, rel_tol=1e-6) for key, x, y in pairs if key in SUMS)
    folders = (RunFolder(x.ends[horizon].folder) for x in (first, again))
    angles = {folder.angles_path.read_text() for folder in folders}
    return {"trial_is_identical_but_for_sums": differ == SUMS and close and len(angles) == 1}


def provenance(kept: Kept) -> Rows:
    """Return how many run folders each commit made."""
    keys = ((x.git["commit"][:7], x.git["changed"], x.data[:12]) for x in kept.infos.values())
    counts = sorted(Counter(keys).items(), key=lambda item: (item[0][2], item[0][0]))
    head = ["commit", "with uncommitted changes", "fingerprint of the corpus", "run folders"]
    rows = ([c, "yes" if changed else "no", data, str(n)] for (c, changed, data), n in counts)
    return [head, *rows]
