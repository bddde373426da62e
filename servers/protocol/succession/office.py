"""The registrar's machine, with what lets another server go on in its place; pure.

The registrar decides by what it is told, in the order in which it is told: whoever has the same
machine and is told the same knows all that it knows. So it hands everything on to its *deputy*, the
buddy of server 0, as numbered notes, and what follows from a note, to whomever, leaves only when
the deputy has answered: then two ranks know it. When the registrar dies, the deputy's machine goes
on: ranks say again what it has not heard, and are told again what they have not received
(``lines``).

    office = Office(registrar, deputy=server_id(1), num_workers=2, num_servers=2)   # on server 0
    office.handle(worker_id(0), enter)          # [SendControl(1, Append(...))]
    office.handle(server_id(1), AppendAck(number=1))     # what follows from it

    second = Office(same_registrar, ..., is_active=False)                           # on server 1
    second.note(noted)                          # the same
    second.succeed("server 0 (rank 0 on n1)", lost={})

Behind the death of either there is no deputy, and what follows leaves at once, until another rank
has a whole copy of the shard of server 0. That one is *appointed*: everybody is told who it is.
When all have received it, it is *entrusted* with the snapshot of all that the registrar knows, and
is told every note behind that. From then on it is the deputy.

    office.handle(worker_id(1), ReceivedUpTo(count=3))  # [EntrustAll(deputy=..., state=...)]
    third.from_snapshot(state)                          # there

Files and words to people are the registrar's, too. It says with each note how far that is done; the
deputy does the rest when it succeeds, a part of it perhaps for the second time.

The end: when the job is complete all are stopped, the deputy last, when all others have told that
they know. Nor is a worker left that lives and is out: it has heard so, and its process has ended.
If the registrar dies before, the deputy stops them all. (Where the registrar has followed another
one, the server in whose process it is is last as well: it ends with that.)

Longer than other modules: what both sides do with a note stands in one place.
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
    Append,
    AppendAck,
    Control,
    Failure,
    HeardUpTo,
    LeaderChanged,
    Nominate,
    ReceivedUpTo,
    Rejoined,
    TakenOver,
    TakePlace,
    WhoIsAbsent,
    decode_control,
    encode_control,
)
from psdist.protocol.ids import (
    REGISTRAR,
    describe_peer,
    is_spare,
    is_worker,
    server_id,
    spare_id,
    spare_of,
    worker_id,
    worker_of,
)
from psdist.protocol.registrar_line import SAID_BY_REGISTRAR, TOLD_EVERY
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.coordinator import Complete, Coordinator, CoordinatorAction
from psdist.servers.protocol.succession.lines import Lines
from psdist.servers.protocol.takeovers import Move, ShardWhole


@dataclass(frozen=True, slots=True)
class Over:
    """The registrar's work is done, and nobody waits for it."""


@dataclass(frozen=True, slots=True)
class EntrustAll:
    """Tell ``deputy`` all that the registrar knows, as of note ``number``."""

    deputy: int
    number: int
    state: bytes


@dataclass(frozen=True, slots=True)
class Entrusted:
    """For people: ``deputy``, who knows what the registrar knows, is its deputy from now on."""

    deputy: int


OfficeAction: TypeAlias = CoordinatorAction


SNAPSHOT_VERSION: Final = 1


