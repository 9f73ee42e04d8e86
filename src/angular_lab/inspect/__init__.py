"""Look at run folders: list them, compare them, and find what is wrong with them."""
