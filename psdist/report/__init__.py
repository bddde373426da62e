"""Reports of a run: logs by rank, progress, the run directory and its files.

``facts`` are the packets between ranks and ``psdist run -n``. ``meter`` turns them into words, and
``progress`` shows these if no parent does. Imports config and errors. A run whose reports cannot be
written ends with an error.
"""
