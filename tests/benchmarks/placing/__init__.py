"""Placement: how good plans are, what a job gains by them, how long they take."""
