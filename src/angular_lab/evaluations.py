"""Evaluations of a run's checkpoints on other text, in evaluations.jsonl. No torch here."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from typing import Any

from angular_lab.records import from_json
from angular_lab.run_folder import RunFolder, read_lines, write_atomically


@dataclass(frozen=True)
class Evaluation:
    """A line of evaluations.jsonl."""

    step: int  # of the checkpoint
    average: float | None  # window of the average that was evaluated; None: the weights
    on: str  # the path as given
    data: str  # fingerprint of the text
    loss: float  # nats per token
    tokens: int
    bytes: int  # of the same text in UTF-8

    @property
    def bits_per_byte(self) -> float:
        return self.loss * self.tokens / log(2) / self.bytes

    @property
    def perplexity(self) -> float:
        return exp(min(self.loss, 700.0))

    @property
    def key(self) -> tuple[str, int, float | None, int]:
        """What an evaluation is of; a later one replaces an earlier one. A text of which more
        tokens are evaluated has another loss."""
        return self.data, self.step, self.average, self.tokens

    def to_dict(self) -> dict[str, Any]:
        derived = {"bits_per_byte": self.bits_per_byte, "perplexity": self.perplexity}
        return asdict(self) | derived

    @property
    def row(self) -> dict[str, Any]:
        """Return the evaluation for a table."""
        return {
            "text": Path(self.on).name,
            "step": self.step,
            "weights": "as they are" if self.average is None else f"average {self.average:g}",
            "loss": f"{self.loss:.4f}",
            "bits per byte": f"{self.bits_per_byte:.4f}",
            "perplexity": f"{self.perplexity:.4g}",
            "tokens": self.tokens,
            "bytes": self.bytes,
        }


def read_evaluations(folder: Path, warnings: list[str]) -> list[Evaluation]:
    """Return the evaluations of a run, in the order in which they were made."""
    path = RunFolder(folder).evaluations_path
    found: dict[Any, Evaluation] = {}
    for values in read_lines(path, warnings):
        given = {k: v for k, v in values.items() if k not in ("bits_per_byte", "perplexity")}
        try:
            evaluation = from_json(Evaluation, given)
        except TypeError as error:
            warnings.append(f"{path}: a line is not an evaluation ({error}): left out")
            continue
        found.pop(evaluation.key, None)
        found[evaluation.key] = evaluation
    return [*found.values()]


def record(folder: Path, new: Sequence[Evaluation]) -> None:
    """Add evaluations to a run; they replace earlier ones of the same tokens and weights."""
    run, before = RunFolder(folder), read_evaluations(folder, [])
    keys = {evaluation.key for evaluation in new}
    if not keys & {evaluation.key for evaluation in before}:
        for evaluation in new:
            run.append(run.evaluations_path, evaluation.to_dict())
        return
    kept = [evaluation for evaluation in before if evaluation.key not in keys]
    lines = [json.dumps(evaluation.to_dict()) + "\n" for evaluation in (*kept, *new)]
    write_atomically(run.evaluations_path, "".join(lines))
