"""Trainings that are stopped and continue."""
