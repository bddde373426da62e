"""Ranks that are killed, over MPI."""
