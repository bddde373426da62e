"""sync with backup groups: a chunk's round is stepped with the groups that have come to it; pure.

One server decides for all chunks of all servers which groups these are
(psdist.servers.protocol.rules.closing), and sends ``CloseRound`` to the other servers.
Contributions are folded in group order, as in every sync. Late updates are received and dropped,
and their sender receives the round in which it continues
(:class:`~psdist.servers.protocol.actions.LeftOut`). A chunk's clock counts a missed round as
contained, so no reply waits for it.

    rule = Backup(context, backup=1, wait_every=10)
    rule.on_offered(chunk, 1, Offered(...))          # group 1 has come to the round
    rule.takes[CloseRound](peer, CloseRound(...))    # another server has closed a round

*Contributions were computed on the parameters of their own round.* A round closes once its
contributors have come. No chunk is stepped in the round before that, so the contributors hold the
result of the round before, in every chunk. A group that holds newer parameters has missed the
round.

*It cannot deadlock.* The first chunk of a round is offered without any slot, so a round closes
when its contributors have come. From then on receive_pool's argument for a round of all groups
holds for them: each has begun the round, and pushes all of it. A late update takes one slot, which
is free again at once.

The server that decides does not count a group that is suspended or has left. Another server that
has not received this yet waits for it before it steps the round (``_is_waiting_for_stop``), so that
each log shows which groups were waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NoReturn, Protocol

from psdist.errors import InvariantError
from psdist.protocol.checkpoints import Misses
from psdist.protocol.control import CloseRound, Setup
from psdist.protocol.events import Frame, Offered
from psdist.protocol.header import NEVER, Header
from psdist.protocol.ids import server_id
from psdist.servers.protocol.actions import Action, Built, LeftOut, Missed, SendControl
from psdist.servers.protocol.chunk_clock import ChunkClock, Limits
from psdist.servers.protocol.chunks import ChunkState, Push
from psdist.servers.protocol.chunks.frontier import Frontier
from psdist.servers.protocol.rules import MakeRule, RoundRule, RuleContext
from psdist.servers.protocol.rules.closing import Closed, Closing, Rounds
from psdist.servers.protocol.rules.gathering import Gathered


class BackupSettings(Protocol):
    """The settings of the rule, as psdist.config.settings describes them."""

    @property
    def backup(self) -> int: ...

    @property
    def backup_every(self) -> int: ...


def misses_groups(settings: BackupSettings) -> bool:
    """True if rounds may close without some groups."""
    return settings.backup > 0


def backup_rule(settings: BackupSettings) -> MakeRule:
    return partial(Backup, backup=settings.backup, wait_every=settings.backup_every)


class RoundClock(ChunkClock):
    """A chunk's clock where groups may miss rounds. A group that has stopped may have missed rounds
    after its last one, so its clock is no bound. Each update costs a look at every group."""

    __slots__ = ("num_rounds",)

    def __init__(self, limits: Limits, done: Sequence[int] = ()) -> None:
        super().__init__(limits, done)
        self.num_rounds = 0
        """Rounds that the chunk has passed, with a step or without a gradient."""

    def catch_up(self) -> None:
        if self.revision is not self.limits.revision:
            self.revision = self.limits.revision
            self.min_done = min(self.done_of_counting(), default=NEVER)

    def advance(self, group: int) -> None:
        self.done[group] += 1
        self.limits.contained[group] += 1
        self.min_done = min(self.done_of_counting(), default=NEVER)

    def end_round(self, missed: Iterable[int]) -> None:
        """Pass the round that the chunk is in without the groups ``missed``."""
        self.num_rounds += 1
        for group in missed:
            self.advance(group)

    def check_invariants(self) -> None:
        lowest = min(self.done_of_counting(), default=NEVER)
        if self.revision is self.limits.revision and self.min_done != lowest:
            raise InvariantError(f"min_done {self.min_done}, but the groups are at {self.done}")


class FrontierOfRounds(Frontier):
    @staticmethod
    def stands_at(chunk: ChunkState) -> int:
        return rounds_of(chunk)


def rounds_of(chunk: ChunkState) -> int:
    """Return the number of rounds that the chunk has passed."""
    assert isinstance(chunk.clock, RoundClock)
    return chunk.clock.num_rounds


class Backup(Gathered):
    TAKES = (CloseRound,)

    def __init__(self, context: RuleContext, *, backup: int, wait_every: int) -> None:
        """``backup``: maximum groups that miss a round; ``wait_every``: wait for a group that has
        missed this many rounds less one in a row."""
        super().__init__(context)
        self.takes = {CloseRound: self._on_closed}
        first, begin = context.first, context.membership.limits.first
        misses = first.misses if first is not None else None
        self._backup = backup
        self._rounds = Rounds(first=begin, wait_every=wait_every, misses=misses)
        self._closing: Closing | None = None
        """On the server that decides; None on others."""
        self._decider = -1
        self._first_chunk = -1
        """The chunk that all groups send first."""
        self._others: list[int] = []
        """Other servers that hold chunks."""
        self._closed: dict[int, Closed] = {}
        """By number: closed rounds in which some chunk here has still to be stepped."""
        self._leading: dict[int, int] = {}
        """By number: the group whose hyperparameters the round's steps use."""
        self._late: dict[int, tuple[int, int]] = {}
        """By group that sits out a round, on the server that decides: the peer that pushed the
        first chunk late, and its round. The peer waits for LeftOut."""
        self._told: dict[int, int] = {}
        """By group: the late round that its newest LeftOut answered."""

    def new_clock(self, done: Sequence[int] = ()) -> RoundClock:
        return RoundClock(self._membership.limits, done)

    def build(
        self, chunks: Sequence[ChunkState], built: Built, *, send_order: Sequence[int]
    ) -> None:
        super().build(chunks, built, send_order=send_order)
        self._frontier = FrontierOfRounds(chunks)
        owners = built.blocks.owners
        self._first_chunk = send_order[0]
        self._decider = owners[self._first_chunk]
        if self._decider == self._server:
            self._closing = Closing(self._rounds, backup=self._backup)
            self._others = sorted(set(owners) - {self._server})

    def misses(self) -> Misses | None:
        """Return the rounds that groups have missed; None except on the server that decides,
        because another server may have received rounds that the checkpoint does not contain."""
        return self._rounds.misses if self._closing is not None else None

    def has_all(self, contained: int, expected: int) -> bool:
        """A group may stop before it learns of rounds that it missed; these count as contained."""
        return contained >= expected

    def furthest_pull(self, chunk: ChunkState, group: int) -> int:  # noqa: ARG002 - no limit
        """No limit: a group that has missed rounds may be ahead of this server."""
        return NEVER

    def _may_wait_at(self, chunk: ChunkState, clock: int) -> bool:  # noqa: ARG002 - see RoundClock
        return True

    def for_model(self, peer: int, setup: Setup) -> RoundRule:
        if setup.max_norm:
            self._refuse(peer, "sent Setup with a norm to clip to; groups may miss rounds")
        return self

    # -- who contributes -----------------------------------------------------------------------

    def on_offered(self, chunk: ChunkState, group: int | None, offered: Offered) -> list[Action]:
        actions = super().on_offered(chunk, group, offered)
        return actions if group is None else actions + self._come(chunk, group, offered.clock)

    def _come(self, chunk: ChunkState, group: int, clock: int) -> list[Action]:
        """The group's push of the chunk is offered, or has arrived without a gradient."""
        if self._closing is None or chunk.index != self._first_chunk:
            return []
        self._closing.come(group, clock)
        return self._close()

    @property
    def _counting(self) -> list[int]:
        groups = range(self._membership.num_groups)
        return list(filter(self._membership.limits.counts, groups))

    def _close(self) -> list[Action]:
        """Close the rounds that can be closed now."""
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
        """A group that has sat out a round continues with the round that is open now."""
        late = self._late.pop(group, None)
        if late is None:
            return []
        assert self._closing is not None
        self._closing.comes_back(group)
        peer, clock = late
        self._told[group] = clock
        return [LeftOut(peer, self._first_chunk, clock, self._rounds.decided[group])]

    def _on_closed(self, peer: int, message: CloseRound) -> list[Action]:
        """Another server has closed a round."""
        expected = self._rounds.num_closed
        named = sorted({*message.groups, *message.missed})
        is_wrong = not message.groups or named[0] < 0 or named[-1] >= self._membership.num_groups
        is_wrong = is_wrong or len(named) != len(message.groups) + len(message.missed)
        if is_wrong or message.groups != sorted(message.groups) or len(self._chunks) == 0:
            self._refuse_closing(
                peer, f"of the groups {message.groups}, missed by {message.missed}"
            )
        if peer != server_id(self._decider) or message.number != expected:
            self._refuse_closing(
                peer, f"number {message.number}; server {self._decider} decides {expected}"
            )
        if any(self._rounds.decided[group] != message.round for group in named):
            self._refuse_closing(peer, f"of round {message.round}, in which not all of {named} are")
        groups, missed = tuple(message.groups), tuple(sorted(message.missed))
        return self._take(Closed(message.number, message.round, groups, missed))

    def _refuse_closing(self, peer: int, why: str) -> NoReturn:
        self._refuse(peer, f"sent CloseRound {why}")

    def _take(self, closed: Closed) -> list[Action]:
        """A round is closed: drop the updates that came too late, and step the chunks."""
        actions: list[Action] = []
        self._closed[closed.number] = closed
        self._leading[closed.number] = self._rounds.add(closed)
        for chunk in self._chunks.values():
            for group in closed.missed:
                waiting = chunk.pushes.get(group)
                if waiting and waiting[0].clock == closed.round:
                    push = chunk.take_push(group)
                    assert push is not None
                    self.num_pushes -= 1
                    actions += self._drop(chunk, push.peer, push.group, push.clock, push.slot)
                actions += self.pool.reconsider(chunk.index, group)
            chunk.clock.catch_up()
            actions += self.proceed(chunk)
        return actions

    def drop_late(
        self, chunk: ChunkState, peer: int, header: Header, slot: Frame | None
    ) -> list[Action] | None:
        if not self._rounds.has_missed(header.group, header.clock):
            return None
        actions = self._drop(chunk, peer, header.group, header.clock, slot)
        # It was computed on the last reply to its sender, which has therefore arrived.
        return actions + self.on_free_buffer(chunk) + self._close()

    def _drop(
        self, chunk: ChunkState, peer: int, group: int, clock: int, slot: Frame | None
    ) -> list[Action]:
        """Drop a late push and send its sender the round in which it continues. The server that
        decides sends this when the round closes that the group sits out."""
        actions: list[Action] = []
        if self._closing is None or chunk.index != self._first_chunk:
            actions.append(LeftOut(peer, chunk.index, clock, self._rounds.decided[group]))
        elif clock > self._told.get(group, -1):
            self._late[group] = peer, clock
            if not self._closing.sits_out(group, clock, self._counting):
                actions += self._tell_late(group)
        if slot is not None:
            actions += self.pool.release(slot)
        # The late push may have blocked the group's next one.
        return actions + self.pool.reconsider(chunk.index, group)

    # -- from the push to the step -------------------------------------------------------------

    def _is_past(self, chunk: ChunkState, group: int) -> bool:
        return self._rounds.has_missed(group, chunk.sent.get(group, -1))

    def on_arrived(self, chunk: ChunkState, push: Push) -> list[Action]:
        self._rounds.has_pushed(push.group, push.clock)
        actions = super().on_arrived(chunk, push)
        if push.slot is not None:
            return actions
        return actions + self._come(chunk, push.group, push.clock)  # it was not offered

    def _turn(self, chunk: ChunkState) -> int | None:
        """None also while the round is open."""
        closed = self._closed.get(rounds_of(chunk))
        if closed is None:
            return None
        gathered = chunk.gathering.pushes
        return next((group for group in closed.groups if group not in gathered), None)

    def _is_waiting_for_stop(self, chunk: ChunkState, closed: Closed) -> bool:
        """Return True if a group counts here that is suspended or has left for the server that
        decides."""
        clock = chunk.clock
        return any(
            done <= closed.round and self._membership.limits.counts(group)
            for group, done in enumerate(clock.done)
            if group not in closed.groups and group not in closed.missed
        )

    def _is_gathered(self, chunk: ChunkState) -> bool:
        """Return True if the contributors to the chunk's round are known."""
        closed = self._closed.get(rounds_of(chunk))
        return closed is not None and not self._is_waiting_for_stop(chunk, closed)

    def _require_agreement(self, first: Push, push: Push) -> None:
        """Nothing to require: schedulers of a group that has missed rounds are behind."""

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

    def _after_stop(self) -> list[Action]:
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
        RoundRule.check_invariants(self, index)
        chunks = self._chunks.values() if index is None else self._chunk(index)
        for chunk in chunks:
            closed, turn = self._closed.get(rounds_of(chunk)), self._turn(chunk)
            if closed is None or self._is_waiting_for_stop(chunk, closed):
                continue
            could_step = chunk.target_buffer() is not None
            if turn in chunk.pushes or (turn is None and could_step):
                raise InvariantError(f"chunk {chunk.index} is stuck in {closed}")
