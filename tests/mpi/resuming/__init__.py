"""Checkpoints and going on with them, over MPI."""
