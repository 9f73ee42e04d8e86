"""What a parameter means and holds.

plan and roles sort a model's parameters; options says what a group may hold; layout reads a
parameter as matrices; stacks opens them for a step; state and loading keep what is stored between
steps; rounding writes 16-bit weights.
"""
