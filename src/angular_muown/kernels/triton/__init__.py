"""Triton kernels, imported by the first step on a GPU."""