class Office(HasSnapshot):
    STATE = Fields(
        {
            int | None: "deputy _appointed",
            int: "registrar_at _number _num_done",
            set[int]: "_unused _dead",
            dict[int, int]: "_now",
            list[Move]: "moves",
            bool: "_is_shard_lost",
            Nested: "_lines registrar",
        }
    )
    LAST: Final[type] = Over
    """The action behind which the registrar ends."""

    def __init__(
        self,
        registrar: Coordinator,
        *,
        deputy: int,
        num_workers: int,
        num_servers: int,
        num_spares: int = 0,
        num_substitutes: int = 0,
        is_active: bool = True,
    ) -> None:
        """``deputy``: its stable id; ``is_active``: false there; ``num_substitutes``: as of the
        assembly."""
        self.registrar = registrar
        self.deputy: int | None = deputy
        self._appointed: int | None = None
        """Who is to be the next one, while there is none."""
        self.registrar_at = REGISTRAR
        """In whose process the registrar is."""
        self._is_active = is_active
        self._peers = [
            *(server_id(server) for server in range(num_servers) if server != REGISTRAR),
            *map(worker_id, range(num_workers)),
            *map(spare_id, range(num_spares)),
        ]
        self._first_substitute = num_workers - num_substitutes
        self._unused = set[int]()
        """Ids of spares, which have two, that are not spoken to now."""
        if num_spares and num_substitutes:
            self._unused |= {worker_id(self._first_substitute + each) for each in range(num_spares)}
        self._now: dict[int, int] = {}
        """Of those that have become workers: the id before -> the one since."""
        self._lines = Lines()
        self._number = 0
        """Of the last note."""
        self._num_done = 0
        """Notes of which all that follows has been done, or (of the deputy) is known to be."""
        self._pending: deque[tuple[int, list[OfficeAction]]] = deque()
        """What follows from the notes behind that."""
        self._dead: set[int] = set()
        self.moves: list[Move] = []
        """All that there were."""
        self.is_complete = False
        self._awaited: list[int] = []
        """Who must know that, or have ended, before the deputy is told:"""
        self._last: list[SendControl] = []
        self._is_over = False
        self._is_shard_lost = False
        """Whether server 0 has died, and its place is about to be taken."""
        self._error: PsdistError | None = None
        """What a note has led to: the end of the job, which is the registrar's to tell."""

    def to_snapshot(self) -> bytes:
        """Return all that the next deputy needs, while nothing is pending."""
        assert not self._pending
        assert not self.is_complete
        data: bytes = msgpack.packb([SNAPSHOT_VERSION, super().to_snapshot()])
        return data

    def from_snapshot(self, data: bytes) -> None:
        """Go on, as the next deputy, with what :class:`EntrustAll` has brought. Raises
        :class:`ProtocolError` if it is of another version or damaged."""
        try:
            version, state = msgpack.unpackb(data)
            if version != SNAPSHOT_VERSION:
                raise ValueError(f"of version {version}; this psdist reads {SNAPSHOT_VERSION}")
            super().from_snapshot(state)
        except (ValueError, TypeError, msgpack.UnpackException, ProtocolError) as error:
            raise ProtocolError(
                f"the registrar's snapshot is damaged, or of another psdist: {error}; run the same "
                "psdist on all ranks"
            ) from error

    # -- as the registrar ----------------------------------------------------------------------

    def handle(self, peer: int, message: Control) -> list[OfficeAction]:
        """As :meth:`Coordinator.handle`: what is to be done now."""
        if isinstance(message, Failure | WhoIsAbsent):  # these change nothing
            return [*self.registrar.handle(peer, message)]
        if isinstance(message, AppendAck):
            return self._on_noted_too(peer, message.number)
        if isinstance(message, Rejoined):
            again = self._lines.on_follows(self._now.get(peer, peer), message.received)
            again_said = [SendControl(peer, each) for each in again]
            return [*again_said, *self._end(), *self._entrust()]
        return self._take(peer, message)

    def on_lost(self, peer: int, who: str) -> list[OfficeAction]:
        """The network has told that ``peer`` is dead. Raises :class:`PeerLostError` or
        :class:`ServersLostError` where the job cannot go on without it."""
        if peer in self._dead:
            return []
        if peer != self.deputy:
            return self._take(peer, None, who)
        freed = self._let_go(self._number)
        actions = [each for each in freed if not isinstance(each, Entrusted)]
        self.deputy = None
        self._last = [each for each in self._last if each.peer != peer]
        return [*actions, *self._take(peer, None, who)]

    on_server_lost = on_lost

    def _take(self, peer: int, message: Control | None, who: str = "") -> list[OfficeAction]:
        """``message`` of ``peer``, or its death."""
        self._number += 1
        self._pending.append((self._number, self._follows_from(peer, message, who)))
        if self.deputy is None:
            return [*self._let_go(self._number), *self._entrust()]
        note = Append(
            number=self._number,
            peer=peer,
            message=b"" if message is None else encode_control(message),
            who=who,
            done=self._num_done,
        )
        return [SendControl(self.deputy, note)]

    def _entrust(self) -> list[OfficeAction]:
        """With everything, who is appointed, if all have received who that is. It holds a copy of
        the shard of server 0 by then; what follows from now on waits for it."""
        deputy = self._appointed
        if deputy is None or self.is_complete or not self._lines.has_received_wanted(self._spoken):
            return []
        self.deputy, self._appointed = deputy, None
        self._number += 1
        state = self.to_snapshot()
        self._pending.append((self._number, [Entrusted(deputy)]))
        return [EntrustAll(deputy, self._number, state)]

    @property
    def _spoken(self) -> list[int]:
        """Who has a line; also of the dead, which are not waited for."""
        return [each for each in self._peers if each not in self._unused]

    def _on_noted_too(self, peer: int, number: int) -> list[OfficeAction]:
        deputy = self.deputy
        if deputy is None or peer != deputy or not self._num_done < number <= self._number:
            who = "there is no deputy, which" if deputy is None else describe_peer(deputy)
            raise ProtocolError(
                f"the registrar: {describe_peer(peer)} says that it knows {number} notes; "
                f"{who} has been sent {self._number}, and knew {self._num_done}"
            )
        return self._let_go(number)

    def _let_go(self, number: int) -> list[OfficeAction]:
        """All that follows from notes up to this one."""
        actions: list[OfficeAction] = []
        while self._pending and self._pending[0][0] <= number:
            self._num_done, free = self._pending.popleft()
            actions += free
        return [each for each in actions if self._leaves(each)]

    def _leaves(self, action: OfficeAction) -> bool:
        """Not what is said to who does not know yet who the registrar is: it is kept until then.
        Nor to server 0 before its place is taken: it is asked again."""
        if not isinstance(action, SendControl):
            return True
        if action.peer == REGISTRAR:
            return not self._is_shard_lost
        peer = self._now.get(action.peer, action.peer)
        return self._lines.is_open(peer) or isinstance(action.message, LeaderChanged)

    # -- what follows from a note, on both -----------------------------------------------------

    def _follows_from(self, peer: int, message: Control | None, who: str) -> list[OfficeAction]:
        if message is None:
            return self._on_death(peer, who)
        if isinstance(message, ReceivedUpTo):
            self._lines.on_received(self._now.get(peer, peer), message.count)
            return self._end()
        num_heard = self._lines.hear(peer) if peer != REGISTRAR else 0
        if self.is_complete:
            return []
        taken = message.server if isinstance(message, TakenOver) else REGISTRAR
        if isinstance(message, TakenOver) and taken == REGISTRAR:
            self._is_shard_lost = False
        if taken != REGISTRAR:
            self._lines.reset(server_id(taken))
        actions = self._said(self.registrar.handle(peer, message))
        if taken != REGISTRAR and not self._lines.is_open(server_id(taken)):
            succeeds = LeaderChanged(heard=0, is_over=False, host=self.registrar_at)
            actions.append(SendControl(server_id(taken), succeeds))
        if taken != REGISTRAR and self._appointed is not None:
            actions += self._appoint(self._appointed, [server_id(taken)])
        if num_heard and not num_heard % TOLD_EVERY:
            actions.append(SendControl(peer, HeardUpTo(count=num_heard)))
        return actions

    def _on_death(self, peer: int, who: str) -> list[OfficeAction]:
        self._dead.add(peer)
        self._lines.lose(peer)
        if peer == self._appointed:
            self._appointed = None
        if self.is_complete:
            return self._end()
        registrar = self.registrar
        lost = registrar.on_lost if is_worker(peer) else registrar.on_server_lost
        return self._said(lost(peer, who))

    def _said(self, actions: Iterable[CoordinatorAction]) -> list[OfficeAction]:
        """``actions``, with what is said noted down, and the end in its order."""
        actions = list(actions)
        if any(isinstance(each, Complete) for each in actions):
            return self._complete(actions)
        for each in actions:
            if isinstance(each, SendControl):
                self._say(each)
            elif isinstance(each, Move):
                self.moves.append(each)
        whole = [each for each in actions if isinstance(each, ShardWhole)]
        appointed = [each.keeper for each in whole if each.server == REGISTRAR]
        said = [each for keeper in appointed for each in self._appoint(keeper, self._spoken)]
        return [*actions, *said]

    def _appoint(self, keeper: int, peers: Iterable[int]) -> list[SendControl]:
        """Who has another copy of the shard of server 0 is to be the deputy."""
        self._appointed = keeper
        # It first: who is named to others and does not know it would wait for the first of them.
        in_order = sorted(peers, key=lambda peer: peer != keeper)
        said = [SendControl(peer, Nominate(deputy=keeper)) for peer in in_order]
        for each in said:
            self._say(each)
            self._lines.want(each.peer)
        return said

    def _say(self, action: SendControl) -> None:
        if action.peer != REGISTRAR and isinstance(action.message, SAID_BY_REGISTRAR):
            self._lines.say(action.peer, action.message)
        if isinstance(action.message, TakePlace) and is_spare(action.peer):
            self._rename(action.peer)

    def _rename(self, spare: int) -> None:
        """It is a worker from here on, and its line goes on."""
        worker = worker_id(self._first_substitute + spare_of(spare))
        self._lines.rename(spare, worker)
        self._now[spare] = worker
        self._unused ^= {spare, worker}

    def _complete(self, actions: list[CoordinatorAction]) -> list[OfficeAction]:
        """What people are told first: whoever is stopped may end."""
        self.is_complete = True
        told = [each for each in actions if not isinstance(each, SendControl)]
        stops = [each for each in actions if isinstance(each, SendControl)]
        last = self.deputy, self.registrar_at
        self._last = [each for each in stops if each.peer in last]
        stops = [each for each in stops if each.peer not in last]
        for each in stops:
            self._say(each)
        left_out = map(worker_id, sorted(self.registrar.membership.out))
        self._awaited = [*(each.peer for each in stops), *left_out]
        return [*told, *stops, *self._end()]

    def _end(self) -> list[OfficeAction]:
        """When everybody else knows that the job is complete, or has ended."""
        if not self.is_complete or self._is_over:
            return []
        lines = self._lines
        knows = lines.has_told_all if self.deputy is None else lines.has_received_all
        if not knows(self._awaited):
            return []
        self._is_over = True
        for each in self._last:
            self._say(each)
        return [*self._last, Over()]

    # -- as the deputy -------------------------------------------------------------------------

    def note(self, note: Append) -> list[OfficeAction]:
        """What concerns files and people, and is known to have been done."""
        if self._is_active or note.number != self._number + 1 or note.done > self._number:
            raise ProtocolError(
                f"the registrar's deputy: its note {note.number}, of which {note.done} are done, "
                f"after {self._number}"
            )
        self._number = note.number
        follows: list[OfficeAction] = []
        if self._error is None:
            message = decode_control(note.message) if note.message else None
            try:
                follows = self._follows_from(note.peer, message, note.who)
            except PsdistError as error:
                self._error = error
        for_people: list[OfficeAction] = [
            each for each in follows if not isinstance(each, SendControl | Move | Over)
        ]
        self._pending.append((note.number, for_people))
        done: list[OfficeAction] = []
        while self._pending and self._pending[0][0] <= note.done:
            self._num_done, known = self._pending.popleft()
            done += known
        return done

    def announcements(self) -> list[SendControl]:
        """What the deputy says to everybody, under its own id, when the registrar has died."""
        return [
            SendControl(peer, self._succeeds(peer))
            for peer in self._spoken
            if (
                peer not in self._dead or any(server_id(each.server) == peer for each in self.moves)
            )
        ]

    def _succeeds(self, peer: int) -> LeaderChanged:
        """For ``peer``; with how it ends where it is out, and nobody will tell it."""
        host = self.registrar_at if self.deputy is None else self.deputy
        num_heard = self._lines.num_heard(peer)
        succeeds = LeaderChanged(heard=num_heard, is_over=self.is_complete, host=host)
        is_left_out = is_worker(peer) and worker_of(peer) in self.registrar.membership.out
        if not (self.is_complete and is_left_out):
            return succeeds
        told = self.registrar.membership.settled
        return replace(succeeds, generation=told.generation, dead=told.dead, chief=told.chief)

    def succeed(
        self, who: str, *, lost: Mapping[int, str]
    ) -> tuple[list[OfficeAction], list[OfficeAction]]:
        """The registrar, ``who``, has died, and this is it from now on; ``lost``: others who are
        known to have died. What may not have been done of what concerns files and people; and what
        follows."""
        if self._error is not None:
            raise self._error
        assert self.deputy is not None
        died, self.registrar_at = self.registrar_at, self.deputy
        self._is_active, self.deputy, self._is_shard_lost = True, None, True
        self._lines.close()
        undone = [each for _, actions in self._pending for each in actions]
        self._pending.clear()
        self._num_done = self._number
        actions: list[OfficeAction] = []
        if not self.is_complete:
            for peer, name in {died: who, **lost}.items():
                actions += self.on_lost(peer, name)
        return undone, actions

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself."""
        self._lines.check_invariants()
