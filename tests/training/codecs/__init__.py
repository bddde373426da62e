"""Trainings with codecs, and what keeps them right."""
