"""What methods are called in documents: runs have the names of the lab's arms."""

import re

from evidence.kept import Rows

OPTIMIZERS = {
    "angular_muown": "AngularMuown",
    "magnitude_direction": "MagnitudeDirection",
    "hyperball": "Hyperball",
    "muown": "Muown",
    "normuown": "NorMuown",
    "normuon": "NorMuon",
    "muon": "Muon",
    "adamw": "AdamW",
}
PHRASES = OPTIMIZERS | {
    "kappa": "κ",
    "falling rate": "falling learning rate",
    "radius rate": "`radius_lr`",
    "aux rate": "`aux_lr`",
    "momentum from 0.85": "ramped β",
    "aux_beta2": "β₂",
    "all beta2 0.99": "β₂ 0.99 for all",
    "slow_share": "slower momentum",
    "split_heads": "separate heads",
    "nesterov off": "no Nesterov",
    "soap for mlps": "SOAP for MLPs",
}
PATTERN = re.compile(rf"\b(?:{'|'.join(map(re.escape, PHRASES))})\b")
# Columns that name a method; in others "muon" may be part of a name of the library.
NAMES = {"method", "optimizer", "over", "claim"}


def title(arm: str) -> str:
    """Return an arm's label with the names that documents use."""
    return PATTERN.sub(lambda match: PHRASES[match[0]], arm)


def titled(table: Rows) -> Rows:
    """Return a table of the report with these names."""
    head, *body = table
    columns = [name in NAMES for name in head]
    rows = (
        [title(c) if named else c for c, named in zip(row, columns, strict=True)] for row in body
    )
    return [[title(name) for name in head], *rows]
