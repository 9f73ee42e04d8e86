"""The speed of the machines in a simulated cluster. Without torch, for the command's --help."""

from dataclasses import dataclass, field
from typing import Any

from angular_lab.errors import UserError


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _option(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Machine:
    """Sustained speeds of a rank. The defaults are from an H100's datasheet, except two: `tflops`
    is what plain bf16 products reach in docs/explanation/kernels.md, and `latency` is a guess."""

    bandwidth: float = _option(450.0, "GB/s from a rank to the others of its node")
    internode: float = _option(50.0, "GB/s from a rank to other nodes")
    ranks_per_node: int = _option(8, "ranks per node")
    tflops: float = _option(500.0, "TFLOP/s of a rank's matrix products")
    memory: float = _option(3350.0, "GB/s of a rank's memory")
    latency: float = _option(2.0, "microseconds per message")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "latency" and value < 0:
                raise UserError(f"{flag(name)} {value:g}: it must be at least 0")
            if name != "latency" and value <= 0:
                raise UserError(f"{flag(name)} {value:g}: it must be above 0")
