"""Modes, codecs and backup groups that change within a run, over MPI."""
