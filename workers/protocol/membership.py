"""How a worker and its group come into a parameter set and leave it: set-up, registration, leave.

The chief describes the set to every server and sends the initial values of every chunk. A group's
leader registers the group with every server, suspends it in collectives and takes its leave; the
other workers of the group send nothing of all this. For the whole job, with the first set's, every
worker reports when its script has finished, and waits for Stop. A substitute
joins the running job instead (psdist.workers.protocol.joining).

    membership = Membership(seat)
    membership.begin_register()           # a SendControl for every server
    membership.on_registered(server_id(0), Registered(group=0, server=0))
    membership.is_registered              # once every server has answered
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from psdist.errors import BuriedError, InvariantError, ProtocolError
from psdist.protocol.control import (
    Control,
    Done,
    JoinAccepted,
    Leave,
    MembershipChanged,
    Register,
    Registered,
    Regroup,
    Regrouped,
    Setup,
    Stop,
    Suspend,
    TakePlace,
)
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import (
    COORDINATOR,
    describe_peer,
    describe_workers,
    server_id,
    worker_id,
)
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import Action, SendControl, SendInitial, Warn


class Membership:
    def __init__(self, seat: Seat, *, set_index: int = 0) -> None:
        self._seat = seat
        self._set_index = set_index
        self._has_described = False
        self._initial: set[int] = set()
        """Chunks whose initial values the network still has."""
        self._has_asked = False
        self._registered: set[int] = set()
        """Servers that have answered."""
        self.welcome: JoinAccepted | None = None
        """The coordinator's message to a substitute that has joined."""
        self.place: int | None = seat.worker
        """The worker whose part of the data this one has; None of a substitute without a place."""
        self.is_outside = False
        """True for a substitute that has not joined."""
        self._suspended: Suspend | None = None
        """The last message of it."""
        self.has_left = False
        self._left: Leave | None = None
        """The message of the leave."""
        self.is_done = False
        """True after this worker has reported that its script has finished."""
        self.is_stopped = False
        """True after all scripts have finished and the job is complete."""
        self.generation = 0
        """View number: one more each time workers are evicted."""
        self.dead: frozenset[int] = frozenset()
        """Evicted workers."""
        self.chief = 0
        self.duplicates = 0

    # -- coming --------------------------------------------------------------------------------

    def begin_setup(
        self,
        setup: Setup,
        *,
        owners: Sequence[int],
        chunk_bytes: Sequence[int],
        dtypes: Sequence[int],
    ) -> list[Action]:
        """Describe the model to every server, as the chief, and send it its chunks' values, unless
        they are restored from a checkpoint."""
        if not self._seat.is_chief or self._has_described:
            raise InvariantError(
                f"worker {self._seat.worker} described the model; the chief does, once"
            )
        self._has_described = True
        sender = worker_id(self._seat.worker)
        actions = self._to_every_server(setup)
        if setup.restore:
            return actions
        for chunk, owner in enumerate(owners):
            header = Header(
                kind=Kind.INIT,
                sender=sender,
                chunk=chunk,
                length=chunk_bytes[chunk],
                dtype=dtypes[chunk],
                set_index=self._set_index,
            )
            actions.append(SendInitial(server_id(owner), header))
            self._initial.add(chunk)
        return actions

    def on_initial_sent(self, chunk: int) -> list[Action]:
        if chunk not in self._initial:
            raise InvariantError(f"initial values of chunk {chunk} came back, but were not sent")
        self._initial.remove(chunk)
        return []

    def begin_register(self, *, clock: int = 0) -> list[Action]:
        """A group's leader: from now on every server counts the group, from ``clock`` on."""
        if not self._seat.is_leader or self._has_asked:
            raise InvariantError(
                f"worker {self._seat.worker} registered group {self._seat.group}; its leader, "
                f"worker {self._seat.members[0]}, does, once"
            )
        self._has_asked = True
        members = list(self._seat.members)
        return self._to_every_server(Register(group=self._seat.group, workers=members, clock=clock))

    def on_registered(self, peer: int, message: Registered) -> list[Action]:
        is_ours = self._has_asked and message.group == self._seat.group
        is_known = message.server < self._seat.num_servers
        if not is_ours or not is_known or peer != server_id(message.server):
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} sent Registered for group "
                f"{message.group} as server {message.server}; "
                + (
                    f"this worker requested servers 0 to {self._seat.num_servers - 1} to register "
                    f"group {self._seat.group}"
                    if self._has_asked
                    else "this worker has requested none"
                )
            )
        if message.server in self._registered:
            self.duplicates += 1
        self._registered.add(message.server)
        return []

    @property
    def is_registered(self) -> bool:
        """Whether every server counts the group; known to its leader only."""
        return len(self._registered) == self._seat.num_servers

    @property
    def is_joining(self) -> bool:
        """Whether the network still has initial values, or servers owe answers to the
        registration."""
        return bool(self._initial) or (self._has_asked and not self.is_registered)

    def on_replace(self, peer: int, message: TakePlace) -> list[Action]:
        """The coordinator gives a substitute its place."""
        raise ProtocolError(
            f"worker {self._seat.worker}: {describe_peer(peer)} sent TakePlace of worker "
            f"{message.worker}; server {COORDINATOR} asks substitutes, once"
        )

    def begin_join(self, *, num_sets: int) -> list[Action]:
        """A substitute is ready to join the job; :attr:`welcome` when it has joined."""
        del num_sets
        raise InvariantError(
            f"worker {self._seat.worker} joined a running job; substitutes that are asked do, once"
        )

    def on_welcome(self, peer: int, message: JoinAccepted) -> bool:
        """A substitute has joined. Return False for a second delivery."""
        raise ProtocolError(
            f"worker {self._seat.worker}: {describe_peer(peer)} sent JoinAccepted of worker "
            f"{message.worker}; server {COORDINATOR} welcomes substitutes that have asked"
        )

    def take_in(self, welcome: JoinAccepted) -> None:
        """Every server counts the group of a substitute, in this set as well."""
        raise InvariantError(f"worker {self._seat.worker} is no substitute: {welcome}")

    @property
    def is_setting_up(self) -> bool:
        """True while servers wait for this worker's set-up."""
        return self.is_joining

    def describe(self) -> str:
        """Return what is awaited for the set-up or the end, "" for nothing."""
        if self.is_joining:
            return "the servers"
        return "the other workers to finish" if self.is_done and not self.is_stopped else ""

    def describe_joining(self) -> list[Action]:
        """Return warnings for a long wait: servers that have not answered."""
        warnings: list[Action] = []
        if self._has_asked and not self.is_registered:
            silent = set(range(self._seat.num_servers)) - self._registered
            names = ", ".join(str(server) for server in sorted(silent))
            warnings = [Warn(f"not registered yet with server {names}")]
        if self._initial:
            warnings.append(Warn(f"{len(self._initial)} chunks of initial values not taken yet"))
        return warnings

    # -- going ---------------------------------------------------------------------------------

    def suspend(self, *, clock: int, seq: int) -> list[Action]:
        """The group enters collective ``seq``: its leader reports it to the servers."""
        if not self._speaks_for_group:
            return []
        self._suspended = Suspend(group=self._seat.group, clock=clock, seq=seq)
        return self._to_every_server(self._suspended)

    def begin_leave(self, *, clock: int) -> list[Action]:
        """The group's script has finished after ``clock`` iterations: servers await no more."""
        if not self._speaks_for_group:
            return []
        self.has_left = True
        self._left = Leave(group=self._seat.group, clock=clock)
        return self._to_every_server(self._left)

    def say_again(self, server: int, *, waits_in: int) -> list[Action]:
        """Repeat to the process that has taken the place of ``server`` that the group has left, or
        waits in collective ``waits_in`` (0: in none): the failed one may not have received it."""
        peer, actions = server_id(server), list[Action]()
        if self._suspended is not None and self._suspended.seq == waits_in:
            actions.append(SendControl(peer, self._suspended, self._set_index))
        if self._left is not None:
            actions.append(SendControl(peer, self._left, self._set_index))
        return actions

    @property
    def _speaks_for_group(self) -> bool:
        return self.is_registered and not self.has_left

    @property
    def left_after(self) -> int | None:
        """Iterations of the group at its leave; None before this worker has reported a leave."""
        return None if self._left is None else self._left.clock

    def begin_done(self, statistics: dict[str, Any], *, left: list[int]) -> list[Action]:
        """This worker's script has finished; ``left``: see :class:`Done`."""
        if self.is_done:
            raise InvariantError(f"worker {self._seat.worker} was done twice")
        self.is_done = True
        done = Done(worker=self._seat.worker, statistics=statistics, left=left)
        return [SendControl(COORDINATOR, done)]

    @property
    def may_stop(self) -> bool:
        """True if the job may be complete without anything more of this worker."""
        return self.is_done

    def on_stop(self, peer: int, _message: Stop) -> list[Action]:
        if peer != COORDINATOR or not self.may_stop:
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} sent Stop"
                + (
                    f"; server {COORDINATOR} says when the job is complete"
                    if peer != COORDINATOR
                    else " before this worker's script had finished"
                )
            )
        self.duplicates += self.is_stopped
        self.is_stopped = True
        return []

    # -- failures ------------------------------------------------------------------------------

    def on_survive(self, peer: int, message: MembershipChanged) -> list[Action]:
        """Take in the evicted workers and the chief. Raises :class:`BuriedError` if this worker's
        group is evicted."""
        if peer != COORDINATOR:
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} sent MembershipChanged; server "
                f"{COORDINATOR} decides who is evicted"
            )
        if message.generation <= self.generation:
            self.duplicates += 1
            return []
        self.generation, self.dead = message.generation, frozenset(message.dead)
        self.chief = message.chief
        self.require_in_job()
        return []

    def speak_for_group(self, *, is_done: bool, waits_in: int, clock: int) -> list[Action]:
        """This worker has become the leader of its group. The failed leader may not have reported
        that the group waits in collective ``waits_in`` (0: in none), or that it is done. Servers
        accept the report twice."""
        self._has_asked = True
        self._registered.update(range(self._seat.num_servers))
        if is_done:
            return self.begin_leave(clock=clock)
        return self.suspend(clock=clock, seq=waits_in) if waits_in else []

    def require_in_job(self) -> None:
        """Raises :class:`BuriedError` if this worker's group is evicted: again if the script has
        caught the first one."""
        if self.dead and self.dead & self._seat.needed:
            gone = self.dead & set(self._seat.members)
            raise BuriedError(
                f"{describe_workers(gone)} of group {self._seat.group} has failed: worker "
                f"{self._seat.worker}, of the same group, ends, and the job continues without it"
            )

    def _to_every_server(self, message: Control) -> list[Action]:
        servers = range(self._seat.num_servers)
        return [SendControl(server_id(server), message, self._set_index) for server in servers]

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself."""
        seat = self._seat
        if self._registered and not self._has_asked:
            raise InvariantError(f"servers {self._registered} registered a group unasked")
        if self.has_left and not self.is_registered:
            raise InvariantError(f"group {seat.group} has left before it was registered")
        if self.is_stopped and not self.may_stop:
            raise InvariantError(f"worker {seat.worker} was stopped before it was done")


class Regrouping:
    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self.num_lost = 0
        """Failed workers of the group."""
        self._told = 0
        """Their number in the last report of this worker."""
        self._answer: list[bytes] | None = None

    @property
    def is_due(self) -> bool:
        """True if the group has lost workers since the last report of this worker."""
        return self._told < self.num_lost

    def lose(self, dead: Collection[int]) -> bool:
        """The coordinator has reported these failed workers. Return True if this worker has become
        the leader of its group, which continues without them."""
        if not self._seat.group_reforms:
            return False
        was_leader = self._seat.is_leader
        self.num_lost += self._seat.lose(dead)
        return self._seat.is_leader and not was_leader

    def tell(self, standing: bytes) -> list[Action]:
        """Send ``standing``, as :class:`Regroup` describes it."""
        message = Regroup(worker=self._seat.worker, num_lost=self.num_lost, standing=standing)
        self._told, self._answer = self.num_lost, None
        return [SendControl(COORDINATOR, message)]

    @property
    def answer(self) -> list[bytes] | None:
        """The standings of the remaining workers, by place; None while one of them is missing."""
        return None if self.is_due else self._answer

    def on_regrouped(self, peer: int, message: Regrouped) -> list[Action]:
        if peer != COORDINATOR or not 0 < message.num_lost <= self._told:
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} sent Regrouped of a group that "
                f"has lost {message.num_lost}; this worker has reported {self._told}"
            )
        if message.num_lost == self.num_lost:
            if len(message.standings) != len(self._seat.members):
                raise ProtocolError(
                    f"worker {self._seat.worker}: {describe_peer(peer)} sent Regrouped of "
                    f"{len(message.standings)} workers; {len(self._seat.members)} are left"
                )
            self._answer = message.standings
        return []
