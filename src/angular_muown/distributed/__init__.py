"""The same update on many ranks.

mesh describes which rank holds what; assignment chooses an owner for each matrix; session runs a
step that ranks share. In a step, agreement checks that the ranks are about to do the same,
exchange moves matrices to their owners and back in rounds (kernels/sharded.py does so with the GPU
kernels), reductions sum over sharded rows and columns, and collectives send the bytes. copies
decides whether ranks that hold the same matrices share the work.
"""
