"""Trainings with rounds of local steps."""
