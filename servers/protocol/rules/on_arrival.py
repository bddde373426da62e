"""ssp and async: every push is an optimizer step of its own, on arrival; pure.

The group's mean gradient is applied with lr x its weight (docs/dev/design.md, Weights). A push
waits only for a parameter buffer, while replies from both are open; later pushes of other groups
that bring no gradient are applied meanwhile.

    Ssp(context, staleness=3).required_min_done(10)     # 7
    Async(context).required_min_done(10)                # 0

Bounded staleness: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server", NIPS 2013: a read at clock c sees all updates stamped <= c - s - 1, that is the
first c - s of every group.
"""

from __future__ import annotations

from collections.abc import Iterable

from psdist.errors import ConfigError
from psdist.servers.protocol.actions import Action
from psdist.servers.protocol.chunks import ChunkState, Push
from psdist.servers.protocol.chunks.receive_pool import ADDS
from psdist.servers.protocol.rules import RoundRule, RuleContext
from psdist.servers.protocol.rules.arrivals import BY_WEIGHT, Arrivals, ByWeight


class Async(RoundRule):
    """No worker waits for another."""

    def __init__(self, context: RuleContext, *, scale: ByWeight = BY_WEIGHT) -> None:
        super().__init__(context, note_sent=scale.note_sent)
        self._arrivals = Arrivals(self, context.membership, scale)

    def required_min_done(self, round_number: int) -> int:  # noqa: ARG002 - the same in all rounds
        return 0

    def slots_needed(self, index: int, group: int | None) -> int:  # noqa: ARG002 - the base's
        return ADDS  # its slot is free again at once

    def on_arrived(self, chunk: ChunkState, push: Push) -> list[Action]:
        have_waited = bool(chunk.waiting)
        applied = None if have_waited else self._arrivals.apply(chunk, push)
        if applied is None:
            chunk.add_push(push)
            chunk.waiting.append(push.group)
            # Its header may have proved that a reply has arrived, which frees a buffer.
            applied = self.proceed(chunk) if have_waited else []
        # This push may have blocked the group's next one.
        return applied + self.pool.reconsider(chunk.index, push.group)

    def proceed(self, chunk: ChunkState) -> list[Action]:
        return self._arrivals.apply_waiting(chunk)

    def on_free_buffer(self, chunk: ChunkState) -> list[Action]:
        if not chunk.waiting:
            return []
        chunk.clock.catch_up()
        return self.proceed(chunk)

    def _after_stop(self) -> list[Action]:
        return []

    def on_counting(self, clocks: Iterable[int]) -> list[Action]:  # noqa: ARG002 - the base's
        return []


class Ssp(Async):
    """A worker runs at most ``staleness`` rounds ahead of the slowest group."""

    def __init__(
        self, context: RuleContext, *, staleness: int, scale: ByWeight = BY_WEIGHT
    ) -> None:
        """``staleness``: rounds; raise :class:`ConfigError` if it is negative."""
        if staleness < 0:
            raise ConfigError(f"staleness = {staleness}: the bound must be 0 or more")
        super().__init__(context, scale=scale)
        self._staleness = staleness

    def required_min_done(self, round_number: int) -> int:
        return round_number - self._staleness
