"""Ranks that fail: how long it takes, what becomes of the training, schedules by the thousand."""
