"""What people read of a run: logs by rank, progress, the run directory and its files.

Imports config and errors. Decides nothing about training, and a run whose reports cannot be written
says so and ends.
"""
