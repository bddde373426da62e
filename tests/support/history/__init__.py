"""Recorded histories without a job: toy runs, their forgeries, summaries."""
