"""What the row kernels share: where things lie, and how they are read.

The maths is that of `engine.update` and its stages, written down a second time because a compiler
needs it in this form; tests/angular_muown/test_kernels.py holds the two together. `table` has one
line per matrix, `numbers` a step's scalars; columns.py names what is where.
"""

import triton
import triton.language as tl

from angular_muown.kernels import columns

# a kernel sees constants only as constexpr
WEIGHT = tl.constexpr(columns.WEIGHT)
GRADIENT = tl.constexpr(columns.GRADIENT)
MOMENTUM = tl.constexpr(columns.MOMENTUM)
ROW_STRIDE = tl.constexpr(columns.ROW_STRIDE)
STORED_NORM = tl.constexpr(columns.STORED_NORM)
SECOND_MOMENT = tl.constexpr(columns.SECOND_MOMENT)
EXP_AVG = tl.constexpr(columns.EXP_AVG)
EXP_AVG_SQ = tl.constexpr(columns.EXP_AVG_SQ)
STATE_STRIDE = tl.constexpr(columns.STATE_STRIDE)
LINE = tl.constexpr(columns.LINE)
BETA = tl.constexpr(columns.BETA)
STEP = tl.constexpr(columns.STEP)
RADIUS_LR = tl.constexpr(columns.RADIUS_LR)
DECAY = tl.constexpr(columns.DECAY)
BETA1 = tl.constexpr(columns.BETA1)
BETA2 = tl.constexpr(columns.BETA2)
EPS = tl.constexpr(columns.EPS)
ROW_BETA = tl.constexpr(columns.ROW_BETA)
SEED = tl.constexpr(columns.SEED)
EXPONENT = tl.constexpr(columns.EXPONENT)
SQUARES = tl.constexpr(columns.SQUARES)
RADIAL = tl.constexpr(columns.RADIAL)
FACTOR = tl.constexpr(columns.FACTOR)
CHORD = tl.constexpr(columns.CHORD)
FLAT = tl.constexpr(columns.FLAT)
WEIGHT_NORM = tl.constexpr(columns.WEIGHT_NORM)
FIXED = tl.constexpr(columns.FIXED)
ADAM = tl.constexpr(columns.ADAM)


@triton.jit
def address(table, matrix, column: tl.constexpr, TYPE: tl.constexpr, BYTES: tl.constexpr):
    """An address from the table, known to be a multiple of BYTES: said where it is made, because
    the compiler does not carry such a hint into or out of a function."""
    return tl.multiple_of(tl.load(table + matrix * LINE + column).to(tl.pointer_type(TYPE)), BYTES)


@triton.jit
def divisor(x):
    return tl.where(x == 0.0, 1.0, x)


@triton.jit
def exponents(X):
    """Powers of two that bring rows to [1, 2) when divided by: exact, and squares of 1e-30 or 1e30
    would leave the range of float32."""
    largest = tl.max(tl.abs(X), axis=1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.minimum(tl.maximum(exponent, -126), 126)


@triton.jit
def power_of_two(exponent):
    return ((127 + exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_norm(X):
    exponent = exponents(X)
    Y = X * power_of_two(-exponent)[:, None]
    return tl.sqrt(tl.sum(Y * Y, axis=1)) * power_of_two(exponent)


@triton.jit
def places(table, matrix, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    stride = tl.load(table + matrix * LINE + ROW_STRIDE)
    stride = tl.multiple_of(stride, 8)
    inside = (row[:, None] < m) & (column[None, :] < n)
    place = row[:, None].to(tl.int64) * stride + column[None, :]
    own = row[:, None] * n + column[None, :]  # in a dense matrix
    return row, column, inside, place, own


@triton.jit
def read(table, matrix, which: tl.constexpr, place, mask, TYPE: tl.constexpr):
    pointer = address(table, matrix, which, TYPE, 16)
    return tl.load(pointer + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def state_at(table, matrix, which: tl.constexpr, row):
    """Addresses of a row vector's entries."""
    stride = tl.load(table + matrix * LINE + STATE_STRIDE)
    return address(table, matrix, which, tl.float32, 4) + row * stride
