"""A rank's connection to the coordinator, which may fail over to a standby; pure.

With replicas the coordinator has a *standby*, the replica of server 0, which takes its place when
it fails. No message may be lost then, or processed twice. So each rank and the coordinator count
their messages to each other, and keep them until the other side has them (and until the standby
stores what the coordinator has received). Messages between two ranks arrive in order. When a sender
fails, a prefix of its messages has arrived. Messages therefore need no sequence numbers.

    line = CoordinatorLine(me=worker_id(0), standby=server_id(1))
    line.say(enter)                             # True: send it now
    line.handle(PeerLost(COORDINATOR, "server 0"))
    line.handle(ControlArrived(server_id(1), LeaderChanged(heard=0, is_over=False, host=1)))
                                                # Follow(1), Say(Rejoined(received=0)), Say(enter)

A rank continues with the standby after two events. The network reports that the coordinator has
failed, so that none of its messages can arrive any more; and the standby reports that it is the
coordinator now. So no rank ever obeys two coordinators.

A coordinator without a standby may nominate another one (``Nominate``). Every rank receives the
name before the nominee receives a snapshot, so each rank stores which process to wait for after a
failure. A nominee without a snapshot reports that it cannot take over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

from psdist.errors import ProtocolError, ServersLostError
from psdist.protocol.control import (
    Ack,
    Control,
    InstallSnapshot,
    LeaderChanged,
    MembershipChanged,
    Nominate,
    Rejoined,
    SaidByCoordinator,
    SaidToCoordinator,
    StandbyAck,
    Stop,
)
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import COORDINATOR, describe_peer

TOLD_EVERY: Final = 16
"""Number of messages after which an ack tells the other side to keep them no longer."""


@dataclass(frozen=True, slots=True)
class Say:
    """To the coordinator."""

    message: Control


@dataclass(frozen=True, slots=True)
class Follow:
    """The coordinator is now in the process of this server or spare; the process that it was in,
    ``died``, has failed."""

    host: int
    died: int


LineAction: TypeAlias = ControlArrived | PeerLost | Say | Follow
"""An event is for the owner of the line."""


def lost_coordinator(who: str, others: Iterable[str]) -> ServersLostError:
    return ServersLostError(who, [*others], of="what the coordinator knows")


def num_done(done: Sequence[Any], wanted: Sequence[Any]) -> int:
    """Return how many of ``wanted``, which the coordinator was to do in this order after all
    others, are the last that it has ``done``."""
    for count in range(min(len(done), len(wanted)), 0, -1):
        if list(done[len(done) - count :]) == list(wanted[:count]):
            return count
    return 0


class CoordinatorLine:
    def __init__(
        self, *, me: int, standby: int | None, before: CoordinatorLine | None = None
    ) -> None:
        """``standby``: the first one; ``before``: the line of the process that this rank continues
        in, after another rank; it stores the current coordinator and its standby."""
        self._me = me
        self._is_hosted = before is not None
        self._standby: int | None = before._standby if before is not None else standby
        self._at: int = before._at if before is not None else COORDINATOR
        """The process of the coordinator, also after it has failed."""
        self._is_awaiting = self._at != COORDINATOR
        """True if the coordinator, which has taken over, is still to contact this line, too."""
        self._dead: dict[int, str] = dict(before._dead) if before is not None else {}
        """Failed processes, with their names for messages."""
        self._gone: list[str] = list(before._gone) if before is not None else []
        """Names of the last two failed processes that were the coordinator or its standby."""
        self._is_entrusted = True
        """On the standby: True if it has the coordinator's snapshot."""
        self._said: deque[Control] = deque()
        """Messages that the standby may not have."""
        self._num_said = 0
        self._num_received = 0
        self._failover: LeaderChanged | None = None
        """The successor's message, if it arrived before the failure of the coordinator."""
        self._is_over = False

    @property
    def num_kept(self) -> int:
        return len(self._said)

    @property
    def coordinator_at(self) -> int:
        """The process of the coordinator, also after it has failed."""
        return self._at

    @property
    def standby(self) -> int | None:
        """The process that takes over if the coordinator fails; None if there is none."""
        return self._standby

    def know_dead(self, dead: Mapping[int, str]) -> None:
        """Add processes that had failed before this rank started; it gets no event for them."""
        for peer, who in dead.items():
            self._note_death(peer, who)

    @property
    def _has_lost_coordinator(self) -> bool:
        return self._at in self._dead

    def say(self, message: Control) -> bool:
        """True if ``message``, to the coordinator, is sent now; else it is sent once there is a
        coordinator."""
        if not isinstance(message, SaidToCoordinator):
            return True
        self._num_said += 1
        self._said.append(message)
        return not (self._has_lost_coordinator or self._is_awaiting)

    def handle(self, event: ControlArrived | PeerLost) -> list[LineAction]:
        """Return the actions, in order, with ``event`` among them if it is for others. Raises
        :class:`ServersLostError` if no process is left that stores the coordinator's state."""
        if isinstance(event, PeerLost):
            return self._on_lost(event)
        message = event.message
        if isinstance(message, LeaderChanged):
            return self._on_succeeds(event.peer, message)
        if event.peer != COORDINATOR:
            return [event]
        if isinstance(message, StandbyAck):
            self._forget(message.count)
            return []
        if isinstance(message, InstallSnapshot) and message.part == message.num_parts - 1:
            self._is_entrusted = True
        if not isinstance(message, SaidByCoordinator):
            return [event]
        self._num_received += 1
        received = Say(Ack(count=self._num_received))
        if isinstance(message, Nominate):
            self._standby = message.deputy
            self._is_entrusted = False
            return [received]
        if isinstance(message, Stop) or not self._num_received % TOLD_EVERY:
            return [event, received]
        return [event]

    def _note_death(self, peer: int, who: str) -> None:
        if peer in (self._at, self._standby) and peer not in self._dead:
            self._gone = [*self._gone[-1:], who]
        self._dead[peer] = who

    def _on_lost(self, event: PeerLost) -> list[LineAction]:
        self._note_death(event.peer, event.who)
        if not self._has_lost_coordinator or self._is_over:
            return [event]
        if not self._may_be_succeeded:
            others = [each for each in self._gone if each != event.who]
            raise lost_coordinator(event.who, others)
        if event.peer == self._at and self._failover is not None:
            return [event, *self._follow(self._failover)]
        return [event]

    @property
    def _may_be_succeeded(self) -> bool:
        """True if a process may store the coordinator's whole state. Inside the coordinator's
        process, the line of the process before decides that."""
        if self._standby is None or self._standby in self._dead:
            return False
        return self._standby != self._me or self._is_entrusted or self._is_hosted

    def _on_succeeds(self, peer: int, message: LeaderChanged) -> list[LineAction]:
        if message.host not in (self._standby, self._at) or peer not in (message.host, COORDINATOR):
            self._refuse(peer, "says that it is the coordinator's successor")
        if message.is_over:
            self._is_over = True
            said: list[Control] = [Stop()]
            if message.dead:
                generation, chief = message.generation, message.chief
                said.insert(
                    0, MembershipChanged(generation=generation, dead=message.dead, chief=chief)
                )
            return [ControlArrived(COORDINATOR, each) for each in said]
        if message.host == self._at:
            if not self._is_awaiting:
                self._refuse(peer, "says again that it is the coordinator's successor")
            return self._follow(message)
        self._failover = message
        return self._follow(message) if self._has_lost_coordinator else []

    def _follow(self, failover: LeaderChanged) -> list[LineAction]:
        died = self._at
        if failover.host != died:
            self._at, self._standby, self._failover = failover.host, None, None
        self._is_awaiting = False
        self._forget(failover.heard)
        follows = Say(Rejoined(received=self._num_received))
        return [Follow(self._at, died), follows, *map(Say, self._said)]

    def _forget(self, count: int) -> None:
        """The first ``count`` that were said."""
        num_new = count - (self._num_said - len(self._said))
        if not 0 <= num_new <= len(self._said):
            self._refuse(COORDINATOR, f"has heard {count} messages of {self._num_said}")
        for _ in range(num_new):
            self._said.popleft()

    def _refuse(self, peer: int, why: str) -> NoReturn:
        raise ProtocolError(f"{describe_peer(self._me)}: {describe_peer(peer)} {why}")
