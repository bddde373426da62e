"""Whole jobs on the virtual network: drawn schedules, their workers, what must hold."""
