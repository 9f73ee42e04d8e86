"""Registers and instructions of the row kernel before the polar factor, by the momentum's dtype.

    python benchmarks/registers.py --json results/registers.json

The kernel is compiled for a Hopper GPU; none is needed. A multiprocessor has 65,536 registers:
`programs` is how many programs, each of one tile of rows, they hold at a time. `instructions` is
how many machine instructions a thread executes for each of its entries, if no row of its tile is
zero. Rows are of one rank, or `summed` over ranks that share them by columns.
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
from angular_muown.kernels.launch import REGISTERS_8_BIT, row_tile
from angular_muown.kernels.triton.rows import before_kernel

HOPPER, REGISTERS = GPUTarget("cuda", 90, 32), 65_536
TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "int8": tl.int8}
POINTERS = {"table": "*i64", "work": "*fp16"} | dict.fromkeys(
    ("scalars", "stats", "sums", "maxima"), "*fp32"
)
SIZES = dict.fromkeys(("stride", "count", "m", "n"), "i32")
ALIGNED = {"table", "scalars", "stats", "work", "stride", "m", "n"}
FLAGS = dict.fromkeys(("MAXIMIZE", "FACTORS"), False)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(@\S+ )?\s*([A-Z][A-Z0-9_.]*)(.*)")


def measure(
    n: int, momentum: str, summed: bool = False, bounded: bool | None = None
) -> dict[str, Any]:
    """Compile the kernel for rows of n entries, as a step launches it or as `bounded` says."""
    rows, width, options = row_tile(n, momentum == "int8", summed)
    if bounded is not None:
        options.pop("maxnreg", None)
        options |= {"maxnreg": REGISTERS_8_BIT} if bounded else {}
    tile = {"M_TYPE": TYPES[momentum], "ROWS": rows, "COLUMNS": width}
    assembly, registers, spilled = assembled(compiled(tile, options, summed))
    threads = 32 * options["num_warps"]
    return {
        "n": n, "momentum": momentum, "summed": summed, "launched": bounded is None,
        "bounded": "maxnreg" in options, "threads": threads,
        "registers": registers, "spilled_bytes": spilled,
        "programs": REGISTERS // (registers * threads), "tile": [rows, width],
        "instructions": round(executed(assembly) * threads / (rows * n), 2),
    }  # fmt: skip


def compiled(tile: dict[str, Any], options: dict[str, int], summed: bool) -> str:
    """Return the kernel in PTX, with float32 weights and gradients."""
    scaled = summed and tile["M_TYPE"] == tl.int8
    ranks = {"SHARDED": summed, "SUMMED": summed, "SCALED": scaled}
    types = {"W_TYPE": tl.float32, "G_TYPE": tl.float32}
    chart = {"CHART": fields.OBLIQUE, "NESTEROV": True}
    constants = {**FLAGS, **ranks, **chart, **types, **tile}
    pointers = POINTERS | ({"sums": "*fp64"} if summed else {})
    names = before_kernel.arg_names
    source = ASTSource(
        fn=before_kernel,
        signature={name: (pointers | SIZES).get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED},
    )
    return triton.compile(source, target=HOPPER, options=options).asm["ptx"]


def assembled(ptx: str) -> tuple[str, int, int]:
    """Return the machine code as text, its registers per thread and the bytes that it spills."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [TOOLS / "ptxas", "-arch=sm_90a", "-v", source, "-o", binary]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [TOOLS / "nvdisasm", "-c", binary]
        assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled = (
        int(found[1])
        for text in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
        for found in [re.search(text, report)]
        if found
    )
    return assembly, registers, spilled


def executed(assembly: str) -> int:
    """Count the instructions up to the end of the kernel, without those that branches skip: its
    only branch skips what zero rows need."""
    count, label = 0, None
    for line in assembly.splitlines():
        if label is not None:
            label = None if line.startswith(f"{label}:") else label
        elif found := INSTRUCTION.match(line):
            condition, name, operands = found.groups()
            count += name != "NOP"
            if name == "EXIT" and not condition:
                return count
            label = operands.split("(")[1].split(")")[0] if name == "BRA" else None
    raise ValueError("the kernel has no end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=[768, 2048, 8192])
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    rows = []
    for n in arguments.sizes:
        for summed in (False, True):
            rows += [measure(n, momentum, summed) for momentum in TYPES]
            rows.append(measure(n, "int8", summed, bounded=summed))  # the other choice
    for row in rows:
        print(row)
    if arguments.json:
        content = {"target": "sm_90", "triton": triton.__version__, "results": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
