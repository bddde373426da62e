"""What is decided so that a shard of which nobody has a copy outlives its server, without I/O.

Here live: who makes a dead server's shard anew (rebuilds, the registrar's), and out of whose
values, with which updates contained and which lost (collecting, of who makes it). Nothing here
knows executors, memory or the network.
"""
