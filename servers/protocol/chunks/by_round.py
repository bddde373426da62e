"""Rounds of both kinds in one run: gathered in some, applied on arrival in others; pure.

Which kind a round is, the policy says. A push of a round of arrivals is a step at once, wherever
the chunk's other groups are; one of a gathered round waits for its turn in that round. Nobody is in
a gathered round before every group that counts has made the rounds before it (sync needs that), so
the two meet only where a group comes back that was far behind.

Why it cannot deadlock: receive_pool's argument, chunk by chunk and round by round. A push of a
round of arrivals needs one slot and gives it back as soon as a parameter buffer is free; the
frontier passes a chunk in such a round when all its groups have made it. A worker's push of a round
leaves only behind the reply to the one before (there is no pipeline where sync may come), so the
kind of a group's next push is known when it is offered.
"""

from __future__ import annotations

from psdist.servers.protocol.actions import Action
from psdist.servers.protocol.chunks.chunk_state import ChunkState, Push
from psdist.servers.protocol.chunks.gathering import Gathered
from psdist.servers.protocol.chunks.policy import Policy
from psdist.servers.protocol.chunks.receive_pool import ADDS
from psdist.servers.protocol.chunks.replies import Replies
from psdist.servers.protocol.membership import Membership


class ByRound(Gathered):
    def __init__(self, *, membership: Membership, replies: Replies, policy: Policy) -> None:
        super().__init__(membership=membership, replies=replies)
        self._policy = policy

    def slots_needed(self, index: int, group: int | None) -> int:
        if group is not None:
            next_round = self._chunks[index].newest_round_of(group) + 1
            if not self._policy.is_gathered(next_round):
                return ADDS  # its slot is free again at once
        return super().slots_needed(index, group)

    def on_arrived(self, chunk: ChunkState, push: Push) -> list[Action]:
        if self._policy.is_gathered(push.clock):
            return super().on_arrived(chunk, push)
        chunk.waiting.append(push.group)
        # The group's next push may have been held behind this one.
        return super().on_arrived(chunk, push) + self.pool.reconsider(chunk.index, push.group)

    def proceed(self, chunk: ChunkState) -> list[Action]:
        if not chunk.waiting:
            return super().proceed(chunk)
        actions = self._apply_waiting(chunk)
        actions += self._reconsider(self._frontier.move())
        return actions + super().proceed(chunk)

    def _is_gathered(self, chunk: ChunkState) -> bool:
        return self._policy.is_gathered(chunk.clock.min_done)

    def on_free_buffer(self, chunk: ChunkState) -> list[Action]:
        if not chunk.waiting:
            return super().on_free_buffer(chunk)
        chunk.clock.catch_up()
        return self.proceed(chunk)
