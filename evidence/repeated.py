"""Runs that were made twice, and the commits that runs were made from."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evidence.comparison import Comparison
from evidence.kept import OURS, RESULTS, Kept, Rows, read_log, unpack
from evidence.measures import COOLDOWN, Facts

Log = list[dict[str, Any]]


def facts(kept: Kept) -> Facts:
    teaser = Comparison(kept)
    return {
        "repeated": _averages(kept, teaser) | _once_more(kept, teaser) | _broken_off(kept),
        "commits": {"changed": len({row[0] for row in provenance(kept)[1:] if row[1] == "yes"})},
    }


def _trunk(log: Log) -> list[float]:
    return [line["loss"] for line in log if line["step"] < COOLDOWN]


def _averages(kept: Kept, teaser: Comparison) -> Facts:
    """Nine runs of the comparison, made again with averages, which change nothing."""
    same, gaps = set(), {2747: 0.0, 5493: 0.0}
    trials = [(m, teaser.best[m], s) for m in (OURS, "normuon", "adamw") for s in (0, 1, 2)]
    for trial in trials:
        trunks = [_trunk(kept.log(sweep, trial, "trunk")) for sweep in ("average", "teaser")]
        if trunks[0] == trunks[1]:
            same.add((trial[0], trial[2]))
        for end, gap in gaps.items():
            ends = [kept.log(s, trial, end)[-1]["val_loss"] for s in ("average", "teaser")]
            gaps[end] = max(gap, abs(ends[0] - ends[1]))
    return {
        "runs": len(trials),
        "same": len(same),
        "same_are_seed_0_and_adamw_on_seed_1": same
        == {(OURS, 0), ("normuon", 0), ("adamw", 0), ("adamw", 1)},
        "gap_45M": gaps[2747],
        "gap_90M": gaps[5493],
    }


def _once_more(kept: Kept, teaser: Comparison) -> Facts:
    """AngularMuown's runs on seeds 0 to 2, made once more with the concurrent methods."""
    firsts, same, gaps = [], [], []
    for seed in (0, 1, 2):
        trial = OURS, teaser.best[OURS], seed
        new = kept.log("rivals", trial)
        old, averaged = (kept.log(sweep, trial, "trunk") for sweep in ("teaser", "average"))
        firsts.append(len({log[0]["loss"] for log in (new, old, averaged)}))
        same += [seed] if _trunk(new) == _trunk(old) else []
        gaps.append(abs(new[-1]["val_loss"] - kept.log("teaser", trial)[-1]["val_loss"]))
    return {
        "one_of_two_first_losses": max(firsts) <= 2,
        "once_more_same_on_seeds_0_and_2": same == [0, 2],
        "once_more_gap": max(gaps),
    }


def _broken_off(kept: Kept) -> Facts:
    """Runs of `one-pass` that were broken off and made again from the start."""
    steps, identical = [], []
    finished = {path.parent.name: path for path in kept.folder.glob("runs/*/*/metrics.jsonl")}
    with TemporaryDirectory() as folder:
        unpack(RESULTS / "again" / "one-pass.tar.xz", Path(folder))
        for path in Path(folder).rglob("metrics.jsonl"):
            text = path.read_text()
            identical.append(finished[path.parent.name].read_text().startswith(text))
            steps.append(read_log(path)[-1]["step"])
    return {
        "broken_off": len(steps),
        "broken_off_steps_min": min(steps),
        "broken_off_steps_max": max(steps),
        "broken_off_identical": all(identical),
    }


def provenance(kept: Kept) -> Rows:
    """Return how many run folders each commit made, taken-over copies not counted."""
    specs = (x for x in kept.specs() if not x.get("made_in"))
    keys = ((x["git"]["commit"][:7], x["git"]["changed"], x["data"][:12]) for x in specs)
    counts = sorted(Counter(keys).items(), key=lambda item: (item[0][2], item[0][0]))
    head = ["commit", "with uncommitted changes", "fingerprint of the corpus", "run folders"]
    rows = ([c, "yes" if changed else "no", data, str(n)] for (c, changed, data), n in counts)
    return [head, *rows]
