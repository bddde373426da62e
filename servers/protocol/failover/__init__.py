"""Decisions of the coordinator and its standby, for the failure of the coordinator; pure.

Here live: the coordinator's ends of its lines to all ranks (lines), and its machine with what makes
a second one follow it and take its place (coordinator_log). Nothing here knows shards, memory or
the network.
"""
