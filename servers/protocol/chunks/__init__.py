"""What a server decides about one chunk, from the push that arrives to the reply that leaves.

A push waits for a slot in ``receive_pool`` and is applied by ``gathering`` (sync) or ``on_arrival``
(ssp, async), which share ``updates``; with a joint norm ``clipping`` holds the step. ``replies``
parks its reply, and a late pull's, until ``policy`` allows it. ``values`` has those that the chief
sends. ``chunk_state`` is what is known of one chunk, ``frontier`` the chunk that sync must serve
first. Imports membership, settings, actions
and the chunk's clock beside it; never the machine (``state``) that puts these together.
"""
