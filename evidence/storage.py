"""The momentum in 8 bits: what it costs in time and in loss, and the memory that it saves."""

from typing import Any

from evidence.kept import OURS, Kept, Rows, read_json
from evidence.measures import LATE, Facts, lead, spread
from evidence.speed import DIGITS
from evidence.titles import title

GOAL = 0.003  # nat that 8 bits may cost
EIGHT_BIT, BF16 = "8-bit momentum", "bf16 weights"
WEIGHTS = MOMENTA = ("float32", "bfloat16")
EIGHT = "int8"


def facts(kept: Kept) -> Facts:
    sweep = kept.sweeps["storage"]
    weights = {"float32": (OURS, EIGHT_BIT), "bf16": (BF16, f"{BF16}, {EIGHT_BIT}")}
    differences = {
        name: lead(*(sweep.finals(arm, LATE) for arm in arms)) for name, arms in weights.items()
    }
    return {
        "storage": {
            "difference": differences,
            "means_meet_goal": all(x["mean"] < GOAL for x in differences.values()),
            "bf16_is_settled": differences["bf16"]["high"] < GOAL,
            "float32_is_open": differences["float32"]["high"] > GOAL,
        },
        "momentum": _momentum_facts(),
    }


def _measured() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of the benchmark by shapes and dtype of the weights."""
    rows = read_json("momentum_h200")["results"]
    return {(row["shapes"], row["weights"]): row for row in rows}


def _longer(row: dict[str, Any], dtype: str = EIGHT) -> float:
    """Return how much longer a step is than with a float32 momentum, as a share."""
    return row["times"][dtype]["ms"] / row["times"]["float32"]["ms"] - 1


def _shorter_rounds(row: dict[str, Any]) -> int:
    """Count the rounds in which steps were shorter than with a float32 momentum."""
    rounds = (row["times"][dtype]["rounds"] for dtype in (EIGHT, "float32"))
    return sum(a < b for a, b in zip(*rounds, strict=True))


def _momentum_facts() -> Facts:
    rows = _measured()
    shorter = {key: _shorter_rounds(row) for key, row in rows.items()}
    longer = {
        dtype: spread(_longer(row, dtype) for row in rows.values()) for dtype in ("bfloat16", EIGHT)
    }
    saved = {
        weights: spread(
            1 - row["memory"][EIGHT]["peak_gib"] / row["memory"]["float32"]["peak_gib"]
            for (_, dtype), row in rows.items()
            if dtype == weights
        )
        for weights in WEIGHTS
    }
    return {
        "longer": longer,
        "saved": saved,
        "int8_is_no_slower": longer[EIGHT]["max"] <= 0,
        "bf16_is_fastest": all(_longer(row, "bfloat16") < _longer(row) for row in rows.values()),
        "shorter_rounds": sum(shorter.values()),
        "rounds": sum(len(row["times"][EIGHT]["rounds"]) for row in rows.values()),
        # 3 or 4 of 7 rounds: either may be the shorter one
        "only_moe_bf16_is_level": [key for key, won in shorter.items() if won in (3, 4)]
        == [("moe1.1b", "bfloat16")],
        "compiled": _compiled_facts(),
    }


def _compiled() -> dict[int, dict[tuple[str, bool], dict[str, Any]]]:
    """Return the compiled kernels of one rank by the length of rows, then by the momentum's dtype
    and whether they are as a step launches them."""
    by_length: dict[int, dict[tuple[str, bool], dict[str, Any]]] = {}
    for row in read_json("registers")["results"]:
        if not row["summed"]:
            by_length.setdefault(row["n"], {})[row["momentum"], row["launched"]] = row
    return by_length


def _rows_at_a_time(row: dict[str, Any]) -> int:
    return row["programs"] * row["tile"][0]


def _compiled_facts() -> Facts:
    pairs = [(found["float32", True], found[EIGHT, True]) for found in _compiled().values()]
    return {
        "as_many_rows": all(_rows_at_a_time(b) >= _rows_at_a_time(a) for a, b in pairs),
        "instructions": spread(b["instructions"] / a["instructions"] for a, b in pairs),
    }


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


def train_memory_table() -> Rows:
    """Bytes per parameter of the hidden matrices and GiB of a training step, by dtypes."""
    head = ["model", "optimizer", "weights", "gradients", "state", "held, GiB", "peak, GiB"]
    measured = read_json("train_memory_h200")
    rows = [
        [
            model,
            title(row["setup"]),
            *(f"{x:.2f}" for x in row["bytes_per_hidden_parameter"].values()),
            *(f"{row[name]:.2f}" for name in ("held_gib", "peak_gib")),
        ]
        for model in ("llama1b", "moe1.1b")
        for row in measured[model]
    ]
    return [head, *rows]


def registers_table() -> Rows:
    """How many rows a multiprocessor works on at a time, by their length and the momentum."""
    head = {"float32": True, "bfloat16": True, EIGHT: False}
    names = [*head, f"{EIGHT}, bounded"]
    body = [
        [f"{n:,}", *(str(_rows_at_a_time(found[key])) for key in (*head.items(), (EIGHT, True)))]
        for n, found in _compiled().items()
    ]
    return [["entries of a row", *names], *body]


def instructions_table() -> Rows:
    """How many instructions an entry takes before the polar factor, by the momentum's dtype."""
    names = [*MOMENTA, EIGHT]
    body = [
        [f"{n:,}", *(f"{found[name, True]['instructions']:.0f}" for name in names)]
        for n, found in _compiled().items()
    ]
    return [["entries of a row", *names], *body]
