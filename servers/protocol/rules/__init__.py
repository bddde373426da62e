"""The rules by which a server turns the updates of a round into optimizer steps.

``rule`` is the seam: :class:`~psdist.servers.protocol.rules.rule.RoundRule`. ``sync`` and
``on_arrival`` (ssp, async) are the plain rules, and ``gathering`` is the part that all rules with a
joint step share. ``backup`` closes rounds without late groups (``closing`` decides which),
``clipping`` holds the steps of a round until a joint norm is known, ``switching`` changes the mode
at a round, and ``changes`` is the protocol of such a change.

This package imports ``chunks``, membership and actions; it never imports the state machine.
"""
