"""What a server and its buddy decide about their second copy of a shard, without I/O.

Here live: which server is whose buddy (pairs), what a primary tells its buddy (records), what it
holds back until the buddy has it (primary), what the buddy knows of the shard (picture) and in
which order it takes records (replica), and who takes a dead server's place (takeovers). Nothing
here knows executors, memory or the network.
"""
