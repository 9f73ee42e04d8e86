"""Kept benchmarks of one GPU: steps, training throughput, products of the polar factor."""

from collections.abc import Iterable, Sequence
from itertools import product
from math import ceil
from typing import Any

from angular_lab.pace.record import Pace
from evidence.kept import OURS, RESULTS, Rows, read_json
from evidence.measures import Facts, spread

DIGITS = {"gpt124": 2, "llama1b": 1, "moe1.1b": 1}  # shown of a step's milliseconds
GOALS = {"gpt124": 3.0, "llama1b": 60, "moe1.1b": 34}  # milliseconds
FUSED = ("AngularMuown", "Muown", "NorMuown", "Muon", "NorMuon")
EAGER = ("Hyperball", "MagnitudeDirection")
FILES = {"first": "fused", "second": "fused_again", "earlier": "rivals"}  # the others by their name
PACE = RESULTS / "pace_s_h200.json"  # on a part of the corpora of s, with their tokenizer
Run = dict[str, dict[str, dict[str, Any]]]  # by shapes and optimizer


def _file(name: str) -> dict[str, Any]:
    return read_json(f"step_time_h200_{FILES.get(name, name)}")


def _run(name: str) -> Run:
    file = _file(name)
    return {shapes: {row["optimizer"]: row for row in file[shapes]} for shapes in DIGITS}


def facts() -> Facts:
    runs = {name: _run(name) for name in (*FILES, "eager", "edition1", "edition2", "edition3")}
    tflops = {name: _file(name)["operations_per_second"] / 1e12 for name in ("first", "second")}
    return {
        "step_time": runs
        | {"tflops": tflops, "small": _small()}
        | _ranges(*(runs[n] for n in FILES))
        | _goals(runs),
        "throughput": _throughput(),
        "pace": _pace_facts(),
    }


def _small() -> Facts:
    """Return model S's step times before its kernels were allowed 64 MiB and after, and the
    host's part of the latter."""
    columns = {
        "before": ("small_before", "ms"),
        "after": ("small", "ms"),
        "host": ("small", "host_ms"),
    }
    return {
        name: {row["optimizer"]: row[key] for row in _file(file)["s"]}
        for name, (file, key) in columns.items()
    }


def _ranges(first: Run, second: Run, earlier: Run) -> Facts:
    compared = product(("gpt124", "llama1b"), ("AngularMuown", "torch.optim.Muon"))
    ranges = {
        f"{shapes}.{name}": spread(run[shapes][name]["ms"] for run in (first, second, earlier))
        for shapes, name in compared
    }
    apart = (
        abs(run[shapes][name]["ms"] / run[shapes]["AngularMuown"]["ms"] - 1)
        for run, shapes, name in product((first, second), DIGITS, FUSED)
    )
    small, *larger = ([_memory(earlier[shapes][name]) for name in EAGER] for shapes in DIGITS)
    torch_muon = [run["gpt124"]["torch.optim.Muon"] for run in (first, second, earlier)]
    return {
        "range": ranges,
        "members_apart": ceil(100 * max(apart)) / 100,
        "members_host_ms": spread(first["gpt124"][name]["host_ms"] for name in FUSED),
        "eager_memory_gpt124": spread(small),
        "eager_memory_larger": spread(x for shares in larger for x in shares),
        "torch_muon_is_host_bound": all(x["host_ms"] > 0.95 * x["ms"] for x in torch_muon),
    }


def _memory(row: dict[str, Any]) -> float:
    """Return the memory above parameters, gradients and state, as a share of the parameters."""
    share: float = row["extra_mib"] / row["parameters_mib"]
    return share


def _goals(runs: dict[str, Run]) -> Facts:
    ours = {n: {s: rows["AngularMuown"] for s, rows in runs[n].items()} for n in FILES}
    over = {n: {s: row["ms"] / GOALS[s] - 1 for s, row in x.items()} for n, x in ours.items()}
    host = {n: x["gpt124"]["host_ms"] for n, x in ours.items()}
    normuon = [runs[n]["gpt124"]["NorMuon"]["ms"] for n in ("first", "second")]
    return {
        "over_goal": over,
        "gpt124_goal_on_one_machine": over["first"]["gpt124"] <= 0 < over["second"]["gpt124"],
        "normuon_faster_on_the_second": normuon[1] < normuon[0],
        "host_goal_in_two_of_three": max(host["first"], host["second"]) < 0.5 < host["earlier"],
    }


