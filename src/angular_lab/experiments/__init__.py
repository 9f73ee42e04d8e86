"""The experiments as data, what the paper reports of them, and their statistics."""
