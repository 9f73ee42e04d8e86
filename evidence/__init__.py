"""The numbers that README.md and docs/ quote, computed from what results/ keeps.

`python -m evidence` (`make evidence`) writes results/facts.json and fills the documents in:
facts.py collects what the subjects' modules compute, documents.py says how a number is marked.
"""
