"""sync with backup groups: a chunk's round is stepped with the groups that have come to it; pure.

Who that is, one server decides for all chunks of all servers
(psdist.servers.protocol.chunks.closing); the others hear of it by ``CloseRound``. Contributions are
folded in group order, as in every sync. Late updates are received and dropped, and their sender is
told in which round it goes on (:class:`~psdist.servers.protocol.actions.LeftOut`). A missed round
counts in a chunk's clock as one that the chunk contains: nobody waits for it.

    backed = Backed(membership=..., replies=..., server=0, backup=1, wait_every=10)
    backed.share(owners, first=3)                    # who decides
    backed.on_offered(chunk, group=1, clock=7)       # group 1 has come to round 7
    backed.on_closed(peer, CloseRound(...))          # decided elsewhere

*What contributes was computed on the parameters of its own round.* A round closes once its
contributors have come; until then no chunk is stepped in it, so what they hold is what the round
before has left, in every chunk. Whoever holds anything newer has missed the round.

*It cannot deadlock.* The first chunk of a round is offered without any slot, so a round closes
when its contributors have come. From then on they are what a round of all groups is in
receive_pool's argument: each has begun the round, and pushes all of it. A late update takes one
slot, free again at once.

A group that is suspended or has left is not counted by the server that decides; a server that has
not heard of that yet waits for it before it steps the round (``_is_waiting_for_stop``), so that
every log shows who was waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.checkpoints import Misses
from psdist.protocol.control import CloseRound
from psdist.protocol.events import Frame
from psdist.protocol.header import NEVER
from psdist.protocol.ids import describe_peer, server_id
from psdist.servers.protocol.actions import Action, LeftOut, Missed, SendControl
from psdist.servers.protocol.chunk_clock import ChunkClock, Limits
from psdist.servers.protocol.chunks.chunk_state import ChunkState, Push
from psdist.servers.protocol.chunks.closing import Closed, Closing, Rounds
from psdist.servers.protocol.chunks.frontier import Frontier
from psdist.servers.protocol.chunks.gathering import Gathered
from psdist.servers.protocol.chunks.replies import Replies
from psdist.servers.protocol.chunks.updates import Updates
from psdist.servers.protocol.membership import Membership


class RoundClock(ChunkClock):
    """A chunk's clock where groups may miss rounds: one that has stopped may have missed more than
    it knows of, so where it stands says nothing. Costs a look at every group for each update."""

    __slots__ = ("num_rounds",)

    def __init__(self, limits: Limits, done: Sequence[int] = ()) -> None:
        super().__init__(limits, done)
        self.num_rounds = 0
        """Rounds that the chunk was stepped in, or would have been."""

    def catch_up(self) -> None:
        if self.changes is not self.limits.changes:
            self.changes = self.limits.changes
            self.min_done = min(self.done_of_counting(), default=NEVER)

    def advance(self, group: int) -> None:
        self.done[group] += 1
        self.limits.contained[group] += 1
        self.min_done = min(self.done_of_counting(), default=NEVER)

    def end_round(self, missed: Iterable[int]) -> None:
        """These groups are not waited for in the round that the chunk is in."""
        self.num_rounds += 1
        for group in missed:
            self.advance(group)

    def check_invariants(self) -> None:
        lowest = min(self.done_of_counting(), default=NEVER)
        if self.changes is self.limits.changes and self.min_done != lowest:
            raise InvariantError(f"min_done {self.min_done}, but the groups are at {self.done}")


class FrontierOfRounds(Frontier):
    @staticmethod
    def stands_at(chunk: ChunkState) -> int:
        return rounds_of(chunk)


def rounds_of(chunk: ChunkState) -> int:
    """Rounds that the chunk is through."""
    assert isinstance(chunk.clock, RoundClock)
    return chunk.clock.num_rounds


class Backed(Gathered):
    def __init__(
        self,
        *,
        membership: Membership,
        replies: Replies,
        server: int,
        backup: int,
        wait_every: int,
        first: Misses | None = None,
    ) -> None:
        """``first``: what groups had missed before, in a run that goes on from a checkpoint."""
        super().__init__(membership=membership, replies=replies)
        self._server = server
        self._backup = backup
        self._rounds = Rounds(first=membership.limits.first, wait_every=wait_every, misses=first)
        self._closing: Closing | None = None
        """On the server that decides."""
        self._decider = -1
        self._first = -1
        """The chunk that all groups send first."""
        self._others: list[int] = []
        """Other servers that hold chunks."""
        self._closed: dict[int, Closed] = {}
        """By number, those that some chunk here has still to be stepped in."""
        self._leading: dict[int, int] = {}
        """By number, the group whose hyperparameters the round is stepped with."""
        self._late: dict[int, tuple[int, int]] = {}
        """By group that sits out a round, on the server that decides: who has pushed the first
        chunk of which round, and is told where to go on."""
        self._told: dict[int, int] = {}
        """By group, for which late round it was."""
        self.num_taken_back = 0
        """Updates that had arrived in time for this server, and not for the one that decides."""

    def build(self, chunks: Sequence[ChunkState], slots: Sequence[Frame]) -> None:
        super().build(chunks, slots)
        self._frontier = FrontierOfRounds(chunks)

    def share(self, owners: Sequence[int], *, first: int) -> None:
        """``owners``: chunk -> server; ``first``: the chunk that all groups send first."""
        self._decider, self._first = owners[first], first
        if self._decider == self._server:
            self._closing = Closing(self._rounds, backup=self._backup)
            self._others = sorted(set(owners) - {self._server})

    @property
    def misses(self) -> Misses | None:
        """What groups have missed up to now; None but on the server that decides: others may have
        heard of rounds behind a checkpoint that they have still to copy."""
        return self._rounds.misses if self._closing is not None else None

    # -- who contributes -----------------------------------------------------------------------

    def on_offered(self, chunk: ChunkState, group: int, clock: int) -> list[Action]:
        """The group's push of the chunk is on its way, or here without a gradient."""
        if self._closing is None or chunk.index != self._first:
            return []
        self._closing.come(group, clock)
        return self._close()

    @property
    def _counting(self) -> list[int]:
        groups = range(self._membership.num_groups)
        return list(filter(self._membership.limits.counts, groups))

    def _close(self) -> list[Action]:
        """The rounds that can be decided now."""
        actions: list[Action] = []
        closing = self._closing
        if closing is None:
            return actions
        while (closed := closing.close(self._counting)) is not None:
            message = CloseRound(
                number=closed.number,
                round=closed.round,
                groups=list(closed.groups),
                missed=list(closed.missed),
            )
            actions += [SendControl(server_id(other), message) for other in self._others]
            actions += self._take(closed)
            for group in closed.missed:
                actions += self._tell_late(group)
        return actions

    def _tell_late(self, group: int) -> list[Action]:
        """A group that has sat out a round goes on with the one that is open now."""
        late = self._late.pop(group, None)
        if late is None:
            return []
        assert self._closing is not None
        self._closing.comes_back(group)
        peer, clock = late
        self._told[group] = clock
        return [LeftOut(peer, self._first, clock, self._rounds.decided[group])]

    def on_closed(self, peer: int, message: CloseRound) -> list[Action]:
        """Another server has decided."""
        expected = self._rounds.num_closed
        named = sorted({*message.groups, *message.missed})
        is_wrong = not message.groups or named[0] < 0 or named[-1] >= self._membership.num_groups
        is_wrong = is_wrong or len(named) != len(message.groups) + len(message.missed)
        if is_wrong or message.groups != sorted(message.groups) or len(self._chunks) == 0:
            self._refuse(peer, f"of the groups {message.groups}, missed by {message.missed}")
        if peer != server_id(self._decider) or message.number != expected:
            self._refuse(
                peer, f"number {message.number}; server {self._decider} decides {expected}"
            )
        if any(self._rounds.decided[group] != message.round for group in named):
            self._refuse(peer, f"of round {message.round}, in which not all of {named} are")
        groups, missed = tuple(message.groups), tuple(sorted(message.missed))
        return self._take(Closed(message.number, message.round, groups, missed))

    def _refuse(self, peer: int, why: str) -> NoReturn:
        raise ProtocolError(f"server {self._server}: {describe_peer(peer)} sent CloseRound {why}")

    def _take(self, closed: Closed) -> list[Action]:
        """A round is decided: updates that come too late go, and chunks go on."""
        actions: list[Action] = []
        self._closed[closed.number] = closed
        self._leading[closed.number] = self._rounds.add(closed)
        for chunk in self._chunks.values():
            for group in closed.missed:
                waiting = chunk.pushes.get(group)
                if waiting and waiting[0].clock == closed.round:
                    push = chunk.take_push(group)
                    assert push is not None
                    self.num_taken_back += 1
                    actions += self._drop(chunk, push.peer, push.group, push.clock, push.slot)
                actions += self.pool.reconsider(chunk.index, group)
            chunk.clock.catch_up()
            actions += self.proceed(chunk)
        return actions

    def has_missed(self, group: int, clock: int) -> bool:
        """Whether a push of the group in this round is too late."""
        return self._rounds.has_missed(group, clock)

    def on_late(
        self, chunk: ChunkState, peer: int, group: int, clock: int, slot: Frame | None
    ) -> list[Action]:
        """A push that is too late has arrived."""
        actions = self._drop(chunk, peer, group, clock, slot)
        # It was computed on what its sender was sent last, which has arrived therefore.
        return actions + self.on_free_buffer(chunk) + self._close()

    def _drop(
        self, chunk: ChunkState, peer: int, group: int, clock: int, slot: Frame | None
    ) -> list[Action]:
        """A push that is too late: its sender is told where to go on, by the server that decides
        when the round closes that it sits out."""
        actions: list[Action] = []
        if self._closing is None or chunk.index != self._first:
            actions.append(LeftOut(peer, chunk.index, clock, self._rounds.decided[group]))
        elif clock > self._told.get(group, -1):
            self._late[group] = peer, clock
            if not self._closing.sits_out(group, clock, self._counting):
                actions += self._tell_late(group)
        if slot is not None:
            actions += self.pool.release(slot)
        # The group's next push may have been held behind it.
        return actions + self.pool.reconsider(chunk.index, group)

    # -- from the push to the step -------------------------------------------------------------

    def _is_past(self, chunk: ChunkState, group: int) -> bool:
        return self._rounds.has_missed(group, chunk.sent.get(group, -1))

    def on_arrived(self, chunk: ChunkState, push: Push) -> list[Action]:
        self._rounds.has_pushed(push.group, push.clock)
        return super().on_arrived(chunk, push)

    def _turn(self, chunk: ChunkState) -> int | None:
        """None, too, where it is not known yet."""
        closed = self._closed.get(rounds_of(chunk))
        if closed is None:
            return None
        gathered = chunk.gathering.pushes
        return next((group for group in closed.groups if group not in gathered), None)

    def _is_waiting_for_stop(self, chunk: ChunkState, closed: Closed) -> bool:
        """Whether a group counts here that the server which decides knows to be suspended or to
        have left."""
        clock = chunk.clock
        return any(
            done <= closed.round and self._membership.limits.counts(group)
            for group, done in enumerate(clock.done)
            if group not in closed.groups and group not in closed.missed
        )

    def _is_gathered(self, chunk: ChunkState) -> bool:
        """Whether who contributes to the round that the chunk is in is known."""
        closed = self._closed.get(rounds_of(chunk))
        return closed is not None and not self._is_waiting_for_stop(chunk, closed)

    def _require_agreement(self, first: Push, push: Push) -> None:
        """None is asked for: schedulers of a group that has missed rounds are behind."""

    def _hyper_of(self, chunk: ChunkState, pushes: Sequence[Push]) -> bytes:
        leading = self._leading[rounds_of(chunk) - 1]
        return next(push for push in pushes if push.group == leading).settings.hyper

    def _step(self, chunk: ChunkState) -> list[Action] | None:
        if chunk.target_buffer() is None:
            return None  # on_free_buffer comes back
        closed = self._closed[rounds_of(chunk)]
        clock = chunk.clock
        assert isinstance(clock, RoundClock)
        clock.end_round(closed.missed)
        actions = super()._step(chunk)
        assert actions is not None
        if closed.missed:
            actions.insert(0, Missed(chunk.index, closed.round, closed.missed))
        if all(rounds_of(each) > closed.number for each in self._chunks.values()):
            del self._closed[closed.number], self._leading[closed.number]
        return actions

    def _reconsider(self, frontier: ChunkState | None) -> list[Action]:
        if frontier is None:
            return []
        actions: list[Action] = []
        for chunk in self._frontier.next_chunks(self._reach):
            actions += self.pool.reconsider_all(chunk.index)
        return actions

    def on_free_buffer(self, chunk: ChunkState) -> list[Action]:
        return self.proceed(chunk)

    def on_stopped(self) -> list[Action]:
        actions: list[Action] = []
        for chunk in self._chunks.values():
            chunk.clock.catch_up()
            actions += self.proceed(chunk)
        for group, (_, clock) in list(self._late.items()):
            assert self._closing is not None
            if not self._closing.sits_out(group, clock, self._counting):
                actions += self._tell_late(group)
        return actions + self._close()

    def on_counting(self, clocks: Iterable[int]) -> list[Action]:  # noqa: ARG002 - the base's
        return self._close()

    def check_invariants(self, index: int | None = None) -> None:
        Updates.check_invariants(self, index)
        chunks = self._chunks.values() if index is None else self._chunk(index)
        for chunk in chunks:
            closed, turn = self._closed.get(rounds_of(chunk)), self._turn(chunk)
            if closed is None or self._is_waiting_for_stop(chunk, closed):
                continue
            could_step = chunk.target_buffer() is not None
            if turn in chunk.pushes or (turn is None and could_step):
                raise InvariantError(f"chunk {chunk.index} could go on in {closed} and does not")
