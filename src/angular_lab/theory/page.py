"""One page of figures and tables from the measured files. Never imports torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from angular_lab.report.page import Section, write_page
from angular_lab.report.tables import Table
from angular_lab.theory import figures, tables
from angular_lab.theory.claims import claims

Data = dict[str, Any]

TITLE = "AngularMuown: the theory, measured"
INTRODUCTION = (
    "The paper has a theoretical half: a theorem about an idealized update, and a picture of what "
    "happens to the angle of a step. This page runs both and shows what came out. docs/theory.md "
    "tells the story and ties each step of the proof to the code.",
    "Everything here was computed on a CPU by angular-lab theory; its JSON files hold the numbers.",
)


def solver_section(data: Data) -> Section:
    words = (
        "Algorithm 2 wants the direction D that descends most among those that are tangent and of "
        "operator norm at most 1. It is found through its dual: a multiplier for every row. The "
        "gap compares D with the dual value, which no direction can beat, so it is a proof.",
    )
    return Section(
        "solver",
        "The tangent-constrained polar factor",
        words,
        tables=[tables.solver(data)],
        figures=figures.solver(data),
    )


def guarantee_section(data: Data) -> Section:
    words = (
        "Algorithm 2, with the theorem's step size and momentum, on problems whose constants are "
        "known. Shown is the mean of the gradient's Frobenius norm over a run of T steps, and the "
        "bound that the theorem gives for it.",
    )
    return Section(
        "guarantee",
        "The guarantee, checked",
        words,
        tables=[tables.slopes(data)],
        figures=figures.guarantee(data),
        details=[tables.cells(data), tables.assumptions(data)],
    )


def regimes_section(data: Data) -> Section:
    words = (
        "Gradients are white noise, so rows take random walks and their lengths can be predicted. "
        "Nothing is fitted: the dashed lines are computed from the learning rate, the weight decay "
        "and the momentum.",
    )
    return Section(
        "regimes",
        "Three regimes of the angle",
        words,
        tables=[tables.regimes(data)],
        figures=figures.regimes(data),
    )


def geometry_section(data: Data) -> Section:
    words = (
        "How far a step turns a row, from small steps to very large ones; how normalizing the row "
        "compares with the exact way along great circles; and what carrying the momentum from one "
        "tangent space to the next is worth.",
    )
    return Section(
        "geometry",
        "The geometry of a step",
        words,
        tables=[tables.momentum(data)],
        figures=figures.geometry(data),
    )


def shortcut_section(data: Data) -> Section:
    words = (
        f"The practical optimizer orthogonalizes without the constraint. In a run of the "
        f"{data['recipe']} recipe ({data['steps']} steps, lr {data['lr']:g}) every hidden matrix "
        "was looked at beside the run: how far the shortcut is from the exact direction.",
    )
    return Section(
        "shortcut",
        "What the shortcut loses",
        words,
        tables=[tables.shortcut(data)],
        figures=figures.shortcut(data),
    )


PARTS: dict[str, Callable[[Data], Section]] = {
    "solver": solver_section,
    "guarantee": guarantee_section,
    "regimes": regimes_section,
    "geometry": geometry_section,
    "shortcut": shortcut_section,
}


def make_page(results: Path, out: Path) -> Path:
    """The page about every part that has been measured."""
    found = {
        part: json.loads((results / f"{part}.json").read_text())
        for part in PARTS
        if (results / f"{part}.json").exists()
    }
    if not found:
        raise ValueError(
            f"{results} has no results: run `angular-lab theory` without arguments to measure"
        )
    sections = [PARTS[part](data) for part, data in found.items()]
    warnings = [
        f"{part}: measured with --quick, the numbers say nothing"
        for part, data in found.items()
        if data["command"].endswith("--quick")
    ]
    made: list[Table] = [tables.made(found)]
    opening = Section("short", "In short", (), warnings, [claims(found)], details=made)
    return write_page(out, TITLE, [opening, *sections], INTRODUCTION)
