"""Pushes that are an optimizer step each, in the order of arrival (ssp, async); pure.

    arrivals = Arrivals(rule, scale=ByWeight())
    arrivals.apply(chunk, push)           # [Step, ...], None while no parameter buffer is free
    arrivals.apply_waiting(chunk)         # a buffer may be free

:class:`ByWeight` and :class:`StaleLr` say by what the lr of such a step is multiplied.
"""

from __future__ import annotations

from typing import Final

from psdist.servers.protocol.actions import Action, EmptyStep, SlotContent, Step
from psdist.servers.protocol.chunks import ChunkState, Push
from psdist.servers.protocol.chunks.replies import NoteSent
from psdist.servers.protocol.membership import Membership
from psdist.servers.protocol.rules import RoundRule, contribution_of


class ByWeight:
    """The lr is multiplied by the group's weight (docs/dev/design.md, Weights)."""

    note_sent: NoteSent | None = None

    def lr_scale(self, chunk: ChunkState, push: Push, members: Membership) -> float:  # noqa: ARG002
        # Without an active group, only the workers of its own group share the update.
        return push.weight / (members.num_active_workers or members.num_workers_of(push.group))


BY_WEIGHT: Final = ByWeight()


class StaleLr(ByWeight):
    """The weight is divided by the staleness tau: Zhang et al., "Staleness-aware Async-SGD for
    Distributed Deep Learning" (arXiv 1511.05950). tau: steps by other groups since the parameters
    that the gradient was computed on, per other group; at most 1 if all groups are equally fast. No
    group may fail."""

    @staticmethod
    def note_sent(chunk: ChunkState, peer: int, version: int) -> None:
        chunk.given[peer] = version

    def lr_scale(self, chunk: ChunkState, push: Push, members: Membership) -> float:
        behind = chunk.version - chunk.given[push.peer]
        others = max(1, members.num_active_groups - 1)
        return super().lr_scale(chunk, push, members) * (1.0 / max(1.0, behind / others))


class Arrivals:
    def __init__(self, rule: RoundRule, members: Membership, scale: ByWeight) -> None:
        self._rule, self._members, self._scale = rule, members, scale

    def apply_waiting(self, chunk: ChunkState) -> list[Action]:
        """Step each push that has arrived, in the order of arrival."""
        actions: list[Action] = []
        waiting = chunk.waiting
        while waiting:
            applied = self.apply(chunk, chunk.pushes[waiting[0]][0])
            if applied is None:
                break
            chunk.take_push(waiting.popleft())
            actions += applied
        # The first push found no free buffer, so no later gradient finds one. A push without a
        # gradient needs no buffer and is applied as it arrives: only the newest can be one. After a
        # gradient of its own group it keeps its place.
        if waiting and (newest := chunk.pushes[waiting[-1]][0]).slot is None:
            actions += self._apply_empty(chunk, newest)
            chunk.take_push(waiting.pop())
        return actions

    def _apply_empty(self, chunk: ChunkState, push: Push) -> list[Action]:
        """Count an update that brought no gradient, and send the replies that it allows."""
        empty = EmptyStep(chunk.index, (contribution_of(push),))
        return [empty, *self._rule.replies.advance(chunk, (push,))]

    def apply(self, chunk: ChunkState, push: Push) -> list[Action] | None:
        """Return a step and the replies that it allows; None while no buffer is free for it."""
        if push.slot is None:
            return self._apply_empty(chunk, push)
        target = chunk.target_buffer()
        if target is None:
            return None
        rule = self._rule
        hyper, absent = push.settings
        step = Step(
            chunk=chunk.index,
            gradient=push.slot,
            content=SlotContent.GRADIENT,
            gradient_scale=1.0,
            lr_scale=self._scale.lr_scale(chunk, push, self._members),
            hyper=hyper,
            absent=absent,
            source=chunk.current,
            target=target,
            contributions=(contribution_of(push),),
            peer=push.peer,
        )
        rule.begin_step(step, chunk)
        released = rule.pool.release(push.slot)
        return [step, *released, *rule.replies.advance(chunk, (push,))]
