"""How often a run reads its corpus. No torch here."""

from pathlib import Path

from angular_lab.config.spec import Spec
from angular_lab.data.shards import Manifest, read_header

LEAST = 0.01  # of a pass, that is shown


def corpus_tokens(data: Path) -> int:
    """Return the training tokens of a prepared folder, or of shards without a manifest."""
    if manifest := Manifest.load(data):
        return manifest.splits["train"].tokens
    return sum(read_header(path)[0] for path in data.glob("*train*.bin"))


def passes(spec: Spec, data: Path) -> float:
    """Return how often a run reads the corpus by its end; infinite without training tokens."""
    available = corpus_tokens(data)
    return spec.steps * spec.tokens_per_step / available if available else float("inf")


def describe_passes(spec: Spec, data: Path) -> str:
    """Return 0.42 passes over 43.7M training tokens; <0.01 where two decimals would say none."""
    available, count = corpus_tokens(data), passes(spec, data)
    size = f"{available / 1e6:,.1f}M" if available >= 100_000 else f"{available:,}"
    shown = f"{count:.2f}" if count >= LEAST / 2 else f"<{LEAST}"
    return f"{shown} passes over {size} training tokens"
