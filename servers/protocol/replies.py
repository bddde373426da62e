"""When a chunk's parameters may go out, and which replies are parked until then; pure.

The reply to a push is the pull: it brings the parameters for the sender's next round. A worker may
pull beside that (at the start, to evaluate, to save). Either way the policy says how many updates
of every group the parameters must contain; a reply that may not leave yet is *parked* in its
chunk, under the ``min_done`` that it needs, and leaves when the chunk gets there. Nothing is
refused and nothing is asked twice.

    replies = Replies(policy=Ssp(3), pipeline=0)
    replies.answer_pull(chunk, peer, header)      # [Reply(...)], or [] and parked
    replies.advance(chunk, pushes)                # clocks advance; what is allowed now goes out
"""

from __future__ import annotations

from psdist.protocol.header import Flag, Header
from psdist.servers.protocol.actions import Action, Reply
from psdist.servers.protocol.chunk_state import ChunkState, PendingReply, Push
from psdist.servers.protocol.policy import Policy


class Replies:
    def __init__(self, *, policy: Policy, pipeline: int) -> None:
        """``pipeline``: rounds whose replies a worker may leave outstanding."""
        self._policy = policy
        self._pipeline = pipeline
        self.num_made = 0

    def answer_pull(self, chunk: ChunkState, peer: int, header: Header) -> list[Action]:
        """Reply, or park the reply: a pull waits as a push's reply does. A fresh one takes what is
        newest; none is answered before the chunk has its initial values."""
        pending = PendingReply(peer, header.clock, Flag.FOR_PULL, header.pull_number)
        if not chunk.is_loaded:
            chunk.unloaded_pulls.append(pending)
            return []
        if not header.flags & Flag.FRESH:
            needed = self._policy.required_min_done(header.clock)
            if chunk.clock.min_done < needed:
                chunk.parked.setdefault(needed, []).append(pending)
                return []
        return [self._reply(chunk, pending)]

    def answer_unloaded_pulls(self, chunk: ChunkState) -> list[Action]:
        """The chunk has its initial values."""
        waiting, chunk.unloaded_pulls = chunk.unloaded_pulls, []
        return [self._reply(chunk, pending) for pending in waiting]

    def advance(self, chunk: ChunkState, pushes: tuple[Push, ...]) -> list[Action]:
        """The chunk now contains these pushes: its clock advances, and their replies and parked
        ones go out as far as the policy allows."""
        actions: list[Action] = []
        clock = chunk.clock
        min_done_before = clock.min_done
        for push in pushes:
            clock.advance(push.group)
        for push in pushes:
            pending = PendingReply(push.peer, push.clock, Flag.NONE)
            # The reply is used for the round after those whose replies may be outstanding.
            needed = self._policy.required_min_done(push.clock + 1 + self._pipeline)
            if clock.min_done >= needed:
                actions.append(self._reply(chunk, pending))
            else:
                chunk.parked.setdefault(needed, []).append(pending)
        if clock.min_done != min_done_before:
            actions += self.release(chunk)
        return actions

    def release(self, chunk: ChunkState) -> list[Action]:
        """Let the parked replies go that are allowed now: those that need least first."""
        if not chunk.parked:
            return []
        allowed = [needed for needed in chunk.parked if needed <= chunk.clock.min_done]
        return [
            self._reply(chunk, pending)
            for needed in sorted(allowed)
            for pending in chunk.parked.pop(needed)
        ]

    def _reply(self, chunk: ChunkState, pending: PendingReply) -> Reply:
        implied_by = pending.clock
        if not pending.flags & Flag.FOR_PULL:
            implied_by += 1 + self._pipeline
        token = chunk.open_reply(pending.peer, implied_by=implied_by)
        self.num_made += 1
        min_done = chunk.clock.min_done
        return Reply(token, pending.clock, min_done, pending.flags, pending.pull_number)
