"""`angular-lab theory`: the paper's theoretical half, measured and drawn.

solver, guarantee, regimes, geometry and shortcut measure; what they find goes to JSON files. page
and figures read those files and never import torch.
"""
