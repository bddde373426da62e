"""The mode changes at a round: gathered rounds and rounds of arrivals in one run; pure.

A push of a round of arrivals (ssp, async) is a step at once, wherever the chunk's other groups are;
a push of a gathered round (sync) waits for its turn in that round. No group is in a gathered round
before every group that counts has made the rounds before it, because sync requires that. So the two
kinds meet only where a group returns that was far behind.

    rule = Switching(context, modes=[ChangeMode(0, "ssp", 3)])
    rule.hold_rounds(7)                            # nothing is sent for rounds above 7
    rule.change_mode(ChangeMode(10, "sync", 0))    # rounds below 10 keep the old mode

Why it cannot deadlock: receive_pool's argument, chunk by chunk and round by round. A push of a
round of arrivals needs one slot and returns it as soon as a parameter buffer is free; the frontier
passes a chunk in such a round when all its groups have made it. A worker's push of a round leaves
only after the reply to the round before (there is no pipeline where sync may come), so the kind of
a group's next push is known when it is offered.
"""

from __future__ import annotations

from collections.abc import Sequence

from psdist.errors import ConfigError
from psdist.protocol.control import Setup
from psdist.servers.protocol.actions import Action, ChangeMode
from psdist.servers.protocol.chunks import ChunkState, Push
from psdist.servers.protocol.chunks.receive_pool import ADDS
from psdist.servers.protocol.rules import RoundRule, RuleContext
from psdist.servers.protocol.rules.arrivals import BY_WEIGHT, Arrivals, ByWeight
from psdist.servers.protocol.rules.gathering import Gathered


class Switching(Gathered):
    def __init__(
        self, context: RuleContext, *, modes: Sequence[ChangeMode], scale: ByWeight = BY_WEIGHT
    ) -> None:
        """``modes``: the modes that are known when the run begins, in the order in which they were
        set; raise :class:`ConfigError` if the first is not from round 0 on."""
        super().__init__(context, note_sent=scale.note_sent)
        self._arrivals = Arrivals(self, context.membership, scale)
        starts = [each.round for each in modes]
        if starts[:1] != [0]:
            raise ConfigError(
                f"modes that begin at the rounds {starts}: the first must begin at round 0"
            )
        self._modes: list[ChangeMode] = []
        for each in modes:
            self.change_mode(each)
        self.scheduled = tuple(modes[1:])
        if context.first is not None:  # decided for rounds after the checkpoint
            sent = self.replies.highest_sent
            self.replies.highest_sent = max(sent, *(start - 1 for start in starts))

    def required_min_done(self, round_number: int) -> int:
        _, mode, staleness, _ = self._mode_of(round_number)
        return 0 if mode == "async" else round_number - staleness

    def is_gathered(self, round_number: int) -> bool:
        """Return True if the updates of this round become one step."""
        return self._mode_of(round_number).mode == "sync"

    def _mode_of(self, round_number: int) -> ChangeMode:
        return next(each for each in reversed(self._modes) if each.round <= round_number)

    def change_mode(self, change: ChangeMode) -> None:
        """A change replaces the changes that begin at its round or later."""
        before = [each for each in self._modes if each.round < change.round]
        self._modes = [*before, change]
        self.replies.release_rounds()

    def for_model(self, peer: int, setup: Setup) -> RoundRule:
        if setup.max_norm:
            self._refuse(peer, "sent Setup with a norm to clip to; sync may change to other modes")
        return self

    def slots_needed(self, index: int, group: int | None) -> int:
        if group is not None:
            next_round = self._chunks[index].newest_round_of(group) + 1
            if not self.is_gathered(next_round):
                return ADDS  # its slot is free again at once
        return super().slots_needed(index, group)

    def on_arrived(self, chunk: ChunkState, push: Push) -> list[Action]:
        if self.is_gathered(push.clock):
            return super().on_arrived(chunk, push)
        chunk.waiting.append(push.group)
        # This push may have blocked the group's next one.
        return super().on_arrived(chunk, push) + self.pool.reconsider(chunk.index, push.group)

    def proceed(self, chunk: ChunkState) -> list[Action]:
        if not chunk.waiting:
            return super().proceed(chunk)
        actions = self._arrivals.apply_waiting(chunk)
        actions += self._reconsider(self._frontier.move())
        return actions + super().proceed(chunk)

    def _is_gathered(self, chunk: ChunkState) -> bool:
        return self.is_gathered(chunk.clock.min_done)

    def on_free_buffer(self, chunk: ChunkState) -> list[Action]:
        if not chunk.waiting:
            return super().on_free_buffer(chunk)
        chunk.clock.catch_up()
        return self.proceed(chunk)
