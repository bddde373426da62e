"""Where pushes are applied: what both ways of doing it share; pure.

A push that has arrived waits in its chunk until it can be applied. How, the policy says
(:class:`psdist.servers.protocol.chunks.policy.Applying`):

    ssp, async: psdist.servers.protocol.chunks.on_arrival, each push is a step
    sync:       psdist.servers.protocol.chunks.gathering, in group order, then one step for all
    by round:   psdist.servers.protocol.chunks.by_round, now the one, now the other

What is waited for: a parameter buffer that no open reply reads, and in sync the turn. Whoever
brings one of these calls ``proceed``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from psdist.errors import InvariantError
from psdist.protocol.events import Frame
from psdist.servers.protocol.actions import (
    Action,
    Contribution,
    EmptyStep,
    SlotContent,
    Step,
)
from psdist.servers.protocol.chunks.chunk_state import ChunkState, Push
from psdist.servers.protocol.chunks.receive_pool import ReceivePool
from psdist.servers.protocol.chunks.replies import Replies
from psdist.servers.protocol.membership import Membership


def contribution_of(push: Push) -> Contribution:
    codec = push.codec if push.slot is not None else 0
    return Contribution(push.group, push.clock, push.weight, push.slot is None, codec)


class Updates(ABC):
    """The pushes of one server, from their offer to their step."""

    def __init__(
        self, *, membership: Membership, replies: Replies, has_stale_lr: bool = False
    ) -> None:
        """``has_stale_lr``: the lr of an update is divided by how stale it is (ssp, async)."""
        self._has_stale_lr = has_stale_lr
        self._membership = membership
        self._replies = replies
        self._chunks: dict[int, ChunkState] = {}
        self.pool = ReceivePool((), need=self.slots_needed)
        self.num_steps = 0
        self.num_copies = 0
        """Steps that went to the other parameter buffer."""

    def build(self, chunks: Sequence[ChunkState], slots: Sequence[Frame]) -> None:
        """The chunks of this server, in the send order, and the slots that pushes are received
        into."""
        self._chunks = {chunk.index: chunk for chunk in chunks}
        self.pool = ReceivePool(slots, need=self.slots_needed)

    @abstractmethod
    def slots_needed(self, index: int, group: int | None) -> int:
        """How many free slots the group's next push of a chunk needs, see
        psdist.servers.protocol.chunks.receive_pool."""

    @abstractmethod
    def on_arrived(self, chunk: ChunkState, push: Push) -> list[Action]:
        """A push was received, the next one of its group."""

    @abstractmethod
    def proceed(self, chunk: ChunkState) -> list[Action]:
        """Apply what can be applied to this chunk now."""

    @abstractmethod
    def on_free_buffer(self, chunk: ChunkState) -> list[Action]:
        """A reply's buffer is free: a step may have waited for it."""

    @abstractmethod
    def on_stopped(self) -> list[Action]:
        """A group was suspended or has left; ``proceed`` was called where something waited."""

    @abstractmethod
    def on_counting(self, clocks: Iterable[int]) -> list[Action]:
        """Groups count from now on that have made so many iterations, one number of each."""

    def _apply_waiting(self, chunk: ChunkState) -> list[Action]:
        """Step each push that has arrived and may be a step by itself (ssp, async), in the order
        of arrival."""
        actions: list[Action] = []
        waiting = chunk.waiting
        while waiting:
            applied = self._apply(chunk, chunk.pushes[waiting[0]][0])
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
        return [empty, *self._replies.advance(chunk, (push,))]

    def _apply(self, chunk: ChunkState, push: Push) -> list[Action] | None:
        """A step, and the replies that it allows; None while no buffer is free for it."""
        if push.slot is None:
            return self._apply_empty(chunk, push)
        target = chunk.target_buffer()
        if target is None:
            return None
        hyper, absent = push.settings
        # Where all groups have left or died, an update that was inherited is shared by its own.
        sharing = self._membership.num_active_workers or self._membership.num_workers_of(push.group)
        step = Step(
            chunk=chunk.index,
            gradient=push.slot,
            content=SlotContent.GRADIENT,
            gradient_scale=1.0,
            lr_scale=self._staled(chunk, push, push.weight / sharing),
            hyper=hyper,
            absent=absent,
            source=chunk.current,
            target=target,
            contributions=(contribution_of(push),),
            peer=push.peer,
        )
        self._begin_step(step, chunk)
        released = self.pool.release(push.slot)
        return [step, *released, *self._replies.advance(chunk, (push,))]

    def _staled(self, chunk: ChunkState, push: Push, lr_scale: float) -> float:
        """lr / tau, after Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning"
        (arXiv 1511.05950). tau: the steps that others have made since the parameters that the
        gradient was computed on, for each of them; 1 or less where all groups are as fast."""
        if not self._has_stale_lr:
            return lr_scale
        behind = chunk.version - chunk.given[push.peer]
        others = max(1, self._membership.num_active_groups - 1)
        return lr_scale * (1.0 / max(1.0, behind / others))

    def _begin_step(self, step: Step, chunk: ChunkState) -> None:
        chunk.current = step.target
        chunk.version += 1
        if step.source != step.target:
            self.num_copies += 1
        self.num_steps += 1

    def _chunk(self, index: int) -> tuple[ChunkState, ...]:
        """That one, if this server holds it."""
        chunk = self._chunks.get(index)
        return () if chunk is None else (chunk,)

    def check_invariants(self, index: int | None = None) -> None:
        """See :meth:`psdist.servers.protocol.state.ServerCore.check_invariants`."""
        chunks = self._chunks.values() if index is None else self._chunk(index)
        for chunk in chunks:
            chunk.check_invariants()
            is_waiting = chunk.parked or self.pool.holds(chunk.index)
            if is_waiting and chunk.index not in self._replies.blocked:
                raise InvariantError(f"on chunk {chunk.index} something waits, and nobody knows")
        if index is not None:
            return
        self.pool.check_invariants()
        in_use = sum(chunk.num_slots_held for chunk in self._chunks.values())
        if in_use > self.pool.num_slots - self.pool.num_free:
            raise InvariantError(f"{in_use} receive slots in use, more than were taken")
