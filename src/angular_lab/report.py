"""One page about a set of runs: a table, the curves, and what the models write.

Reads run folders only and never imports torch; the page needs no network.
"""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from angular_lab.plots import Curve, Panel, save_png, svg
from angular_lab.rundir import RunDir

STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
figure { margin: .5rem; }
svg { width: 100%; height: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .7rem; }
pre { border: 1px solid var(--line); border-radius: .4rem; }
"""


def summary(run: RunDir) -> dict[str, Any]:
    """The row of a run: where it ended and how fast it was."""
    spec, lines = run.read_spec(), run.read_metrics()
    if not lines:
        raise ValueError(f"{run.path} has no metrics yet")
    evaluated = [line for line in lines if "val_loss" in line]
    angles = [line["angle_mean"] for line in lines if "angle_mean" in line]
    timing = [json.loads(line) for line in run.timing_path.read_text().splitlines()]
    last = evaluated[-1] if evaluated else {}
    return {
        "optimizer": spec.optim.name,
        "lr": spec.optim.lr,
        "steps": lines[-1]["step"],
        "tokens": lines[-1]["tokens"],
        "validation loss": last.get("val_loss"),
        "bits per byte": last.get("val_bits_per_byte"),
        "angle, first to last (mrad)": f"{1e3 * angles[0]:.2f} - {1e3 * angles[-1]:.2f}"
        if angles
        else None,
        "tokens/s": median(line["tokens_per_second"] for line in timing),
    }


def curves(runs: Sequence[RunDir], key: str) -> list[Curve]:
    found: list[Curve] = []
    for run in runs:
        lines = [line for line in run.read_metrics() if key in line]
        label = run.read_spec().optim.name
        found.append((label, [line["tokens"] for line in lines], [line[key] for line in lines]))
    return found


def write_report(
    folders: Sequence[Path], out: Path, title: str, texts: Sequence[tuple[str, str]] = ()
) -> Path:
    """index.html and curves.png in `out`; `texts` are (heading, text) pairs to show at the end."""
    runs = [RunDir(folder) for folder in folders]
    if not runs:
        raise ValueError("no runs to report on")
    rows = [summary(run) for run in runs]
    panels = [
        Panel(curves(runs, "val_loss"), "tokens", "validation loss"),
        Panel(curves(runs, "angle_mean"), "tokens", "mean angle per step (rad)", log_y=True),
        Panel(curves(runs, "row_norm_mean"), "tokens", "mean row norm"),
        Panel(curves(runs, "loss"), "tokens", "training loss"),
    ]
    page = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{html.escape(title)}</h1>",
        f"<div class=wide>{_table(rows)}</div>",
        f"<div class=figures>{''.join(f'<figure>{svg(panel)}</figure>' for panel in panels)}</div>",
        *(f"<h2>{html.escape(h)}</h2><pre>{html.escape(text)}</pre>" for h, text in texts),
        "</html>",
    ]
    out.mkdir(parents=True, exist_ok=True)
    save_png(panels[:2], out / "curves.png")
    target = out / "index.html"
    target.write_text("\n".join(page))
    return target


def text_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [list(rows[0]), *([_format(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{html.escape(key)}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_format(v))}</td>" for v in row.values()) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _format(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
