"""Values that the chief sends: a chunk's first ones, and those that it sets later; pure.

    values = ChiefValues(server=0, membership=..., replies=...)
    values.build(rule, pool)
    actions = values.on_arrived(chunk, peer, header, slot)     # an INIT
    values.waiting                                             # chunks whose values wait
    actions = values.set_what_waits()                          # a buffer may be free

The first ones are set as they come. Later ones are sent while all workers are in a collective, and
wait while replies from both parameter buffers are open.
"""

from __future__ import annotations

from operator import eq
from typing import NoReturn

from psdist.errors import ProtocolError
from psdist.protocol.events import Frame
from psdist.protocol.header import NEVER, Flag, Header
from psdist.protocol.ids import describe_peer
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import Action, Load, Receipt
from psdist.servers.protocol.chunks import ChunkState, Loading
from psdist.servers.protocol.chunks.receive_pool import ReceivePool
from psdist.servers.protocol.chunks.replies import Replies
from psdist.servers.protocol.membership import Agrees, Membership


class ChiefValues:
    def __init__(
        self, *, server: int, membership: Membership, replies: Replies, has_all: Agrees = eq
    ) -> None:
        """``has_all(contained, pushed)``: True if a chunk contains the updates that the chief's
        group pushed."""
        self._server = server
        self._membership = membership
        self._replies = replies
        self._has_all = has_all
        self._rule = PayloadRule.of_nothing()
        self._pool: ReceivePool
        self.waiting: dict[int, ChunkState] = {}
        """By index, chunks with values that wait to be set."""
        self.num_duplicates = 0

    def build(self, rule: PayloadRule, pool: ReceivePool) -> None:
        """There is a model. ``rule``: what is taken; ``pool``: whose slots values come in."""
        self._rule, self._pool = rule, pool

    def on_arrived(self, chunk: ChunkState, peer: int, header: Header, slot: Frame) -> list[Action]:
        if not self._rule.takes(header):
            self._refuse(peer, self._rule.refusal(header))
        if header.pull_number > chunk.newest_load:
            actions = self._on_later(chunk, peer, header, slot)
        elif chunk.is_loaded:  # a second delivery must not undo what was applied since the first
            self.num_duplicates += 1
            actions = self._pool.release(slot)
            if header.flags & Flag.RETRANSMIT and not chunk.loading:
                actions.append(Receipt(peer, chunk.index, header.clock, header.pull_number))
        else:
            chunk.is_loaded = True
            actions = [Load(chunk.index, slot), *self._pool.release(slot)]
            actions += self._replies.answer_unloaded_pulls(chunk)
        # Later values may have been held behind these.
        return actions + self._pool.reconsider(chunk.index, None)

    def _on_later(self, chunk: ChunkState, peer: int, header: Header, slot: Frame) -> list[Action]:
        """The chief sets values, while all workers are in a collective: nothing is under way."""
        group = self._membership.require_worker(peer)
        clock, done = header.clock, chunk.clock.done[group]
        is_busy = chunk.loading or chunk.has_updates
        if not chunk.is_loaded or is_busy or not self._has_all(done, clock):
            self._refuse(
                peer,
                f"set values of chunk {chunk.index} at iteration {clock}, in the middle of updates "
                f"or before there were any values; the chunk contains {done} of its group",
            )
        self._replies.close_implied(chunk, peer, NEVER)  # who sets values waits for nothing else
        chunk.newest_load = header.pull_number
        chunk.loading = Loading(group, clock, header.pull_number, slot, peer)
        return self._set(chunk, chunk.loading)

    def _set(self, chunk: ChunkState, values: Loading) -> list[Action]:
        """Unless replies from both buffers are open."""
        target = chunk.target_buffer()
        if target is None:
            self.waiting[chunk.index] = chunk
            return []
        chunk.loading = None
        self.waiting.pop(chunk.index, None)
        chunk.current = target
        chunk.version += 1
        index, (group, clock, number, slot, peer) = chunk.index, values
        return [
            Load(index, slot, target, group, clock, number),
            *self._pool.release(slot),
            Receipt(peer, index, clock, number),
        ]

    def set_what_waits(self) -> list[Action]:
        """A buffer may be free."""
        actions: list[Action] = []
        for chunk in tuple(self.waiting.values()):
            if chunk.loading is not None:
                actions += self._set(chunk, chunk.loading)
        return actions

    def give_up(self, chunk: ChunkState) -> list[Action]:
        """The chief has failed: drop the values that it was about to set. The next chief numbers
        its values from 1."""
        chunk.newest_load = 0
        values, chunk.loading = chunk.loading, None
        self.waiting.pop(chunk.index, None)
        return [] if values is None else self._pool.release(values.slot)

    def _refuse(self, peer: int, why: str) -> NoReturn:
        raise ProtocolError(f"server {self._server}: {describe_peer(peer)} {why}")