def _pair(values: Iterable[float], spec: str) -> str:
    """Return the value on the first machine, and in brackets on the second."""
    first, second = (format(value, spec) for value in values)
    return f"{first} ({second})"


def step_times() -> Rows:
    runs, earlier = [_run("first"), _run("second")], _run("earlier")
    files = [_file("first"), _file("second")]
    spec = {shapes: f".{digits}f" for shapes, digits in DIGITS.items()}

    def cell(name: str, s: str) -> str:
        rows = [run[s][name] for run in runs]
        return _pair((x["ms"] for x in rows), spec[s]) if "ms" in rows[0] else rows[0]["note"]

    def eager(name: str, s: str) -> str:
        return format(earlier[s][name]["ms"], spec[s])

    floors = (_pair((file[f"{s}_floor_ms"] for file in files), spec[s]) for s in DIGITS)
    return [
        ["ms per step", *DIGITS],
        *([name, *(cell(name, s) for s in DIGITS)] for name in FUSED),
        *([f"{name}, eager", *(eager(name, s) for s in DIGITS)] for name in EAGER),
        ["torch.optim.Muon", *(cell("torch.optim.Muon", s) for s in DIGITS)],
        ["torch.optim.AdamW, fused", *(cell("torch.optim.AdamW", s) for s in DIGITS)],
        ["floor without the Gram form, same run", *floors],
        ["goal", *map(str, GOALS.values())],
    ]


def side_by_side() -> Rows:
    """One run of ours and of other packages, and below it what our benchmark's kept runs say."""
    measured = _file("side_by_side")["ms per step, lowest and highest"]
    rows = [
        [x["optimizer"], x["code"], *(_span(x[s]) if x[s] else "no 3D" for s in DIGITS)]
        for x in measured
    ]
    runs = [_run(name) for name in FILES]
    for name in ("AngularMuown", "NorMuon", "torch.optim.Muon"):
        times = ([run[s][name]["ms"] for run in runs if "ms" in run[s][name]] for s in DIGITS)
        cells = [_span((min(x), max(x))) if x else "no 3D" for x in times]
        rows.append([f"{name}, our benchmark", "kept runs", *cells])
    return [["ms per step", "code", *DIGITS], *rows]


def _span(ends: Sequence[float]) -> str:
    low, high = (f"{x:.1f}" for x in ends)
    return low if low == high else f"{low} to {high}"


def step_memory() -> Rows:
    runs = [_run("first"), _run("second")]
    pairs = [[run[s]["AngularMuown"] for run in runs] for s in DIGITS]
    memory = (_pair(map(_memory, pair), ".0%") for pair in pairs)
    host = (_pair((row["host_ms"] for row in pair), ".2f") for pair in pairs)
    graph = (_pair((row["graph_host_ms"] for row in pair), ".3f") for pair in pairs)
    return [
        ["AngularMuown", *DIGITS, "goal"],
        ["memory above parameters, gradients and state", *memory, "25%"],
        ["host, ms per step", *host, "0.5 for gpt124"],
        ["host inside a graph of the user's", *graph, "0.1 for gpt124"],
    ]


def _optimizers() -> dict[str, dict[str, Any]]:
    return {row["optimizer"]: row for row in read_json("throughput_optimizers_h200")["results"]}


def _throughput() -> Facts:
    speed = {name: row["tokens_per_second"] / 1e6 for name, row in _optimizers().items()}
    muons = [row for name, row in _optimizers().items() if name != "adamw"]
    [share] = {round(row["optimizer_share"], 2) for row in muons}
    slowest, *_, fastest = sorted(speed[row["optimizer"]] for row in muons)
    return {
        "M_per_second": speed,
        "optimizer_share_of_muons": share,
        "muons_are_equally_fast": fastest < 1.01 * slowest,
    }


