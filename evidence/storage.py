"""The momentum in 8 bits: what it costs in time and in loss, and the memory that it saves."""

from typing import Any

from evidence.kept import OURS, Kept, Rows, read_json
from evidence.measures import LATE, Facts, lead, spread, summary
from evidence.speed import DIGITS

GOAL = 0.003  # nat that 8 bits may cost
EIGHT_BIT = "8-bit momentum"
WEIGHTS = MOMENTA = ("float32", "bfloat16")
EIGHT = "int8"


def facts(kept: Kept) -> Facts:
    sweep = kept.sweeps["storage"]
    plain, eight = (sweep.finals(arm, LATE) for arm in (OURS, EIGHT_BIT))
    difference = lead(plain, eight)
    run = {trial.arm for trial in sweep.trials}
    return {
        "storage": {
            "loss": {"float32": summary(plain), "int8": summary(eight)},
            "difference": difference,
            "mean_meets_goal": difference["mean"] < GOAL,
            "goal_not_settled": difference["low"] < GOAL < difference["high"],
            "bf16_weights_not_run": run == {OURS, EIGHT_BIT},
        },
        "momentum": _momentum_facts(),
    }


def _measured() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of the benchmark by shapes and dtype of the weights."""
    rows = read_json("momentum_h200")["results"]
    return {(row["shapes"], row["weights"]): row for row in rows}


def _momentum_facts() -> Facts:
    rows = _measured()
    longer = {
        dtype: spread(
            x["times"][dtype]["ms"] / x["times"]["float32"]["ms"] - 1 for x in rows.values()
        )
        for dtype in ("bfloat16", EIGHT)
    }
    saved = {
        weights: spread(
            1 - row["memory"][EIGHT]["peak_gib"] / row["memory"]["float32"]["peak_gib"]
            for (_, dtype), row in rows.items()
            if dtype == weights
        )
        for weights in WEIGHTS
    }
    return {"longer": longer, "saved": saved}


def momentum_table() -> Rows:
    """Milliseconds and peak memory of a step by dtype."""
    rows = _measured()
    head = ["weights", "momentum", *(f"{s}, ms" for s in DIGITS), *(f"{s}, GiB" for s in DIGITS)]
    body = []
    for weights in WEIGHTS:
        for dtype in (*MOMENTA, EIGHT):
            measured = {s: rows[s, weights] for s in DIGITS}
            times = (f"{x['times'][dtype]['ms']:.{DIGITS[s]}f}" for s, x in measured.items())
            memory = (f"{x['memory'][dtype]['peak_gib']:.2f}" for x in measured.values())
            body.append([weights, dtype, *times, *memory])
    return [head, *body]
