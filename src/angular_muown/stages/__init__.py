"""The stages of one step, one file each: read the folder listing as the equation.

charts -> momentum -> tangent, orthogonalize -> normalize -> scale -> radius. A stage gets a
context: state, learning rates and reductions over rows and columns.
"""
