"""ssp and async: every push is an optimizer step of its own, on arrival; pure.

The group's mean gradient is applied as it is, with lr x the group's weight (docs/design.md,
Weights). A push waits only for a parameter buffer while replies from both are open; later pushes of
other groups that bring no gradient are applied meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from psdist.servers.protocol.actions import Action
from psdist.servers.protocol.chunks.chunk_state import ChunkState, Push
from psdist.servers.protocol.chunks.receive_pool import ADDS
from psdist.servers.protocol.chunks.updates import Updates


class OnArrival(Updates):
    def slots_needed(self, index: int, group: int | None) -> int:  # noqa: ARG002 - the base's
        return ADDS  # its slot is free again at once

    def on_arrived(self, chunk: ChunkState, push: Push) -> list[Action]:
        have_waited = bool(chunk.waiting)
        applied = None if have_waited else self._apply(chunk, push)
        if applied is None:
            chunk.add_push(push)
            chunk.waiting.append(push.group)
            # Its header may have proved that a reply has arrived, which frees a buffer.
            applied = self.proceed(chunk) if have_waited else []
        # The group's next push may have been held behind this one.
        return applied + self.pool.reconsider(chunk.index, push.group)

    def proceed(self, chunk: ChunkState) -> list[Action]:
        return self._apply_waiting(chunk)

    def on_free_buffer(self, chunk: ChunkState) -> list[Action]:
        if not chunk.waiting:
            return []
        chunk.clock.catch_up()
        return self.proceed(chunk)

    def on_stopped(self) -> list[Action]:
        return []

    def on_counting(self, clocks: Iterable[int]) -> list[Action]:  # noqa: ARG002 - the base's
        return []
