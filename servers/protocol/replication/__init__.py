"""Decisions about the replica of a shard, without I/O.

pairs: the server that keeps each replica. records: one for each change of a shard. shard_state: the
effect of a record. primary: messages that wait for the replica, and the chunks of a new one.
replica: the order of records.
"""
