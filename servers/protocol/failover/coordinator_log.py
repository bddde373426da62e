"""The coordinator's log, which lets another server replace a failed coordinator; pure.

The coordinator decides by the messages it gets, in their order. A rank with the same machine and
the same messages has the same state. So the coordinator appends each message to a log on its
*standby*, the replica of server 0. Actions that follow from an entry leave when the standby has
stored it. When the coordinator fails, the standby continues: ranks repeat the messages that it
lacks, and it repeats those that they lack (psdist.servers.protocol.failover.lines).

    log = CoordinatorLog(coordinator, standby=server_id(1), num_workers=2, num_servers=2)
    log.handle(worker_id(0), enter)                 # server 0: [SendControl(1, Append(...))]
    log.handle(server_id(1), AppendAck(number=1))   # the actions that follow

    standby = CoordinatorLog(same_coordinator, ..., is_active=False)             # server 1
    standby.note(append)
    standby.succeed("server 0 (rank 0 on n1)", lost={})

After either of them fails there is no standby, and actions take effect immediately, until another
rank has a complete replica of the shard of server 0. Every rank receives a message that nominates
that rank. When all have received it, the nominee gets a snapshot of the coordinator and each entry
after it. From then on the nominee is the standby.

    log.handle(worker_id(1), Ack(count=3))    # [InstallAll(standby=..., state=...)]
    third.from_snapshot(state)                         # there

The coordinator also writes files and output. Each entry contains the number of entries whose
actions are done. After a failover the standby does the rest, part of it perhaps a second time.

When the job is complete, the standby is stopped last, when all other ranks have confirmed. A worker
that is out of the job has confirmed, or its process has ended. If the coordinator fails before
that, the standby stops them all. (After a failover the server in the coordinator's process is
stopped last as well, because the process ends with it.)

Longer than other modules: both sides of the log are in one place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import msgpack

from psdist.controller.snapshots import Fields, HasSnapshot, Nested
from psdist.errors import ProtocolError, PsdistError
from psdist.protocol.control import (
    Ack,
    Append,
    AppendAck,
    Control,
    Failure,
    LeaderChanged,
    Nominate,
    Rejoined,
    SaidByCoordinator,
    StandbyAck,
    TakenOver,
    TakePlace,
    WhoIsAbsent,
    decode_control,
    encode_control,
)
from psdist.protocol.coordinator_line import TOLD_EVERY
from psdist.protocol.ids import (
    COORDINATOR,
    describe_peer,
    is_spare,
    is_worker,
    server_id,
    spare_id,
    spare_of,
    worker_id,
    worker_of,
)
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.coordinator import Complete, Coordinator, CoordinatorAction
from psdist.servers.protocol.failover.lines import Lines
from psdist.servers.protocol.takeovers import Move, ShardWhole


@dataclass(frozen=True, slots=True)
class Over:
    """The coordinator has ended, and no rank waits for it."""


@dataclass(frozen=True, slots=True)
class InstallAll:
    """Send ``standby`` the coordinator's snapshot, as of log entry ``number``."""

    standby: int
    number: int
    state: bytes


@dataclass(frozen=True, slots=True)
class StandbyInstalled:
    """For users: ``standby`` has the coordinator's snapshot, and is its standby from now on."""

    standby: int


LogAction: TypeAlias = CoordinatorAction


SNAPSHOT_VERSION: Final = 1


