"""The server's part of embedding tables: their rows, updates, pulls and checkpoints.

``shard`` executes the actions of a set of tables, as psdist.servers.shard.tensors those of
parameters; ``contents`` describes such a set to the loop of a server; ``service`` answers pulls of
rows and takes pushes that come in several messages. Consistency is psdist.servers.protocol's.
"""
