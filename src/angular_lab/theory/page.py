"""The page about the theory, from the JSON files of its parts."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from angular_lab.errors import UserError
from angular_lab.report.figures.plots import Figure
from angular_lab.report.page import Section, write_page
from angular_lab.report.tables import Table
from angular_lab.theory import figures, tables
from angular_lab.theory.claims import claims_table
from angular_lab.theory.tables import Data

TITLE = "AngularMuown: the theory, measured"
INTRODUCTION = (
    "The paper has a theoretical half: a theorem about an idealized update, and an account of how "
    "the angle of a step develops. This page runs both and reports the results. "
    "docs/explanation/theory.md explains them and ties each step of the proof to the code.",
    "Everything was computed on a CPU by angular-lab theory; its JSON files hold the numbers.",
)


@dataclass(frozen=True)
class Part:
    title: str
    words: str  # formatted with the part's data
    tables: tuple[Callable[[Data], Table], ...]
    figures: Callable[[Data], list[Figure]]
    details: tuple[Callable[[Data], Table], ...] = ()

    def section(self, key: str, data: Data) -> Section:
        return Section(
            key,
            self.title,
            words=(self.words.format(**data),),
            tables=[table(data) for table in self.tables],
            figures=self.figures(data),
            details=[table(data) for table in self.details],
        )


PARTS = {
    "solver": Part(
        "The tangent-constrained polar factor",
        "Algorithm 2 requires the direction D of steepest descent among those that are tangent and "
        "of operator norm at most 1. It is found through its dual: a multiplier for every row. The "
        "gap compares D with the dual value, which no direction can exceed, so it is a proof.",
        (tables.solver,),
        figures.solver,
    ),
    "guarantee": Part(
        "The guarantee, checked",
        "Algorithm 2, with the theorem's step size and momentum, on problems whose constants are "
        "known. The table shows the mean of the gradient's Frobenius norm over a run of T steps "
        "and the theorem's bound for it.",
        (tables.slopes,),
        figures.guarantee,
        (tables.cells, tables.assumptions),
    ),
    "regimes": Part(
        "Three regimes of the angle",
        "Gradients are white noise, so rows take random walks and their norms can be predicted. "
        "Nothing is fitted: the dashed lines are computed from the learning rate, the weight decay "
        "and the momentum.",
        (tables.regimes,),
        figures.regimes,
    ),
    "geometry": Part(
        "The geometry of a step",
        "How far a step turns a row, from small steps to very large ones; how normalizing the row "
        "compares with the exact way along great circles; and what transporting the momentum from "
        "one tangent space to the next changes.",
        (tables.momentum,),
        figures.geometry,
    ),
    "shortcut": Part(
        "What the shortcut loses",
        "The practical optimizer orthogonalizes without the constraint. Every hidden matrix of a "
        "{recipe} run ({steps} steps, lr {lr:g}) was measured next to the run: how far the "
        "shortcut is from the exact direction.",
        (tables.shortcut,),
        figures.shortcut,
    ),
}


def make_page(results: Path, out: Path) -> Path:
    """Write the page about every part that has a JSON file in `results`."""
    by_part: dict[str, Data] = {
        part: json.loads(path.read_text())
        for part in PARTS
        if (path := results / f"{part}.json").exists()
    }
    if not by_part:
        raise UserError(
            f"{results} has no results: run `angular-lab theory` without arguments to measure"
        )
    warnings = [
        f"{part}: measured with --quick, its numbers mean nothing"
        for part, data in by_part.items()
        if data["command"].endswith("--quick")
    ]
    overview = Section(
        "overview",
        "Overview",
        warnings=warnings,
        tables=[claims_table(by_part)],
        details=[tables.commands(by_part)],
    )
    sections = [PARTS[part].section(part, data) for part, data in by_part.items()]
    return write_page(out, TITLE, [overview, *sections], INTRODUCTION)
