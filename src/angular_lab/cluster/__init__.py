"""`angular-lab plan-ranks`: simulate an optimizer step on a cluster, on one CPU."""
