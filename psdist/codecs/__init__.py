"""Codecs: how the values of a chunk lie in a frame, between flat memory and the network.

``base`` is the seam, ``schemes`` has the codecs (some of them over ``blocks``), and ``named`` gives
the one that the configuration calls so. ``layout`` and ``chunks`` make a chunk's payload of what a
codec gives, ``feedback`` keeps what a worker's pushes leave out, ``on_device`` does so where
gradients lie on a GPU, ``frames`` is where encoded bytes meet values, ``wire`` what a run's two
directions use, ``seeds`` and ``checks`` what they say.
Imports psdist/protocol and psdist/config only. A codec is pure: it owns no memory, keeps nothing
between calls and never learns who sends or receives.
"""
