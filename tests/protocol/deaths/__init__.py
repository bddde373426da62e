"""Seeded schedules with deaths, joins, spares and shards made again."""
