"""The times of sharded steps in the docs are those of the kept files."""

import json
from typing import Any

from angular_muown.distributed import copies
from angular_muown.distributed.mesh import RankGroup
from angular_muown.stages.orthogonalize import polar_express
from tests.evidence.kept import ROOT, tables_in

PAGE = (ROOT / "docs" / "distributed.md").read_text()
MODELS = ("gpt124", "llama1b")
# Rows and columns of the hidden matrices, as in benchmarks/shapes.py.
GPT124 = [*[(768, 768)] * 48, *[(2048, 768)] * 24, *[(768, 2048)] * 12]
LLAMA1B = [*[(2048, 2048)] * 32, *[(512, 2048)] * 32, *[(8192, 2048)] * 32, *[(2048, 8192)] * 16]


def kept(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "results" / f"ranks_{name}.json").read_text())
    return content


def row_of(name: str, model: str, ranks: int) -> dict[str, Any]:
    return next(row for row in kept(name)[model] if row["ranks"] == ranks)


def table(first: str) -> list[dict[str, str]]:
    """Return a table's rows, whose cells may be empty."""
    [found] = [t for t in tables_in(PAGE) if t.startswith(f"| {first} |")]
    head, _, *lines = ([c.strip() for c in line.split("|")[1:-1]] for line in found.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def wire(row: dict[str, Any]) -> str:
    return f"{row['wire_ms']:.2f}" if "wire_ms" in row else ""


def test_strong_scaling() -> None:
    rows = [row for model in MODELS for row in kept("h200")[model]]
    alone = {model: row_of("h200", model, 1)["ms"] for model in MODELS}
    models = [model for model in MODELS for _ in kept("h200")[model]]
    shown = table("strong scaling")
    assert len(shown) == len(rows)
    for cells, row, model in zip(shown, rows, models, strict=True):
        eager = [r["ms"] for r in kept("h200_eager")[model] if r["ranks"] == row["ranks"]]
        assert cells == {
            "strong scaling": model if row["ranks"] == 1 else "",
            "ranks": str(row["ranks"]),
            "ms per step": f"{row['ms']:.1f}",
            "eager exchange": f"{eager[0]:.1f}" if eager else "",
            "one GPU's time over the ranks": f"{alone[model] / row['ranks']:.2f}",
            "wire, modelled": wire(row),
            "shard, MiB": f"{row['shard_mib']:,.1f}",
            "above state, MiB": f"{row['extra_mib']:,.0f}",
        }


def test_weak_scaling() -> None:
    sources = [
        ("h200", "gpt124", 1),
        ("4layers_h200", "llama1b", 2),
        ("h200", "llama1b", 8),
        ("8b_h200", "llama8b", 64),
        ("70b_h200", "llama70b", 512),
    ]
    for cells, source in zip(table("weak scaling"), sources, strict=True):
        row = row_of(*source)
        assert cells["ranks"] == str(source[2])
        assert cells["parameters per rank"] == f"{row['shard_mib'] * 2**20 / 4e6:.0f}M"
        assert cells["ms per step"] == f"{row['ms']:.1f}"
        assert cells["wire, modelled"] == wire(row)
        assert cells["above state, MiB"] == f"{row['extra_mib']:,.0f}"


def test_placements_and_members() -> None:
    sources = [(name, ranks) for name in ("columns", "hsdp", "ddp") for ranks in (8, 64)]
    for cells, (name, ranks) in zip(table("ms per step, rank 0"), sources, strict=True):
        assert cells["ranks"] == str(ranks)
        for model in MODELS:
            assert cells[model] == f"{row_of(f'{name}_h200', model, ranks)['ms']:.1f}"
    rows = kept("members_h200")["llama1b"]
    members = ", ".join(f"{row['optimizer']} {row['ms']:.1f} ms" for row in rows)
    assert f"on 8 ranks, llama1b: {members}." in PAGE


def test_goals_and_memory_in_words() -> None:
    files = ("h200", "h200_first", "hsdp_h200", "hsdp_h200_first")
    times = [row_of(name, "gpt124", 8)["ms"] for name in files]
    assert f"in two runs, gave {min(times):.2f} to {max(times):.2f} ms, and the goal of" in PAGE
    assert min(times) > 1.2
    for name in ("h200", "h200_first"):
        assert row_of(name, "llama1b", 8)["ms"] < 8.5
        assert row_of(name, "llama1b", 64)["ms"] < 2.5
    two, eight = (row_of("h200", "llama1b", ranks) for ranks in (2, 8))
    share = 100 * two["extra_mib"] / two["shard_mib"]
    rest = eight["extra_mib"] - eight["shard_mib"] / 4
    told = (
        f"llama1b on 2 ranks takes {share:.0f}% of its shard, on 8 ranks a quarter and {rest:.0f}"
    )
    assert told in PAGE


def test_what_the_cost_model_says_of_a_node(monkeypatch: Any) -> None:
    monkeypatch.setattr(copies, "ranks_per_node", lambda: 8)
    node = RankGroup(tuple(range(8)), 0)
    told = []
    for matrices in (GPT124, LLAMA1B):
        products, q = copies.modelled_times(matrices, polar_express, node)
        assert copies.sharing_pays(matrices, polar_express, node, 1)
        told += [f"{products / 1e3:.2g}", f"{q / 1e3:.1f}"]
    sentence = (
        "gpt124's products take {} ms and its Q travels in {} ms; llama1b's take {} ms and its"
    )
    assert f"{sentence} Q {{}} ms. Both share.".format(*told) in PAGE
    across = RankGroup(tuple(range(0, 64, 8)), 0)
    pays = [copies.sharing_pays(m, polar_express, across, 8) for m in (GPT124, LLAMA1B)]
    assert pays == [False, True]
    assert "each copy steps alone. llama1b's copies share" in PAGE
