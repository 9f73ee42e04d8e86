"""The stages of one step, one file each: read the folder listing as the equation.

charts, spheres -> momentum -> tangent, orthogonalize -> normalize -> scale -> radius
"""
