"""Trainings whose communication overlaps with computing."""
