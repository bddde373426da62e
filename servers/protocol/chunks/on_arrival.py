"""ssp and async: every push is an optimizer step of its own, on arrival; pure.

The group's mean gradient is applied as it is, with lr x the group's weight (docs/design.md,
Weights). A push waits only for a parameter buffer while replies from both are open; later pushes of
other groups that bring no gradient are applied meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from psdist.servers.protocol.actions import Action, Contribution, EmptyStep, SlotContent, Step
from psdist.servers.protocol.chunks.chunk_state import ChunkState, Push
from psdist.servers.protocol.chunks.receive_pool import ADDS
from psdist.servers.protocol.chunks.updates import Updates


class OnArrival(Updates):
    def slots_needed(self, index: int, group: int | None) -> int:  # noqa: ARG002 - the base's
        return ADDS  # its slot is free again at once

    def on_arrived(self, chunk: ChunkState, push: Push) -> list[Action]:
        applied = self._apply(chunk, push) if not chunk.waiting else None
        if applied is None:
            chunk.add_push(push)
            chunk.waiting.append(push.group)
            applied = self.proceed(chunk)
        # The group's next push may have been held behind this one.
        return applied + self.pool.reconsider(chunk.index, push.group)

    def proceed(self, chunk: ChunkState) -> list[Action]:
        actions: list[Action] = []
        waiting, chunk.waiting = chunk.waiting, deque()
        for group in waiting:
            applied = self._apply(chunk, chunk.pushes[group][0])
            if applied is None:
                chunk.waiting.append(group)
            else:
                chunk.take_push(group)
                actions += applied
        return actions

    def _apply(self, chunk: ChunkState, push: Push) -> list[Action] | None:
        """A step, and the replies that it allows; None while no buffer is free for it."""
        contribution = Contribution(push.group, push.clock, push.weight, push.slot is None)
        if push.slot is None:
            empty = EmptyStep(chunk.index, (contribution,))
            return [empty, *self._replies.advance(chunk, (push,))]
        target = chunk.target_buffer()
        if target is None:
            return None
        hyper, absent = push.settings
        step = Step(
            chunk=chunk.index,
            gradient=push.slot,
            content=SlotContent.GRADIENT,
            gradient_scale=1.0,
            lr_scale=push.weight / self._membership.num_active_workers,
            hyper=hyper,
            absent=absent,
            source=chunk.current,
            target=target,
            contributions=(contribution,),
        )
        self._begin_step(step, chunk)
        released = self.pool.release(push.slot)
        return [step, *released, *self._replies.advance(chunk, (push,))]

    def on_free_buffer(self, chunk: ChunkState) -> list[Action]:
        if not chunk.waiting:
            return []
        chunk.clock.catch_up()
        return self.proceed(chunk)

    def on_stopped(self) -> list[Action]:
        return []

    def on_counting(self, clocks: Iterable[int]) -> list[Action]:  # noqa: ARG002 - the base's
        return []
