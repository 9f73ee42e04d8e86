"""A step on a cluster that is not at hand, simulated."""
