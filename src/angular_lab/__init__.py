"""A small, exact, fast pre-training lab for AngularMuown and the optimizers it is compared with."""
