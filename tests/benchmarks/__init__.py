"""Benchmarks that people run by hand; pytest collects nothing here."""
