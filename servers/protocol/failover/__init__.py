"""Decisions of the coordinator and its standby, for the failure of the coordinator; pure.

The coordinator's ends of its lines to all ranks are in ``lines``; ``coordinator_log`` is the log
that a standby follows and takes over. Nothing here knows shards, memory or the network.
"""
