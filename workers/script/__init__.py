"""The script's part of a checkpoint: random numbers, attached objects, its dict of plain values,
and the untrained tensors of a model. Imports neither a network nor files."""
