"""The step on a GPU: what `update.update` computes, in few launches, on parameters where they lie.

before -> norms -> products -> norms -> after, chunk by chunk through a bounded buffer:

    coverage     what the kernels can do; the rest takes the eager path
    fused        the fused step of a group, its scalars, and all groups of an optimizer
    launch       launches for some matrices of one kind, their streams, their share of memory
    pointers     tables of addresses, and their way to the device; columns: what is where in them
    polar_chain  which products make a polar factor, what they cost, where their results lie
    products     the matrix products
    triton       the kernels: rows, matmul

Triton is imported at the first use only.
"""
