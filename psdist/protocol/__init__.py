"""The protocol that servers and workers share: messages, events, ids, cutting of parameters.

``header`` and ``control`` are what travels, ``events`` what a rank sees of it, ``ids`` and
``roles`` who is who, ``partition`` pieces, chunks and shards, ``optimizers`` what is known of each
optimizer, ``memory`` bytes seen as tensors. Imports errors only. Nothing here does I/O or decides
anything about consistency: that is psdist.servers.protocol and psdist.workers.protocol.
"""
