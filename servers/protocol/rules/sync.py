"""sync: every group contributes to every round; pure.

    rule = Sync(context).for_model(peer, setup)     # Clipped if the setup asks for a joint norm

``Gathered`` sums the pushes of a round; this module chooses whether the sum is clipped.
"""

from __future__ import annotations

from psdist.protocol.control import Setup
from psdist.servers.protocol.rules.clipping import clipped_for
from psdist.servers.protocol.rules.gathering import Gathered
from psdist.servers.protocol.rules.rule import RoundRule


class Sync(Gathered):
    """Each round is one step on the weighted mean of all groups."""

    def for_model(self, peer: int, setup: Setup) -> RoundRule:
        return clipped_for(self, peer, setup)
