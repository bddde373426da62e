"""Trainings that are stopped and go on."""
