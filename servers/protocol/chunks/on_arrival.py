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
        chunk.add_push(push)
        chunk.waiting.append(push.group)
        # The group's next push may have been held behind this one.
        return self.proceed(chunk) + self.pool.reconsider(chunk.index, push.group)

    def proceed(self, chunk: ChunkState) -> list[Action]:
        actions: list[Action] = []
        waiting, chunk.waiting = chunk.waiting, deque()
        for group in waiting:
            push = chunk.pushes[group][0]
            contribution = Contribution(group, push.clock, push.weight, push.slot is None)
            if push.slot is None:
                actions.append(EmptyStep(chunk.index, (contribution,)))
            elif (target := chunk.target_buffer()) is None:
                chunk.waiting.append(group)
                continue
            else:
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
                actions.append(step)
                actions += self.pool.release(push.slot)
            chunk.take_push(group)
            actions += self._replies.advance(chunk, (push,))
        return actions

    def on_free_buffer(self, chunk: ChunkState) -> list[Action]:
        if not chunk.waiting:
            return []
        chunk.clock.catch_up()
        return self.proceed(chunk)

    def on_stopped(self) -> list[Action]:
        return []

    def on_counting(self, clocks: Iterable[int]) -> list[Action]:  # noqa: ARG002 - the base's
        return []
