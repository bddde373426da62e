"""What people read of a run: logs by rank, progress, the run directory and its files.

``facts`` are the words in which ranks tell ``psdist run -n`` how it goes, ``meter``
turns them into words for people, ``progress`` shows these where no parent draws.

Imports config and errors. Decides nothing about training, and a run whose reports cannot be written
says so and ends.
"""
