"""The step on a GPU: what `update.update` computes, in few launches, on the parameters in place.

before -> norms -> products -> norms -> after, chunk by chunk through a bounded work buffer:

    coverage     what the kernels support; the rest takes the eager path
    fused        the fused step of a group, its scalars, and all groups of an optimizer
    launch       kernel launches for a chunk of matrices, their streams and their memory
    pointers     tables of addresses, and their transfer to the device; columns: the tables' fields
    polar_chain  the products that make a polar factor, their cost, and where results are stored
    products     the matrix products
    sharded      the fused step of matrices whose rows are sharded across ranks
    triton       the kernels: rows, packets, matmul

Triton is imported on first use only.
"""
