"""Seeded schedules with codecs and their copies."""
