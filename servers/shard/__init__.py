"""The execution of a server's actions on memory: parameters, sums of gradients, optimizers.

``executor`` is the seam. ``tensors`` holds the chunks' parameters and does the arithmetic, with
``chunk_optimizer`` to run any torch optimizer on a chunk; ``sizes`` has bytes and seconds instead,
for simulations. Imports psdist/protocol and the actions of psdist.servers.protocol; decides nothing
about consistency.
"""
