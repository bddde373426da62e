"""Remedies for faults in launchers and MPI libraries, one module each.

Each module names the fault, the versions it was seen with, and the condition under which it can be
deleted. Nothing here is needed where the fault is absent.
"""
