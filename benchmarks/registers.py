"""Registers of the row kernel before the polar factor, by the dtype of the momentum.

    python benchmarks/registers.py --json results/registers.json

The kernel is compiled for a Hopper GPU; none is needed. A multiprocessor has 65,536 registers: how
many programs, each of one tile of rows, they hold at a time is the table's last column.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from angular_muown.kernels import columns as fields
from angular_muown.kernels.launch import row_tile
from angular_muown.kernels.triton.rows import before_kernel

HOPPER, REGISTERS = GPUTarget("cuda", 90, 32), 65_536
TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "int8": tl.int8}
POINTERS = {"table": "*i64", "work": "*fp16"} | dict.fromkeys(
    ("scalars", "stats", "sums", "maxima"), "*fp32"
)
SIZES = dict.fromkeys(("stride", "count", "m", "n"), "i32")
ALIGNED = {"table", "scalars", "stats", "work", "stride", "m", "n"}
FLAGS = dict.fromkeys(("MAXIMIZE", "FACTORS", "SHARDED", "SUMMED", "SCALED"), False)


def measure(n: int, momentum: str, bounded: bool = True) -> dict[str, Any]:
    """Compile the kernel for rows of n entries, as a step launches it or without the bound."""
    rows, width, options = row_tile(n, momentum == "int8")
    if not bounded:
        options.pop("maxnreg")
    types = {"W_TYPE": tl.float32, "G_TYPE": tl.float32, "M_TYPE": TYPES[momentum]}
    chart = {"CHART": fields.OBLIQUE, "NESTEROV": True}
    constants = {**FLAGS, **chart, **types, "ROWS": rows, "COLUMNS": width}
    names = before_kernel.arg_names
    source = ASTSource(
        fn=before_kernel,
        signature={name: (POINTERS | SIZES).get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED},
    )
    compiled = triton.compile(source, target=HOPPER, options=options)
    registers, spilled = assembled(compiled.asm["ptx"])
    threads = 32 * options["num_warps"]
    return {
        "n": n, "momentum": momentum, "bounded": bounded, "threads": threads,
        "registers": registers, "spilled_bytes": spilled,
        "programs": REGISTERS // (registers * threads), "tile": [rows, width],
    }  # fmt: skip


def assembled(ptx: str) -> tuple[int, int]:
    """Return the registers per thread and the spilled bytes that NVIDIA's assembler reports."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [assembler, "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (
        int(found[1])
        for text in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
        for found in [re.search(text, report)]
        if found
    )
    return registers, spilled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=[768, 2048, 8192])
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    rows = []
    for n in arguments.sizes:
        rows += [measure(n, momentum) for momentum in TYPES] + [measure(n, "int8", bounded=False)]
    for row in rows:
        print(row)
    if arguments.json:
        content = {"target": "sm_90", "triton": triton.__version__, "results": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
