"""The state of one chunk on a server, from the push that arrives to the reply that leaves.

The package imports membership, settings, actions and the chunk's clock, and never the round rules
or the state machine.

The state of one chunk on a server: pushes, turns, parked and open replies; pure.

Bookkeeping of one chunk alone. The round rule and ``replies`` decide the consequences for slots,
other chunks and the history. The cost is the same for 2 and for 2,000 groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from psdist.errors import InvariantError
from psdist.protocol.events import Frame
from psdist.servers.protocol.actions import ReplyToken
from psdist.servers.protocol.chunk_clock import ChunkClock
from psdist.servers.protocol.settings import PushSettings


@dataclass(slots=True)
class Push:
    """A received update; ``slot`` is None where it brought no gradient."""

    peer: int
    group: int
    clock: int
    weight: float
    settings: PushSettings
    slot: Frame | None
    version: int = 0
    """The chunk's version in its sender's memory; 0 for none."""
    codec: int = 0
    """Number of the message's codec."""


class PendingReply(NamedTuple):
    """A reply that is owed."""

    peer: int
    clock: int
    flags: int
    pull_number: int = 0
    """Number of the pull that it answers; 0 if it answers a push."""
    version: int = 0
    """The chunk's version in the peer's memory; 0: send the values in any case."""


@dataclass(slots=True)
class Gathering:
    """The sync iteration in progress: contributions folded so far, in group order."""

    pushes: dict[int, Push] = field(default_factory=dict)
    weight: float = 0.0
    """The sum of theirs."""
    accumulator: Frame | None = None
    absent: frozenset[int] = frozenset()
    """The pieces that had no gradient in any of what is summed."""


class Loading(NamedTuple):
    """Values that the chief has sent, in ``slot``, to be set when a buffer is free."""

    group: int
    clock: int
    pull_number: int
    slot: Frame
    peer: int


