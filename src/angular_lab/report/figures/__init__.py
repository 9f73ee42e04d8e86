"""The figures of a page: what they show, how they are drawn, and their data for the script."""
