"""sync: every group contributes to every round; pure.

    rule = Sync(context).for_model(peer, setup)     # Clipped if the setup asks for a joint norm

``Gathered`` sums the pushes of a round; this module chooses whether the sum is clipped.
"""

from __future__ import annotations

from psdist.servers.protocol.rules.clipping import Clipped
from psdist.servers.protocol.rules.gathering import Gathered
from psdist.servers.protocol.rules.rule import RoundRule


class Sync(Gathered):
    """Each round is one step on the weighted mean of all groups."""

    def _clipping_to(self, peer: int, max_norm: float) -> RoundRule:  # noqa: ARG002 - no refusal
        return Clipped(self, max_norm=max_norm)
