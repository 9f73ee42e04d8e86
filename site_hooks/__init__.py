"""What mkdocs.yml needs beyond its plugins: generated tables, links out of docs/, docstrings."""
