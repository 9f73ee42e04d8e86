"""A local page that follows experiments while they run. Nothing here imports torch."""