class CoordinatorLog(HasSnapshot):
    STATE = Fields(
        {
            int | None: "standby _nominee",
            int: "coordinator_at _number _num_done",
            set[int]: "_unused _dead",
            dict[int, int]: "_now",
            list[Move]: "moves",
            bool: "_is_shard_lost",
            Nested: "_lines coordinator",
        }
    )
    LAST: Final[type] = Over
    """The action after which the coordinator ends."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        standby: int,
        num_workers: int,
        num_servers: int,
        num_spares: int = 0,
        num_substitutes: int = 0,
        is_active: bool = True,
    ) -> None:
        """``standby``: its stable id; ``is_active``: False on the standby; ``num_substitutes``: as
        in the assembly."""
        self.coordinator = coordinator
        self.standby: int | None = standby
        self._nominee: int | None = None
        """The nominee, while there is no standby."""
        self.coordinator_at = COORDINATOR
        """Id of the server whose process runs the coordinator."""
        self._is_active = is_active
        self._peers = [
            *(server_id(server) for server in range(num_servers) if server != COORDINATOR),
            *map(worker_id, range(num_workers)),
            *map(spare_id, range(num_spares)),
        ]
        self._first_substitute = num_workers - num_substitutes
        self._unused = set[int]()
        """Unused ids. A spare has a spare id and a worker id; only one is in use."""
        if num_spares and num_substitutes:
            self._unused |= {worker_id(self._first_substitute + each) for each in range(num_spares)}
        self._now: dict[int, int] = {}
        """By former id of a process that has become a worker: its id now."""
        self._lines = Lines()
        self._number = 0
        """Number of the last log entry."""
        self._num_done = 0
        """Number of entries whose actions are done, as far as this rank can tell."""
        self._pending: deque[tuple[int, list[LogAction]]] = deque()
        """Actions that follow from later entries, by entry."""
        self._dead: set[int] = set()
        self.moves: list[Move] = []
        """All moves of shards so far."""
        self.is_complete = False
        self._awaited: list[int] = []
        """Ranks that must confirm the end, or have ended, before the standby is told."""
        self._last: list[SendControl] = []
        self._is_over = False
        self._is_shard_lost = False
        """True if server 0 has failed and its place is about to be taken."""
        self._error: PsdistError | None = None
        """Error that an entry has led to. The coordinator reports it and ends the job."""

    def to_snapshot(self) -> bytes:
        """Return all that the next standby needs, while nothing is pending."""
        assert not self._pending
        assert not self.is_complete
        data: bytes = msgpack.packb([SNAPSHOT_VERSION, super().to_snapshot()])
        return data

    def from_snapshot(self, data: bytes) -> None:
        """Become the next standby, with the state of :class:`InstallAll`. Raises
        :class:`ProtocolError` if it is of another version or damaged."""
        try:
            version, state = msgpack.unpackb(data)
            if version != SNAPSHOT_VERSION:
                raise ValueError(f"of version {version}; this psdist reads {SNAPSHOT_VERSION}")
            super().from_snapshot(state)
        except (ValueError, TypeError, msgpack.UnpackException, ProtocolError) as error:
            raise ProtocolError(
                f"the coordinator's snapshot is damaged, or of another psdist: {error}; run the "
                "same psdist on all ranks"
            ) from error

    # -- as the coordinator ----------------------------------------------------------------------

    def handle(self, peer: int, message: Control) -> list[LogAction]:
        """As :meth:`Coordinator.handle`: return the actions to execute now."""
        if isinstance(message, Failure | WhoIsAbsent):  # these change nothing
            return [*self.coordinator.handle(peer, message)]
        if isinstance(message, AppendAck):
            return self._on_noted_too(peer, message.number)
        if isinstance(message, Rejoined):
            again = self._lines.on_follows(self._now.get(peer, peer), message.received)
            again_said = [SendControl(peer, each) for each in again]
            return [*again_said, *self._end(), *self._install()]
        return self._take(peer, message)

    def on_lost(self, peer: int, who: str) -> list[LogAction]:
        """Handle the failure of ``peer``, which the network has noticed. Raises
        :class:`PeerLostError` or :class:`ServersLostError` if the job needs it to continue."""
        if peer in self._dead:
            return []
        if peer != self.standby:
            return self._take(peer, None, who)
        freed = self._let_go(self._number)
        actions = [each for each in freed if not isinstance(each, StandbyInstalled)]
        self.standby = None
        self._last = [each for each in self._last if each.peer != peer]
        return [*actions, *self._take(peer, None, who)]

    on_server_lost = on_lost

    def know_sizes(self, sizes: list[int]) -> list[LogAction]:
        """As :meth:`Coordinator.know_sizes`. The standby computes the sizes itself: no entry."""
        return self.coordinator.know_sizes(sizes)

    def _take(self, peer: int, message: Control | None, who: str = "") -> list[LogAction]:
        """Append ``message`` of ``peer``, or without a message its failure, to the log."""
        self._number += 1
        self._pending.append((self._number, self._follows_from(peer, message, who)))
        if self.standby is None:
            return [*self._let_go(self._number), *self._install()]
        note = Append(
            number=self._number,
            peer=peer,
            message=b"" if message is None else encode_control(message),
            who=who,
            done=self._num_done,
        )
        return [SendControl(self.standby, note)]

    def _install(self) -> list[LogAction]:
        """Send the nominee the snapshot, if all ranks have received the nomination. It has by then
        a replica of the shard of server 0. Later actions wait for its acknowledgements."""
        standby = self._nominee
        if standby is None or self.is_complete or not self._lines.has_received_wanted(self._spoken):
            return []
        self.standby, self._nominee = standby, None
        self._number += 1
        state = self.to_snapshot()
        self._pending.append((self._number, [StandbyInstalled(standby)]))
        return [InstallAll(standby, self._number, state)]

    @property
    def _spoken(self) -> list[int]:
        """Ids of all ranks that have a line, also of failed ones."""
        return [each for each in self._peers if each not in self._unused]

    def _on_noted_too(self, peer: int, number: int) -> list[LogAction]:
        standby = self.standby
        if standby is None or peer != standby or not self._num_done < number <= self._number:
            who = "there is no standby, which" if standby is None else describe_peer(standby)
            raise ProtocolError(
                f"the coordinator: {describe_peer(peer)} acknowledged {number} log entries; {who} "
                f"was sent {self._number} and has acknowledged {self._num_done}"
            )
        return self._let_go(number)

    def _let_go(self, number: int) -> list[LogAction]:
        """Return the actions that follow from entries up to ``number``."""
        actions: list[LogAction] = []
        while self._pending and self._pending[0][0] <= number:
            self._num_done, free = self._pending.popleft()
            actions += free
        return [each for each in actions if self._leaves(each)]

    def _leaves(self, action: LogAction) -> bool:
        """False for a message to a rank that has not rejoined: its line keeps the message. False
        also for server 0 while its shard is lost: the coordinator repeats the message later."""
        if not isinstance(action, SendControl):
            return True
        if action.peer == COORDINATOR:
            return not self._is_shard_lost
        peer = self._now.get(action.peer, action.peer)
        return self._lines.is_open(peer) or isinstance(action.message, LeaderChanged)

    # -- what follows from an entry, on both ---------------------------------------------------

    def _follows_from(self, peer: int, message: Control | None, who: str) -> list[LogAction]:
        if message is None:
            return self._on_death(peer, who)
        if isinstance(message, Ack):
            self._lines.on_received(self._now.get(peer, peer), message.count)
            return self._end()
        num_heard = self._lines.hear(peer) if peer != COORDINATOR else 0
        if self.is_complete:
            return []
        taken = message.server if isinstance(message, TakenOver) else COORDINATOR
        if isinstance(message, TakenOver) and taken == COORDINATOR:
            self._is_shard_lost = False
        if taken != COORDINATOR:
            self._lines.reset(server_id(taken))
        actions = self._said(self.coordinator.handle(peer, message))
        if taken != COORDINATOR and not self._lines.is_open(server_id(taken)):
            succeeds = LeaderChanged(heard=0, is_over=False, host=self.coordinator_at)
            actions.append(SendControl(server_id(taken), succeeds))
        if taken != COORDINATOR and self._nominee is not None:
            actions += self._nominate(self._nominee, [server_id(taken)])
        if num_heard and not num_heard % TOLD_EVERY:
            actions.append(SendControl(peer, StandbyAck(count=num_heard)))
        return actions

    def _on_death(self, peer: int, who: str) -> list[LogAction]:
        self._dead.add(peer)
        self._lines.lose(peer)
        if peer == self._nominee:
            self._nominee = None
        if self.is_complete:
            return self._end()
        coordinator = self.coordinator
        lost = coordinator.on_lost if is_worker(peer) else coordinator.on_server_lost
        return self._said(lost(peer, who))

    def _said(self, actions: Iterable[CoordinatorAction]) -> list[LogAction]:
        """Store the messages of ``actions`` on their lines. Add nominations, or order the end."""
        actions = list(actions)
        if any(isinstance(each, Complete) for each in actions):
            return self._complete(actions)
        for each in actions:
            if isinstance(each, SendControl):
                self._say(each)
            elif isinstance(each, Move):
                self.moves.append(each)
        whole = [each for each in actions if isinstance(each, ShardWhole)]
        nominees = [each.keeper for each in whole if each.server == COORDINATOR]
        said = [each for keeper in nominees for each in self._nominate(keeper, self._spoken)]
        return [*actions, *said]

    def _nominate(self, keeper: int, peers: Iterable[int]) -> list[SendControl]:
        """Nominate the process with a new replica of the shard of server 0."""
        self._nominee = keeper
        # The nominee first, so that it has its role before other ranks contact it.
        in_order = sorted(peers, key=lambda peer: peer != keeper)
        said = [SendControl(peer, Nominate(deputy=keeper)) for peer in in_order]
        for each in said:
            self._say(each)
            self._lines.want(each.peer)
        return said

    def _say(self, action: SendControl) -> None:
        if action.peer != COORDINATOR and isinstance(action.message, SaidByCoordinator):
            self._lines.say(action.peer, action.message)
        if isinstance(action.message, TakePlace) and is_spare(action.peer):
            self._rename(action.peer)

    def _rename(self, spare: int) -> None:
        """The spare becomes a worker and keeps its line."""
        worker = worker_id(self._first_substitute + spare_of(spare))
        self._lines.rename(spare, worker)
        self._now[spare] = worker
        self._unused ^= {spare, worker}

    def _complete(self, actions: list[CoordinatorAction]) -> list[LogAction]:
        """Report first: a rank that is stopped may end."""
        self.is_complete = True
        told = [each for each in actions if not isinstance(each, SendControl)]
        stops = [each for each in actions if isinstance(each, SendControl)]
        last = self.standby, self.coordinator_at
        self._last = [each for each in stops if each.peer in last]
        stops = [each for each in stops if each.peer not in last]
        for each in stops:
            self._say(each)
        left_out = map(worker_id, sorted(self.coordinator.membership.out))
        self._awaited = [*(each.peer for each in stops), *left_out]
        return [*told, *stops, *self._end()]

    def _end(self) -> list[LogAction]:
        """End if all other ranks have confirmed the end of the job, or have ended."""
        if not self.is_complete or self._is_over:
            return []
        lines = self._lines
        knows = lines.has_told_all if self.standby is None else lines.has_received_all
        if not knows(self._awaited):
            return []
        self._is_over = True
        for each in self._last:
            self._say(each)
        return [*self._last, Over()]

    # -- as the standby -------------------------------------------------------------------------

    def note(self, note: Append) -> list[LogAction]:
        """Store an entry. Return the actions for files and users that the coordinator has done."""
        if self._is_active or note.number != self._number + 1 or note.done > self._number:
            raise ProtocolError(
                f"the coordinator's standby: log entry {note.number}, of which {note.done} are "
                f"done, after entry {self._number}"
            )
        self._number = note.number
        follows: list[LogAction] = []
        if self._error is None:
            message = decode_control(note.message) if note.message else None
            try:
                follows = self._follows_from(note.peer, message, note.who)
            except PsdistError as error:
                self._error = error
        for_people: list[LogAction] = [
            each for each in follows if not isinstance(each, SendControl | Move | Over)
        ]
        self._pending.append((note.number, for_people))
        done: list[LogAction] = []
        while self._pending and self._pending[0][0] <= note.done:
            self._num_done, known = self._pending.popleft()
            done += known
        return done

    def announcements(self) -> list[SendControl]:
        """Return what the standby sends every rank, under its own id, after a failover."""
        return [
            SendControl(peer, self._succeeds(peer))
            for peer in self._spoken
            if (
                peer not in self._dead or any(server_id(each.server) == peer for each in self.moves)
            )
        ]

    def _succeeds(self, peer: int) -> LeaderChanged:
        """Return the message for ``peer``. For a worker that is out it contains the view, which no
        other rank sends it."""
        host = self.coordinator_at if self.standby is None else self.standby
        num_heard = self._lines.num_heard(peer)
        succeeds = LeaderChanged(heard=num_heard, is_over=self.is_complete, host=host)
        is_left_out = is_worker(peer) and worker_of(peer) in self.coordinator.membership.out
        if not (self.is_complete and is_left_out):
            return succeeds
        told = self.coordinator.membership.settled
        return replace(succeeds, generation=told.generation, dead=told.dead, chief=told.chief)

    def succeed(
        self, who: str, *, lost: Mapping[int, str]
    ) -> tuple[list[LogAction], list[LogAction]]:
        """Take over from the coordinator, described by ``who``. ``lost``: by id, other ranks that
        have failed. Return the actions for files and users that may not have been done, and the
        actions that follow."""
        if self._error is not None:
            raise self._error
        assert self.standby is not None
        died, self.coordinator_at = self.coordinator_at, self.standby
        self._is_active, self.standby, self._is_shard_lost = True, None, True
        self._lines.close()
        undone = [each for _, actions in self._pending for each in actions]
        self._pending.clear()
        self._num_done = self._number
        actions: list[LogAction] = []
        if not self.is_complete:
            for peer, name in {died: who, **lost}.items():
                actions += self.on_lost(peer, name)
        return undone, actions

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself."""
        self._lines.check_invariants()
