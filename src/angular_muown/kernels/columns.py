"""Constants shared by the host and the kernels: table fields and codes for choices. No Triton."""

# A matrix's entry in the table: addresses and strides (int64). Their number is even, which keeps
# entries aligned. PACKET to FIRST_COLUMN are those of a sharded matrix: where its rows leave from
# (0 if another copy sends them), where those of Q arrive, and which of its rows and columns are
# this rank's first.
WEIGHT, GRADIENT, MOMENTUM, ROW_STRIDE = 0, 1, 2, 3
STORED_NORM, SECOND_MOMENT, EXP_AVG, EXP_AVG_SQ, STATE_STRIDE = 4, 5, 6, 7, 8
PACKET, RESULT, FIRST_ROW, FIRST_COLUMN = 9, 10, 11, 12
MOMENTUM_SCALE = 13
ENTRY = 14
HEADER = 8  # float16 words in front of a row in transit: four float32 numbers (see packets.py)
ADDRESSES = [
    *(WEIGHT, GRADIENT, MOMENTUM),
    *(STORED_NORM, SECOND_MOMENT, EXP_AVG, EXP_AVG_SQ, MOMENTUM_SCALE),
]
# in this order
ROW_STATE = ("stored_norm", "row_second_moment", "exp_avg", "exp_avg_sq", "momentum_scale")

# A step's scalars for one kind of matrix (float32; SEED holds the bits of a 32-bit integer).
BETA, STEP, RADIUS_LR, DECAY, BETA1, BETA2, EPS, ROW_BETA, SEED = range(9)
SCALARS = 12

# Row vectors that kernels pass to each other, each (count, m).
EXPONENT, SQUARES, RADIAL, FACTOR = range(4)
STATS = 4
CHORD = EXPONENT  # in an observed step, which no longer needs the exponents by then

# Sums over the columns of rows that ranks share, each (count, m) in float64: squares of W, products
# of G and W, squares of G.
WEIGHT_SQUARES, PRODUCTS, GRADIENT_SQUARES = range(3)
SUMS = 3

FLAT, OBLIQUE, WEIGHT_NORM = range(3)
FIXED, ADAM, LOG_ADAM = range(3)