def measured_pace() -> Pace:
    """Return the kept pace of model S. One of a shared GPU is an error."""
    pace = Pace.read(PACE)
    if pace.disturbed_by:
        raise ValueError(f"{PACE.name} gives no factor: {'; '.join(pace.disturbed_by)}")
    return pace


def time_ratio(other: str) -> float:
    """Return the time per step of another optimizer over that of ours. The pace is the only source
    of factors in time."""
    pace = measured_pace()
    return pace.ratios(pace.of(other), pace.of(OURS)).median


def _pace_facts() -> Facts:
    return {
        row["optimizer"]: {
            "ms": row["ms"]["median"],
            "M_per_second": row["tokens_per_second"] / 1e6,
            "time_ratio": row["time_ratio"],
        }
        for row in measured_pace().rows()
    }


def pace_table() -> Rows:
    rows = []
    for row in measured_pace().rows():
        ms, ratio = row["ms"], row["time_ratio"]
        times = f"{ms['median']:.2f}", f"{ms['first']:.2f} to {ms['third']:.2f}"
        ratios = f"{ratio['median']:.3f}×", f"{ratio['first']:.3f} to {ratio['third']:.3f}"
        memory = f"{row['memory_gib']:.2f}"
        speed = f"{row['tokens_per_second']:,.0f}"
        rows.append([row["optimizer"], speed, *times, *ratios, memory])
    head = ["optimizer", "tokens/s", "ms per step", "quartiles", "time / AdamW's", "its quartiles"]
    return [[*head, "memory (GiB)"], *rows]


def throughput_of_optimizers() -> Rows:
    optimizers = _optimizers()
    rows = []
    for name, row in optimizers.items():
        times = f"{row['tokens_per_second']:,.0f}", f"{row['step_ms']:.2f}"
        relative = f"{row['step_ms'] / optimizers[OURS]['step_ms']:.3f}×"
        rows.append([name, *times, f"{row['optimizer_share']:.1%}", relative])
    head = ["optimizer", "tokens/s", "ms per step", "of it the optimizer"]
    return [[*head, "time relative to angular_muown"], *rows]


def throughput() -> Rows:
    rows = []
    for row in (x for n in ("s", "124m") for x in read_json(f"throughput_{n}_h200")["results"]):
        passes, tokens = row["passes_per_step"], row["tokens_per_step"]
        size = f"{tokens:,}" if passes == 1 else f"{passes} x {tokens // passes:,}"
        speed = f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}"
        share = f"{row['optimizer_share']:.1%}"
        rows.append([f"`{row['recipe']}`", "AngularMuown", size, *speed, share])
    head = ["named run", "optimizer", "tokens per step", "tokens/s", "MFU", "optimizer's share"]
    return [head, *rows]


def orthogonalize() -> Rows:
    """The file has a star at the path that the cost model picks."""
    rows = []
    for row in read_json("orthogonalize_h200")["results"]:
        count, m, n = row["shape"]
        times = (f"{x['ms']:.2f} ms{'*' * p.endswith('*')}" for p, x in row["paths"].items())
        rows.append([f"{count} of {m} × {n}", *times])
    return [["matrices", "plain, bf16", "`single`", "`pairs`"], *rows]


def spectra() -> Rows:
    names = {
        "gauss": "Gaussian",
        "1..1e-3": "1 to 1e-3",
        "1..1e-12": "1 to 1e-12",
        "two values": "1 and 0.01",
        "huge row": "one huge row",
        "huge column": "one huge column",
    }

    def shown(error: float) -> str:
        return f"{error:.1e}".replace("e-0", "e-") if error < 1 else f"{error:.1f}"

    rows = []
    for name, errors in read_json("spectra")["errors"].items():
        cells = (shown(errors[path]) for path in ("bf16", "single", "pairs"))
        rows.append([names.get(name, name), *cells])
    return [["spectrum", "bf16 as published", "`single`", "`pairs`"], *rows]
