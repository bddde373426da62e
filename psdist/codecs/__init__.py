"""Codecs: how the values of a chunk lie in a frame, between flat memory and the network.

``base`` is the seam, ``raw`` the only way that runs are configured with, ``wire`` what a run's two
directions use, with the seeds and states that encoding needs, ``frames`` where encoded bytes meet
values. Imports psdist/protocol only. A codec
is pure: it owns no memory, keeps nothing between calls and never learns who sends or receives.
"""