@dataclass(slots=True, eq=False)
class ChunkState:
    index: int
    clock: ChunkClock
    is_loaded: bool = False
    pushes: dict[int, deque[Push]] = field(default_factory=dict)
    """Received and not yet applied, by group."""
    waiting: deque[int] = field(default_factory=deque)
    """Groups with such pushes in the order of arrival; ssp and async only."""
    sent: dict[int, int] = field(default_factory=dict)
    """Group -> its newest iteration whose push was offered."""
    duplicate_offers: set[int] = field(default_factory=set)
    """Groups that offer a push which the chunk contains. Their workers had sent the push to a
    failed server and wait for a reply. Its slot is free again at once."""
    parked: dict[int, list[PendingReply]] = field(default_factory=dict)
    """Replies that the mode does not allow yet, by the min_done that they need."""
    unloaded_pulls: list[PendingReply] = field(default_factory=list)
    gathering: Gathering = field(default_factory=Gathering)
    version: int = 1
    """Version of the values: 1 at first, one more with every step and with values that are set."""
    loading: Loading | None = None
    newest_load: int = 0
    """``pull_number`` of the values that were set last, or wait."""
    is_held: bool = False
    """True while the complete mean lies in held memory and waits for the joint norm (clipping)."""
    current: int = 0
    """The parameter buffer that holds the newest version."""
    open_replies: list[int] = field(default_factory=lambda: [0, 0])
    """How many open replies read each of the two buffers."""
    pulls: dict[int, int] = field(default_factory=dict)
    """Peer -> number of the pull whose reply is parked, or waits for the initial values."""
    given: dict[int, int] = field(default_factory=dict)
    """Peer -> version of the parameters that were sent into its memory last; only where updates are
    judged by that."""
    _tokens: dict[int, set[ReplyToken]] = field(default_factory=dict)
    _again: dict[int, int] = field(default_factory=dict)
    """Peer -> the iteration that it retransmitted after a failure."""
    _turn: int = field(init=False)
    """Groups below it have had their turn in the iteration of ``_turn_of``."""
    _turn_of: tuple[int, object] | None = None
    """Iteration, and :attr:`Limits.admissions`."""

    # -- pushes --------------------------------------------------------------------------------

    def newest_round_of(self, group: int) -> int:
        """The last iteration of ``group`` that has been received here, -1 for none."""
        queue = self.pushes.get(group)
        if queue:
            return queue[-1].clock
        return self.clock.done[group] - (0 if group in self.gathering.pushes else 1)

    def add_push(self, push: Push) -> None:
        self.pushes.setdefault(push.group, deque()).append(push)

    def take_push(self, group: int) -> Push | None:
        """The first that waits, if any; it waits no more."""
        queue = self.pushes.get(group)
        if queue is None:
            return None
        push = queue.popleft()
        if not queue:
            del self.pushes[group]
        return push

    # -- turns (sync) --------------------------------------------------------------------------

    def next_in_turn(self) -> int | None:
        """The next group, in group order, whose contribution to iteration min_done is waited for;
        None when all that count have contributed. The chunk has caught up."""
        clock, gathered = self.clock, self.gathering.pushes
        done, limit, min_done = clock.done, clock.limit, clock.min_done
        # A group that counts again may be in turn although later groups were looked at.
        now = min_done, clock.limits.admissions
        if self._turn_of != now:
            self._turn, self._turn_of = 0, now
        draining = clock.draining
        for group in range(self._turn, len(done)):
            # As clock.is_required(group), without a call for each group of a round.
            if (
                done[group] == min_done
                and (min_done < limit[group] or group in draining)
                and group not in gathered
            ):
                self._turn = group
                return group
        self._turn = len(done)
        return None

    # -- parameter buffers ---------------------------------------------------------------------

    def target_buffer(self) -> int | None:
        """Where the next step may write: the bytes of an open reply never change. None while
        replies from both buffers are open."""
        if not self.open_replies[self.current]:
            return self.current
        other = 1 - self.current
        return None if self.open_replies[other] else other

    def open_reply(self, peer: int, *, implied_by: int) -> ReplyToken:
        """A reply from the current buffer begins."""
        token = ReplyToken(peer, self.index, self.current, implied_by)
        self.open_replies[self.current] += 1
        self._tokens.setdefault(peer, set()).add(token)
        return token

    def close_reply(self, token: ReplyToken) -> None:
        token.is_sent = True
        self.open_replies[token.buffer] -= 1
        self._tokens[token.peer].remove(token)

    def implied_replies(self, peer: int, clock: int) -> list[ReplyToken]:
        """Return the open replies that a push of iteration ``clock`` was computed on. The push
        proves their arrival, even if the network has not confirmed it yet."""
        return [token for token in self._tokens.get(peer, ()) if clock >= token.implied_by]

    def is_first_again(self, peer: int, clock: int) -> bool:
        """Whether ``peer`` has sent iteration ``clock`` again, and this is no second delivery of
        that: a second reply would be one whose arrival nothing proves."""
        is_first = clock > self._again.get(peer, -1)
        if is_first:
            self._again[peer] = clock
        return is_first

    # -- failures ----------------------------------------------------------------------------

    def evict(self, group: int, peers: Collection[int]) -> list[int]:
        """``group``, of the workers ``peers``, has failed. Return its iterations that have arrived
        whole and will be contained."""
        clocks = [push.clock for push in self._received_of(group)]
        self.owe_nothing(peers)
        self.clock.evict(group, num_arrived=len(clocks))
        return clocks

    def lose(self, group: int, peers: Collection[int]) -> list[int]:
        """``peers``, of ``group``, have failed, and the group continues. Return the iterations that
        they pushed whole and that will be contained."""
        self.owe_nothing(peers)
        return [push.clock for push in self._received_of(group) if push.peer in peers]

    def hand_on(self, group: int, clock: int, peer: int, *, version: int) -> None:
        """``peer`` replaces the failed sender of iteration ``clock``, and holds this version: it
        gets the reply."""
        for push in self._received_of(group):
            if push.clock == clock:
                push.peer, push.version = peer, version

    def _received_of(self, group: int) -> list[Push]:
        """Its pushes that are here and not contained, in order."""
        gathered = self.gathering.pushes.get(group)
        first = [] if gathered is None else [gathered]
        return [*first, *self.pushes.get(group, ())]

    def owe_nothing(self, peers: Collection[int]) -> None:
        """No reply is parked for these any more."""
        for needed, replies in tuple(self.parked.items()):
            others = [each for each in replies if each.peer not in peers]
            if others:
                self.parked[needed] = others
            else:
                del self.parked[needed]
        self.unloaded_pulls = [each for each in self.unloaded_pulls if each.peer not in peers]
        for peer in peers:
            self.pulls.pop(peer, None)

    def is_gathering_later_than(self, clock: int) -> bool:
        """Whether a later iteration is being summed (sync)."""
        return any(push.clock > clock for push in self.gathering.pushes.values())

    @property
    def has_updates(self) -> bool:
        """Whether a push was received that the chunk does not contain yet."""
        return bool(self.pushes or self.gathering.pushes)

    @property
    def has_waiting(self) -> bool:
        """Whether a push or a reply waits here for groups to come or go."""
        return bool(self.parked or self.pushes or self.gathering.pushes)

    # -- for tests -----------------------------------------------------------------------------

    @property
    def num_slots_held(self) -> int:
        waiting = sum(push.slot is not None for queue in self.pushes.values() for push in queue)
        is_loading = self.loading is not None
        return waiting + (self.gathering.accumulator is not None) + is_loading

    def check_invariants(self) -> None:
        self.clock.check_invariants()
        if any(needed <= self.clock.min_done for needed in self.parked):
            raise InvariantError(f"chunk {self.index}: a reply is parked that is allowed")
        open_replies = [0, 0]
        for tokens in self._tokens.values():
            for token in tokens:
                open_replies[token.buffer] += 1
        if open_replies != self.open_replies:
            raise InvariantError(f"chunk {self.index}: open replies are miscounted")
        if self.loading is not None and self.target_buffer() is not None:
            raise InvariantError(f"chunk {self.index}: values wait to be set, and a buffer is free")
        gathered = self.gathering.pushes
        if any(self.clock.done[group] != self.clock.min_done for group in gathered):
            raise InvariantError(
                f"chunk {self.index}: groups {list(gathered)} were gathered for iteration "
                f"{self.clock.min_done}, the clock says {self.clock.done}"
            )
        is_this_round = self._turn_of == (self.clock.min_done, self.clock.limits.admissions)
        passed = [
            group
            for group in self.clock.missing()
            if is_this_round and group < self._turn and group not in gathered
        ]
        if passed:
            raise InvariantError(f"chunk {self.index}: groups {passed} have lost their turn")
        if sorted(self.waiting) != sorted(g for g in self.waiting if g in self.pushes):
            raise InvariantError(f"chunk {self.index}: a group waits that has no push")
