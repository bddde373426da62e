"""Which groups there are, and which of them are suspended or have left; pure.

The plan says who is in which group; a group takes part from its registration on. Every change is
an event in the history. A group is *active* from its registration to its leave; while it waits in
a collective it is suspended: it keeps its weight, and no group waits for it. Its leader sends its
messages. It stops (is suspended, leaves) only after exactly the updates that every chunk contains.
When one of its workers fails, the group is evicted, unless groups continue without failed workers
(``is_out``). Only the coordinator declares failures, each time with another *view number*
(``generation``). The last groups may be those of *substitutes*, which join only when the
coordinator admits them (psdist.servers.protocol.joins).

Longer than other modules: every change of a group's standing, and what it must not follow.

    membership = Membership(server=0, groups=((0, 1), (2,)))
    membership.join(worker_id(0), Register(group=0, workers=[0, 1], clock=0))
    membership.suspend(worker_id(0), Suspend(group=0, clock=0, seq=1), num_chunks=8)    # True
    membership.resume(1)                                                                # [0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import eq
from typing import NoReturn, TypeAlias

from psdist.errors import InvariantError, PeerLostError, ProtocolError
from psdist.protocol.control import Evict, Leave, Register, Suspend
from psdist.protocol.events import PeerLost
from psdist.protocol.header import NEVER
from psdist.protocol.ids import (
    COORDINATOR,
    describe_peer,
    describe_workers,
    is_worker,
    worker_id,
    worker_of,
)
from psdist.servers.protocol.chunk_clock import DEAD, Limits

Agrees: TypeAlias = Callable[[int, int], bool]
"""True if the updates that chunks contain (first) agree with those that a group pushed (second)."""
IsOut: TypeAlias = Callable[[Iterable[bool]], bool]
"""Whether a group is evicted. Takes for each of its workers whether it has failed. ``any``, or
``all`` if groups continue without failed workers."""


class GroupState(Enum):
    """State of a group, in words that follow "group 3"."""

    UNREGISTERED = "has not registered"
    WAITING = "waits until the coordinator admits it"
    ACTIVE = "is active"
    SUSPENDED = "is suspended"
    LEFT = "has left"
    DEAD = "has failed"


_NOT_REGISTERED = (GroupState.UNREGISTERED, GroupState.WAITING)


class Membership:
    def __init__(
        self,
        *,
        server: int,
        groups: Sequence[tuple[int, ...]],
        first: Sequence[int] = (),
        resumed_up_to: int = 0,
        survives_workers: bool = False,
        num_substitutes: int = 0,
        is_out: IsOut = any,
    ) -> None:
        """``groups``: the workers of each group, its leader first; every worker is in one;
        ``num_substitutes``: the number of groups, the last ones, that have one substitute each;
        ``first``: where the groups' clocks begin, nothing for 0; ``resumed_up_to``: collectives
        that were over before; ``survives_workers``: the coordinator decides what follows from the
        failure of a worker, which otherwise is an error."""
        self._server = server
        self._survives_workers = survives_workers
        self._is_out = is_out
        self._planned = tuple(groups)
        self._groups = list(groups)
        """By group: its workers that have not failed, or all workers of a group that is out."""
        self.group_of = {
            worker_id(worker): group for group, workers in enumerate(groups) for worker in workers
        }
        """Peer -> group, for all workers of the run."""
        self.limits = Limits(first or [0] * len(groups))
        self.pushing: set[int] = set()
        """The workers of groups that count; only these push new updates."""
        self._standing = [GroupState.UNREGISTERED] * (len(groups) - num_substitutes)
        self._standing += [GroupState.WAITING] * num_substitutes
        self._suspended: set[int] = set()
        self.resumed_up_to = resumed_up_to
        self.num_active_workers = 0
        """Workers in groups that have not left: the denominator of a group's weight."""
        self.num_active_groups = 0
        """Groups that have not left."""
        self.generation = 0
        """Number of the membership view: one more after each failure."""
        self.dead: frozenset[int] = frozenset()
        """Peers of groups that are out."""
        self.dead_workers: tuple[int, ...] = ()
        """The workers that the coordinator has evicted."""
        self.chief = worker_id(0)
        """The first worker of the groups that are not out."""
        self._lost: dict[int, list[int]] = {}
        """By group that continues: its failed workers; see :meth:`take_lost`."""
        self._is_of_dead = False
        """True if this server replaces a failed one: messages to that one may be repeated."""

    def take_over(
        self,
        standings: Sequence[GroupState],
        stops: Sequence[int],
        clocks: Iterable[Sequence[int]],
        *,
        resumed_up_to: int,
        first: Sequence[int],
        generation: int = 0,
        dead: Iterable[int] = (),
    ) -> None:
        """Continue from the state of a failed server. ``standings``: of the groups; ``stops``:
        iterations of each group that does not count; ``clocks``: by chunk, iterations of each
        group that it contains; ``first``: where each group begins; ``dead``: workers that had
        failed by this ``generation``."""
        self._is_of_dead = True
        for group, begin in enumerate(first):
            if begin != self.limits.first[group]:
                self.limits.begin(group, begin)
        self.resumed_up_to = resumed_up_to
        self.generation = generation
        self._shrink(dead, self._take_out(dead))
        for done in clocks:
            for group, clock in enumerate(done):
                self.limits.contained[group] += clock - first[group]
        for group, standing in enumerate(standings):
            self._standing[group] = standing
            if standing in _NOT_REGISTERED:
                continue
            self.limits.count(group)
            if standing is GroupState.DEAD:
                self.limits.evict(group)
                continue
            if standing is not GroupState.LEFT:
                self._count_in(group)
            if standing is GroupState.ACTIVE:
                self._let_push(group)
            else:
                self.limits.stop(group, stops[group])
            if standing is GroupState.SUSPENDED:
                self._suspended.add(group)
        self._choose_chief()

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def join(self, peer: int, message: Register) -> None:
        group = message.group
        self._require_leader(peer, group, "registered")
        if tuple(message.workers) != self._groups[group]:
            self._refuse(
                peer,
                f"registered group {group} with {len(message.workers)} workers that are not those "
                f"of the plan, {describe_workers(self._groups[group])}",
            )
        if message.clock != self.limits.first[group]:
            self._refuse(
                peer,
                f"registered group {group} at clock {message.clock}, not at "
                f"{self.limits.first[group]}",
            )
        if self._standing[group] is not GroupState.UNREGISTERED:
            self._refuse(peer, f"registered group {group}, which {self._standing[group].value}")
        self._standing[group] = GroupState.ACTIVE
        self._let_push(group)
        self._count_in(group)

    def admit(self, worker: int, clock: int) -> int | None:
        """The group of a substitute, which begins at ``clock``; every chunk is to be told
        (:meth:`ChunkClock.begin`) before it counts. None if a failed server had received it."""
        group = self.group_of.get(worker_id(worker))
        if group is not None and self._is_of_dead and self._standing[group] not in _NOT_REGISTERED:
            return None
        if group is None or self._standing[group] is not GroupState.WAITING or clock < 0:
            waiting = [at for at, each in enumerate(self._standing) if each is GroupState.WAITING]
            self._refuse(
                COORDINATOR,
                f"admitted worker {worker} at clock {clock}; it admits the workers of groups that "
                f"wait, now {waiting[:8]}, each of them once",
            )
        self.limits.begin(group, clock)
        self._standing[group] = GroupState.ACTIVE
        self._let_push(group)
        self._count_in(group)
        self._choose_chief()
        return group

    def _count_in(self, group: int) -> None:
        self.num_active_workers += len(self._groups[group])
        self.num_active_groups += 1

    def _count_out(self, group: int) -> None:
        self.num_active_workers -= len(self._groups[group])
        self.num_active_groups -= 1

    def require_worker(self, peer: int) -> int:
        """The group of ``peer``, a worker of this run."""
        group = self.group_of.get(peer)
        if group is None:
            self._refuse(peer, "sent what workers of this run send but is not one of them")
        return group

    def require_pushing(self, peer: int) -> None:
        """``peer`` is a worker of a group that counts."""
        if peer not in self.pushing:
            group = self.require_worker(peer)
            self._refuse(peer, f"pushed, but group {group} {self._standing[group].value}")

    def require_registered(self, peer: int) -> None:
        """``peer`` is a worker of a group that counts, or did: messages of its leader may
        overtake earlier messages of another worker of the group. After a takeover any worker may
        repeat what it sent to the failed server."""
        group = self.require_worker(peer)
        if self._standing[group] in _NOT_REGISTERED and not self._is_of_dead:
            self._refuse(peer, f"told its settings, but group {group} has not registered")

    def num_workers_of(self, group: int) -> int:
        return len(self._groups[group])

    def suspend(
        self, peer: int, message: Suspend, *, num_chunks: int | None, has_all: Agrees = eq
    ) -> bool:
        """Return False if the collective has ended: its Resume, the coordinator's, came first.
        ``num_chunks``: None before there are chunks; ``has_all(contained, expected)``: True if the
        chunks contain the updates that the group pushed."""
        group = message.group
        self._require_leader(peer, group, "suspended")
        if message.seq <= self.resumed_up_to:
            return False  # and other workers of the group may have pushed again
        if self._is_repeated(group, GroupState.SUSPENDED, GroupState.LEFT):
            return False
        self._require_stop(peer, group, message.clock, num_chunks, has_all, "suspended")
        self._standing[group] = GroupState.SUSPENDED
        self._suspended.add(group)
        self._stop(group, message.clock)
        return True

    def _is_repeated(self, group: int, *standings: GroupState) -> bool:
        """Return True if the group stands where a message would bring it, because its failed leader
        had sent the message before, or a failed server had received it."""
        has_lost = self._groups[group] != self._planned[group]
        return (has_lost or self._is_of_dead) and self._standing[group] in standings

    def has_ended(self, seq: int) -> bool:
        """Return True if a failed server had received the end of collective ``seq``."""
        return self._is_of_dead and seq == self.resumed_up_to

    def resume(self, seq: int) -> list[int]:
        """Collective ``seq`` has ended: return the groups that waited in it, ascending."""
        if seq != self.resumed_up_to + 1:
            self._refuse(
                COORDINATOR, f"resumed collective {seq} after collective {self.resumed_up_to}"
            )
        self.resumed_up_to = seq
        resumed = sorted(self._suspended)
        self._suspended.clear()
        for group in resumed:
            self._standing[group] = GroupState.ACTIVE
            self._let_push(group)
        return resumed

    def leave(
        self, peer: int, message: Leave, *, num_chunks: int | None, has_all: Agrees = eq
    ) -> bool:
        """Return False if a failed server had received it."""
        group = message.group
        self._require_leader(peer, group, "took leave of")
        if self._is_repeated(group, GroupState.LEFT):
            return False
        self._require_stop(peer, group, message.clock, num_chunks, has_all, "took leave of")
        self._standing[group] = GroupState.LEFT
        self._stop(group, message.clock)
        self._count_out(group)
        return True

    def lose(self, lost: PeerLost) -> None:
        """Raise :class:`PeerLostError` if the job does not survive this failure."""
        if not self._survives_workers or not is_worker(lost.peer):
            raise PeerLostError(lost.who)

    def evict(self, peer: int, message: Evict) -> dict[int, bool] | None:
        """Return the groups that are evicted now and had not left, ascending, and whether each had
        registered; None for a repeated view number. :meth:`take_lost` names the failed workers of
        groups that continue."""
        if peer != COORDINATOR:
            self._refuse(peer, f"sent Evict; {describe_peer(COORDINATOR)} decides who is evicted")
        if message.generation <= self.generation:
            return None
        if any(worker_id(worker) not in self.group_of for worker in message.dead):
            self._refuse(
                peer, f"evicted {describe_workers(message.dead)}, which are not all in this run"
            )
        self.generation = message.generation
        before = self.dead_workers
        out = self._take_out(message.dead)
        self._shrink([each for each in message.dead if each not in before], out)
        evicted: dict[int, bool] = {}
        for group in out:
            standing = self._standing[group]
            if standing in (GroupState.LEFT, GroupState.DEAD):
                continue
            self._standing[group] = GroupState.DEAD
            self._suspended.discard(group)
            self.limits.evict(group)
            self.pushing.difference_update(self.peers_of(group))
            evicted[group] = standing not in _NOT_REGISTERED
            if evicted[group]:
                self._count_out(group)
        return evicted

    def _take_out(self, dead: Iterable[int]) -> list[int]:
        """The groups of these workers, ascending, whose peers say nothing that counts any more."""
        self.dead_workers = tuple(dead)
        lost = set(self.dead_workers)
        hit = sorted({self.group_of[worker_id(worker)] for worker in lost})
        out = [group for group in hit if self._is_out(each in lost for each in self._groups[group])]
        peers = {worker_id(worker) for group in out for worker in self._groups[group]}
        self.dead = frozenset(peers | set(map(worker_id, lost)))
        self._choose_chief()
        return out

    def _shrink(self, lost: Iterable[int], out: Sequence[int]) -> None:
        """These workers have failed; their groups continue without them, except the groups
        ``out``."""
        for worker in lost:
            group = self.group_of[worker_id(worker)]
            if group in out:
                continue
            self._groups[group] = tuple(each for each in self._groups[group] if each != worker)
            self.pushing.discard(worker_id(worker))
            if self._standing[group] in (GroupState.ACTIVE, GroupState.SUSPENDED):
                self.num_active_workers -= 1
                self._lost.setdefault(group, []).append(worker)

    def take_lost(self) -> dict[int, list[int]]:
        """Return by group that continues, ascending: its failed workers since the last call."""
        lost, self._lost = dict(sorted(self._lost.items())), {}
        return lost

    def _choose_chief(self) -> None:
        waiting = {
            peer
            for peer, group in self.group_of.items()
            if self._standing[group] is GroupState.WAITING
        }
        self.chief = min(self.group_of.keys() - self.dead - waiting, default=self.chief)

    @property
    def standings(self) -> tuple[GroupState, ...]:
        """By group."""
        return tuple(self._standing)

    @property
    def stops(self) -> list[int]:
        """By group: after how many of its iterations it has stopped, where it does not count; for
        others where its clock begins."""
        limits = zip(self.limits.of, self.limits.first, strict=True)
        return [first if limit in (NEVER, DEAD) else limit for limit, first in limits]

    def is_dead(self, group: int) -> bool:
        """Return True if the group failed before it left."""
        return self._standing[group] is GroupState.DEAD

    def peers_of(self, group: int) -> set[int]:
        """Its workers."""
        return set(map(worker_id, self._groups[group]))

    def _let_push(self, group: int) -> None:
        self.pushing.update(map(worker_id, self._groups[group]))

    def _stop(self, group: int, clock: int) -> None:
        self.limits.stop(group, clock)
        self.pushing.difference_update(map(worker_id, self._groups[group]))

    def _require_leader(self, peer: int, group: int, verb: str) -> None:
        if not 0 <= group < len(self._groups):
            self._refuse(peer, f"{verb} group {group}; this run has {len(self._groups)} groups")
        leader = self._groups[group][0]
        if not is_worker(peer) or worker_of(peer) != leader:
            self._refuse(peer, f"{verb} group {group}, for which worker {leader} speaks")

    def _require_stop(
        self,
        peer: int,
        group: int,
        clock: int,
        num_chunks: int | None,
        has_all: Agrees,
        verb: str,
    ) -> None:
        self._require_leader(peer, group, verb)
        standing = self._standing[group]
        if standing is not GroupState.ACTIVE:
            self._refuse(peer, f"{verb} group {group}, which {standing.value}")
        contained, new = self.limits.contained[group], clock - self.limits.first[group]
        expected = new * (num_chunks or 0)
        if new < 0 or not has_all(contained, expected) or (new and num_chunks is None):
            self._refuse(
                peer,
                f"{verb} group {group} after {clock} iterations; the {num_chunks or 0} chunks here "
                f"contain {contained} updates of it"
                + (f" from iteration {clock - new} on" if clock != new else ""),
            )

    def _refuse(self, peer: int, why: str) -> NoReturn:
        raise ProtocolError(f"server {self._server}: {describe_peer(peer)} {why}")

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. Linear in the groups."""
        self.limits.check_invariants()
        for group, standing in enumerate(self._standing):
            counts = self.limits.counts(group)
            may_push = {worker_id(worker) in self.pushing for worker in self._groups[group]}
            if counts != (standing is GroupState.ACTIVE) or may_push != {counts}:
                raise InvariantError(
                    f"group {group} {standing.value}; counts: {counts}; may push: {may_push}"
                )
            if (standing is GroupState.SUSPENDED) != (group in self._suspended):
                raise InvariantError(
                    f"group {group} {standing.value}, suspended: {self._suspended}"
                )
