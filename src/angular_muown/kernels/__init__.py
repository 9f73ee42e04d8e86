"""The step on a GPU: what `engine.update` computes, in a few launches over parameters where they lie.

`schedule` lists the products of an orthogonalization, `products` runs such a list as one kernel,
`rows` holds the kernels before and after it, `tables` tells them where matrices lie, `dispatch`
says what runs here, and `step` is the flow. Triton is imported at the first use only.
"""
