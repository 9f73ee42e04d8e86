"""Triton kernels, imported at the first step on a GPU."""
