"""The machine that a plan for many ranks is made for: rates, and who is near whom."""

from dataclasses import dataclass, field
from typing import Any


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _given(value: float, meaning: str) -> Any:
    return field(default=value, metadata={"help": meaning})


@dataclass(frozen=True)
class Machine:
    """Rates that a rank can hold. The defaults are an H100's datasheet, but for two: `tflops` is
    what plain products of bf16 reach in docs/performance.md, and `latency` is a guess."""

    bandwidth: float = _given(450.0, "GB/s that a rank sends to others of its node")
    internode: float = _given(50.0, "GB/s that a rank sends to other nodes")
    ranks_per_node: int = _given(8, "ranks of a node")
    tflops: float = _given(500.0, "TFLOP/s of a rank's products")
    memory: float = _given(3350.0, "GB/s of a rank's memory")
    latency: float = _given(2.0, "microseconds for a message")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name != "latency"):
                raise ValueError(f"{flag(name)} {value:g}: it must be above 0")


@dataclass(frozen=True)
class Team:
    """Ranks `stride` apart, the first at the start of a node."""

    size: int
    stride: int = 1

    def outside(self, per_node: int) -> float:
        """The share of a rank's peers that are in other nodes."""
        if self.size == 1:
            return 0.0
        near = min(self.size, max(1, per_node // self.stride))
        return (self.size - near) / (self.size - 1)
