"""What executes a server's actions on memory: parameters, accumulators, optimizers.

``tensors`` holds the chunks' parameters and does the arithmetic, ``chunk_optimizer`` runs any torch
optimizer on a chunk. Imports psdist/protocol and the actions of psdist.servers.protocol; decides
nothing about consistency.
"""
