"""From run folders to a page. Nothing here imports torch."""
