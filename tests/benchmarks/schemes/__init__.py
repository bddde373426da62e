"""Codecs, local steps, modes and backup groups: what they cost and bring."""
