"""Constants shared by the host and the kernels: table fields and codes for choices. No Triton."""

# A matrix's entry in the table: addresses and strides (int64). Twelve keep every entry aligned.
# PACKET, RESULT and FIRST_ROW are those of a sharded matrix: where its rows leave from, where those
# of Q arrive, and which of its rows is this rank's first.
WEIGHT, GRADIENT, MOMENTUM, ROW_STRIDE = 0, 1, 2, 3
STORED_NORM, SECOND_MOMENT, EXP_AVG, EXP_AVG_SQ, STATE_STRIDE = 4, 5, 6, 7, 8
PACKET, RESULT, FIRST_ROW = 9, 10, 11
ENTRY = 12
HEADER = 8  # float16 words in front of a row in transit: its exponent and sum of squares
ADDRESSES = [WEIGHT, GRADIENT, MOMENTUM, STORED_NORM, SECOND_MOMENT, EXP_AVG, EXP_AVG_SQ]
ROW_STATE = ("stored_norm", "row_second_moment", "exp_avg", "exp_avg_sq")  # in this order

# A step's scalars for one kind of matrix (float32; SEED holds the bits of a 32-bit integer).
BETA, STEP, RADIUS_LR, DECAY, BETA1, BETA2, EPS, ROW_BETA, SEED = range(9)
SCALARS = 12

# Row vectors that kernels pass to each other, each (count, m).
EXPONENT, SQUARES, RADIAL, FACTOR = range(4)
STATS = 4
CHORD = EXPONENT  # in an observed step, which no longer needs the exponents by then

FLAT, OBLIQUE, WEIGHT_NORM = range(3)
FIXED, ADAM, LOG_ADAM = range(3)
