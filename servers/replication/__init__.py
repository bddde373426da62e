"""The replica of a shard in memory and on the network, as servers/protocol/replication decides.

outbox: messages that wait for the replica. recording: a set's loop that records every change.
shard_replica and keeping: the replicas on a server. replication: both sides, for a server's loop.
No code here runs without the setting ``replication``.
"""
