"""The state of one chunk on a server, from the push that arrives to the reply that leaves.

``receive_pool`` assigns slots to offered pushes. ``chunk_state`` holds pushes, turns and open
replies, and ``frontier`` finds the chunk that sync must serve first. ``replies`` parks replies to
pushes and late pulls until the round rule allows them, and ``reply_window`` spaces them.
``values`` takes the values that the chief sends.

This package imports membership, settings, actions and the chunk's clock; it never imports the round
rules or the state machine.
"""
