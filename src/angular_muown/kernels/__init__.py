"""The step on a GPU: what `engine.update` computes, in few launches, on parameters where they lie.

before -> norms -> products -> norms -> after, chunk by chunk through a bounded buffer:

    schedule    which products make a polar factor, what they cost, where their results lie
    tables      where matrices lie: lines of addresses; columns: what is where in them
    rows        what the row kernels share; before, norms, after: those kernels
    products    the matrix products; symmetric, apply: their kernels
    chunks      launches for some matrices of one kind; lanes: their order; room: their memory
    step        one group's fused step; numbers: its scalars; groups: all of an optimizer
    mailbox     how addresses and scalars get to the device
    dispatch    what is covered; the rest takes the eager path

Triton is imported at the first use only.
"""
