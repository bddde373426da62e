"""Codecs: how the values of a chunk lie in a frame, between flat memory and the network.

``base`` is the interface, ``schemes`` has the codecs (some use ``blocks``), and ``named`` returns
the codec of a setting. ``layout`` and ``chunks`` make a chunk's payload from a codec's bytes.
``feedback`` encodes a worker's pushes and keeps their residuals, ``coders`` does so on the host or
on a GPU. ``frames`` holds encoded bytes and values, ``wire`` lists the codecs of a run's two
directions, and ``checks`` has checksums. Imports psdist/protocol,
psdist/config and psdist/transfers only. A codec is pure: it owns no memory, keeps nothing between
calls and does not depend on the sender or the receiver.
"""
