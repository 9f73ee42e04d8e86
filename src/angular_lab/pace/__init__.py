"""Pace: time per training step, measured for several optimizers in turn on one device."""
