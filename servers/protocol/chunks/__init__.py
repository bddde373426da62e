"""The state of one chunk on a server, from the push that arrives to the reply that leaves.

The package imports membership, settings, actions and the chunk's clock, and never the round rules
or the state machine.
"""
