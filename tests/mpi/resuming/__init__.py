"""Checkpoints and resuming from them, over MPI."""
