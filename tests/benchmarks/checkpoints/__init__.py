"""Costs of checkpoints, and whether they can be restored elsewhere."""
