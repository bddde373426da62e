"""Whole training scripts to read and to start from; they use the public API and nothing else."""
