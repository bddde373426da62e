"""Shards of which nobody has a copy, made anew: the machines of the registrar and of who does."""
