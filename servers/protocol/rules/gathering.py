"""The pushes of a round are summed in group order, then the chunk makes one step; pure.

Contributions are folded in the order of their groups, whatever the order of arrival, so results
are bitwise the same from run to run. A push that comes before its turn stays with its sender or
waits in a slot. When every group that is waited for has contributed, the sum is divided by the sum
of weights, and the chunk makes one step.
:class:`~psdist.servers.protocol.chunks.ChunkState` keeps a chunk's turn.

All rules with a joint step extend ``Gathered``: sync, clipping, backup, switching.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psdist.errors import HyperparameterError, InvariantError
from psdist.protocol.header import NEVER
from psdist.protocol.optimizers import difference, unpack_hyperparameters
from psdist.servers.protocol.actions import (
    Action,
    Built,
    EmptyStep,
    Fold,
    SlotContent,
    StartSum,
    Step,
)
from psdist.servers.protocol.chunks import ChunkState, Gathering, Push
from psdist.servers.protocol.chunks.frontier import Frontier
from psdist.servers.protocol.chunks.receive_pool import ADDS, EARLY, FRONTIER, STARTS, TOO_FAR
from psdist.servers.protocol.rules import RoundRule, contribution_of


class Gathered(RoundRule):
    _frontier = Frontier(())
    """Empty until the rule is built."""
    _reach = 0
    """Chunks that may take slots, from the frontier on; all groups' pushes of them fit."""

    def required_min_done(self, round_number: int) -> int:
        return round_number

    def build(
        self, chunks: Sequence[ChunkState], built: Built, *, send_order: Sequence[int]
    ) -> None:
        super().build(chunks, built, send_order=send_order)
        self._frontier = Frontier(chunks)
        self._reach = max(2, (len(built.slots) - (EARLY - 1)) // self._membership.num_groups)

    def slots_needed(self, index: int, group: int | None) -> int:
        if group is None:
            return ADDS
        chunk = self._chunks[index]
        if self._is_past(chunk, group):
            return ADDS
        chunk.clock.catch_up()
        if self._turn(chunk) != group:
            return EARLY if self._is_near(chunk) else TOO_FAR
        if chunk.gathering.accumulator is not None:
            return ADDS
        if self._frontier.chunk is chunk:
            return FRONTIER
        return STARTS if self._is_near(chunk) else TOO_FAR

    def _is_past(self, chunk: ChunkState, group: int) -> bool:
        """Return True if the chunk contains the push that the group offers."""
        return group in chunk.duplicate_offers

    def _turn(self, chunk: ChunkState) -> int | None:
        """Return the group whose update is folded next; None if no group is in turn."""
        return chunk.next_in_turn()

    def _is_near(self, chunk: ChunkState) -> bool:
        return self._frontier.is_within(self._reach, chunk)

    def on_arrived(self, chunk: ChunkState, push: Push) -> list[Action]:
        chunk.add_push(push)
        self.replies.blocked[chunk.index] = chunk
        return self.proceed(chunk)

    def proceed(self, chunk: ChunkState) -> list[Action]:
        actions: list[Action] = []
        while self._is_gathered(chunk) and (
            (group := self._turn(chunk)) is not None or chunk.gathering.pushes
        ):
            if group is None:
                step = self._step(chunk)
                if step is None:
                    return actions
                actions += step
                continue
            push = chunk.take_push(group)
            if push is None:
                return actions + self.pool.reconsider(chunk.index, group)
            actions += self._fold(chunk, push)
        return actions

    def _is_gathered(self, chunk: ChunkState) -> bool:  # noqa: ARG002 - the same for all in sync
        """Return True if the iteration that the chunk is in becomes one step."""
        return True

    def on_free_buffer(self, chunk: ChunkState) -> list[Action]:
        return self.proceed(chunk) if chunk.gathering.pushes else []

    def _after_stop(self) -> list[Action]:
        return self._reconsider(self._frontier.move())

    def on_counting(self, clocks: Iterable[int]) -> list[Action]:
        return self._reconsider(self._frontier.admit(min(clocks, default=NEVER)))

    def _fold(self, chunk: ChunkState, push: Push) -> list[Action]:
        """Add the push of the group in turn to the sum."""
        gathering = chunk.gathering
        hyper, absent = push.settings
        first = next(iter(gathering.pushes.values()), push)
        if hyper != first.settings.hyper:
            self._require_agreement(first, push)
        gathering.pushes[push.group] = push
        gathering.weight += push.weight
        if push.slot is None:
            return []
        if gathering.accumulator is None:
            gathering.accumulator, gathering.absent = push.slot, absent
            return [StartSum(chunk.index, push.slot, push.weight, push.clock)]
        gathering.absent = gathering.absent & absent
        fold = Fold(chunk.index, push.slot, gathering.accumulator, push.weight, push.clock)
        return [fold, *self.pool.release(push.slot)]

    def _require_agreement(self, first: Push, push: Push) -> None:
        """Raise :class:`HyperparameterError`: their hyperparameters differ."""
        one, other = (unpack_hyperparameters(each.settings.hyper) for each in (first, push))
        raise HyperparameterError(
            f"sync iteration {push.clock}: groups {first.group} and {push.group} disagree on "
            f"hyperparameters: {difference(one, other)}; in sync mode every worker must use the "
            "same schedule"
        )

    def _hyper_of(self, chunk: ChunkState, pushes: Sequence[Push]) -> bytes:  # noqa: ARG002 - as above
        """Return the hyperparameters of the step, which are the same in all pushes."""
        return pushes[0].settings.hyper

    def _step(self, chunk: ChunkState) -> list[Action] | None:
        """All groups have contributed: return one step on the weighted mean, None if it must
        wait."""
        target = chunk.target_buffer()
        if target is None:
            return None  # on_free_buffer comes back
        gathering, chunk.gathering = chunk.gathering, Gathering()
        pushes = tuple(gathering.pushes.values())
        contributions = tuple(map(contribution_of, pushes))
        slot = gathering.accumulator
        step: Step | EmptyStep
        if slot is None:
            step = EmptyStep(chunk.index, contributions)
        else:
            step = Step(
                chunk=chunk.index,
                gradient=slot,
                content=SlotContent.SUM,
                gradient_scale=1.0 / gathering.weight,
                lr_scale=1.0,
                hyper=self._hyper_of(chunk, pushes),
                absent=gathering.absent,
                source=chunk.current,
                target=target,
                contributions=contributions,
            )
            self.begin_step(step, chunk)
        actions = [step, *self.replies.advance(chunk, pushes)]
        # Only now, because the next user of the slot depends on the turn and on the frontier.
        frontier = self._frontier.move()
        if slot is not None:
            actions += self.pool.release(slot)
        return actions + self._reconsider(frontier)

    def _may_finish(self, chunk: ChunkState) -> bool:
        return chunk.target_buffer() is not None

    def _reconsider(self, frontier: ChunkState | None) -> list[Action]:
        """The frontier has moved to this chunk, whose next push needs fewer free slots than before;
        more chunks are within reach."""
        if frontier is None:
            return []
        pool = self.pool
        actions = pool.reconsider(frontier.index, frontier.next_in_turn())
        if not pool.holds_too_far:
            return actions
        for chunk in self._frontier.next_chunks(self._reach):
            actions += pool.reconsider_all(chunk.index)
        return actions

    def check_invariants(self, index: int | None = None) -> None:
        super().check_invariants(index)
        chunks = self._chunks.values() if index is None else self._chunk(index)
        for chunk in chunks:
            if chunk.has_waiting and chunk.index not in self.replies.blocked:
                raise InvariantError(f"chunk {chunk.index} is blocked and not listed in blocked")
            gathered = chunk.gathering.pushes
            missing = [group for group in chunk.clock.missing() if group not in gathered]
            is_ready = gathered and self._may_finish(chunk)
            could_go_on = missing[0] in chunk.pushes if missing else is_ready
            if could_go_on and self._is_gathered(chunk):
                raise InvariantError(f"chunk {chunk.index} is stuck; missing: {missing}")
        if index is not None:
            return
        lowest = min(
            (min(chunk.clock.done_of_counting(), default=NEVER) for chunk in self._chunks.values()),
            default=NEVER,
        )
        frontier = self._frontier.chunk
        if frontier is not None and min(frontier.clock.done_of_counting(), default=NEVER) != lowest:
            raise InvariantError(
                f"the frontier, chunk {frontier.index}, is at {frontier.clock.min_done}, another "
                f"chunk at {lowest}"
            )
