"""The same update on many ranks.

mesh says which rank holds what; assignment chooses who orthogonalizes what; session runs a step
that ranks share: agreement compares them first, exchange moves matrices in rounds, reductions add
up rows and columns, collectives carry the bytes.
"""
