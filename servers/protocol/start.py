"""How a set begins on a server: empty, from a checkpoint, or with a failed server's state.

    core = assemble_core(server=0, start=Start(), ...)          # the chief sends the values
    core = assemble_core(server=0, start=Start(first), ...)     # a checkpoint has them

:class:`psdist.servers.protocol.successor.Successor` continues with a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from psdist.protocol.checkpoints import FirstClocks
from psdist.protocol.control import Setup
from psdist.protocol.events import Offered
from psdist.servers.protocol.actions import Action, Built
from psdist.servers.protocol.chunks import ChunkState
from psdist.servers.protocol.membership import Membership
from psdist.servers.protocol.optimizer_state import StateOfSet
from psdist.servers.protocol.rules import RoundRule
from psdist.servers.protocol.rules.changes import RoundChanges

TakeOffer: TypeAlias = Callable[[Offered], list[Action]]


class Start:
    is_kept = False
    """True if a failed server made the copy for the checkpoint of a collective that has not
    ended."""
    has_taken_over = False
    """True if this server replaces a failed one."""

    def __init__(self, first: FirstClocks | None = None) -> None:
        """``first``: the checkpoint that the set continues; None without one."""
        self.first = first
        self.checkpoint = first.checkpoint if first is not None else ""
        """Name of that checkpoint, "" for none."""

    def begin(self, membership: Membership, changes: RoundChanges) -> None:
        """Bring the groups and the changes of the mode and the codecs to this start."""

    def refusal(self, setup: Setup) -> str:
        """Return what is wrong with a model that the chief describes; "" if nothing is."""
        if setup.restore == self.checkpoint and not (self.checkpoint and setup.state):
            return ""
        return (
            f"sent Setup that continues from checkpoint {setup.restore or 'none'!r:.80}"
            f"{' with optimizer state' if setup.state else ''}; expected "
            f"{self.checkpoint or 'none'}"
        )

    def new_chunk(self, index: int, rule: RoundRule) -> ChunkState:
        return ChunkState(index, rule.new_clock(), is_loaded=bool(self.checkpoint))

    def resume(self, state: StateOfSet, rule: RoundRule, built: Built) -> None:
        """The shard is built: bring the optimizer's state and the counts to this start."""

    def watch_offers(
        self,
        take: TakeOffer,
        chunks: Mapping[int, ChunkState],  # noqa: ARG002 - no worker repeats a push
        group_of: Mapping[int, int],  # noqa: ARG002
    ) -> TakeOffer:
        """Return the handler of offers: ``take``, or one that calls it."""
        return take
