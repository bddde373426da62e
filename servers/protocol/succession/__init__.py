"""What the registrar and its deputy decide, so that the registrar's death is survived; pure.

Here live: the registrar's ends of its lines to all ranks (lines), and its machine with what makes a
second one follow it and take its place (office). Nothing here knows shards, memory or the network.
"""
