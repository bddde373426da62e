"""A set that continues on the server with the replica, after its server has failed; pure.

The replica's :class:`~psdist.servers.protocol.replication.shard_state.ShardState` has the groups,
the clocks and the versions. Messages that the failed server had received and not applied are lost:
workers send them again.

    core = assemble_core(server=1, start=Successor(shard_state), ...)
"""

from __future__ import annotations

from collections.abc import Mapping

from psdist.protocol.checkpoints import FirstClocks
from psdist.protocol.events import Offered
from psdist.protocol.header import Kind
from psdist.servers.protocol.actions import Action, Built
from psdist.servers.protocol.chunks import ChunkState
from psdist.servers.protocol.membership import Membership
from psdist.servers.protocol.optimizer_state import StateOfSet
from psdist.servers.protocol.replication.shard_state import ShardState
from psdist.servers.protocol.rules import RoundRule
from psdist.servers.protocol.rules.changes import RoundChanges
from psdist.servers.protocol.start import Start, TakeOffer


class Successor(Start):
    has_taken_over = True

    def __init__(self, state: ShardState, first: FirstClocks | None = None) -> None:
        """``state``: of the replica; ``first``: the checkpoint that the failed server continued."""
        super().__init__(first)
        self._shard = state
        self.is_kept = state.is_kept

    def begin(self, membership: Membership, changes: RoundChanges) -> None:
        shard = self._shard
        membership.take_over(
            shard.standings,
            shard.stops,
            shard.clocks.values(),
            resumed_up_to=shard.resumed_up_to,
            first=shard.first,
            generation=shard.generation,
            dead=shard.dead,
        )
        changes.take_over(shard)

    def new_chunk(self, index: int, rule: RoundRule) -> ChunkState:
        shard = self._shard
        return ChunkState(
            index,
            rule.new_clock(shard.clocks[index]),
            is_loaded=index in shard.loaded,
            version=shard.versions[index],
            newest_load=shard.newest_loads[index],
        )

    def resume(self, state: StateOfSet, rule: RoundRule, built: Built) -> None:
        state.take_over()
        if built.are_replies_apart:
            rule.replies.begin_anew()
        rule.num_pushes = rule.replies.num_made = self._shard.num_updates
        rule.num_steps = self._shard.num_steps

    def watch_offers(
        self, take: TakeOffer, chunks: Mapping[int, ChunkState], group_of: Mapping[int, int]
    ) -> TakeOffer:
        """Note the offered pushes that a chunk contains. Their workers had sent them to the failed
        server, and push nothing else before they get the reply."""

        def take_noted(event: Offered) -> list[Action]:
            is_known = event.kind == Kind.PUSH and event.chunk in chunks and event.peer in group_of
            if is_known:
                chunk, group = chunks[event.chunk], group_of[event.peer]
                if event.clock < chunk.clock.done[group]:
                    chunk.duplicate_offers.add(group)
            return take(event)

        return take_noted
