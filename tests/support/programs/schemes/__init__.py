"""Trainings whose mode, codec or speed changes."""
