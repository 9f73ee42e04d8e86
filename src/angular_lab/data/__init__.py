"""From a corpus to batches of tokens."""
