"""The stages of one step, one file each: read the folder listing as the equation.

charts -> momentum -> tangent, orthogonalize -> normalize -> scale -> radius; reductions add up.
"""
