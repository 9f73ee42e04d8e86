"""Running an experiment: its trials on one machine or many."""
