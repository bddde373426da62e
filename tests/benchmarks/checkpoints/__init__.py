"""What checkpoints cost, and whether they come back elsewhere."""
