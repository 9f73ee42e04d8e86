"""What a parameter means and what is stored for it.

plan and roles sort a model's parameters; fused_layouts knows the fused layers of common models;
wrappers looks through torch.compile, DDP and activation checkpointing; options defines and checks
param groups; layout reads a parameter as matrices; stacks prepares them for a step; state and
loading create and load optimizer state; rounding writes 16-bit weights.
"""
