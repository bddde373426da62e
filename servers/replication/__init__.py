"""A shard's second copy, on memory and over the network: what servers/protocol/replication decides.

Here live: what leaves a primary only when its buddy has it (outbox), a set's loop that tells the
buddy of every change (recording), the copy that the buddy keeps (copies), and what ties both sides
to a server's loop (replication). Without ``replication = buddy`` nothing here is called. It imports
set_loop and shard, never workers.
"""
