"""`angular-lab theory`: measure the paper's theory, check its claims and write a page about them.

`measure` writes one JSON file per part. `claims`, `tables`, `figures` and `page` read these files
and never import torch.
"""
