"""A rank's side of its line to the coordinator, which may die and have a successor; pure.

With buddies the coordinator has a *standby*, the buddy of server 0, which takes its place when it
dies. So that nothing is lost then, and nothing taken twice, both sides of the line between a rank
and the coordinator count what they say, and keep it until the other side has it (and of what the
coordinator has heard the standby knows). The network keeps the order of a pair, and what comes of
somebody who dies is a beginning of what left him: numbers need not be sent.

    line = CoordinatorLine(me=worker_id(0), standby=server_id(1))
    line.say(enter)                             # True: send it now
    line.handle(PeerLost(COORDINATOR, "server 0"))
    line.handle(ControlArrived(server_id(1), LeaderChanged(heard=0, is_over=False, host=1)))
                                                # Follow(1), Say(Rejoined(received=0)), Say(enter)

Whoever goes on with the standby has heard both: from the network that the coordinator has died, so
that nothing of it comes any more, and from the standby that it has its place. Nobody obeys two.

A coordinator without a standby may appoint another one (``Nominate``). Before that is entrusted
with anything every line has received who it is: so whoever hears of a coordinator's death knows for
whom to wait. Who is appointed and not entrusted yet says that nobody goes on.
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
"""After so many messages the other side is told that they need not be kept any more."""


@dataclass(frozen=True, slots=True)
class Say:
    """To the coordinator."""

    message: Control


@dataclass(frozen=True, slots=True)
class Follow:
    """The coordinator is found in the process of this server or spare from now on; that in which it
    was, ``died``, has died."""

    host: int
    died: int


LineAction: TypeAlias = ControlArrived | PeerLost | Say | Follow
"""An event is for whoever owns the line."""


def lost_coordinator(who: str, others: Iterable[str]) -> ServersLostError:
    return ServersLostError(who, [*others], of="what the coordinator knows")


def num_done(done: Sequence[Any], wanted: Sequence[Any]) -> int:
    """How many of ``wanted``, which the coordinator was to do in this order behind all others, are
    the last that it has ``done``."""
    for count in range(min(len(done), len(wanted)), 0, -1):
        if list(done[len(done) - count :]) == list(wanted[:count]):
            return count
    return 0


class CoordinatorLine:
    def __init__(
        self, *, me: int, standby: int | None, before: CoordinatorLine | None = None
    ) -> None:
        """``standby``: the first one; ``before``: the line of the process where this rank goes on
        in place of another one, and which knows who the coordinator and its standby are now."""
        self._me = me
        self._is_hosted = before is not None
        self._standby: int | None = before._standby if before is not None else standby
        self._at: int = before._at if before is not None else COORDINATOR
        """In whose process the coordinator is, or was until it died."""
        self._is_awaiting = self._at != COORDINATOR
        """Whether the coordinator, which has followed another one, is still to ask this line,
        too."""
        self._dead: dict[int, str] = dict(before._dead) if before is not None else {}
        """Processes that have died, and who they were."""
        self._gone: list[str] = list(before._gone) if before is not None else []
        """Of those that have been the coordinator or its standby the last two, for people."""
        self._is_entrusted = True
        """Where this rank is the standby: whether it knows what the coordinator knows."""
        self._said: deque[Control] = deque()
        """What the standby may not know."""
        self._num_said = 0
        self._num_received = 0
        self._succession: LeaderChanged | None = None
        self._is_over = False

    @property
    def num_kept(self) -> int:
        return len(self._said)

    @property
    def coordinator_at(self) -> int:
        """In whose process the coordinator is, or was until it died."""
        return self._at

    @property
    def standby(self) -> int | None:
        """Who goes on if the coordinator dies; None where this rank knows of nobody."""
        return self._standby

    def know_dead(self, dead: Mapping[int, str]) -> None:
        """Of whom this rank will not be told: they had died before it was there."""
        for peer, who in dead.items():
            self._note_death(peer, who)

    @property
    def _has_lost_coordinator(self) -> bool:
        return self._at in self._dead

    def say(self, message: Control) -> bool:
        """Whether ``message``, to the coordinator, leaves now; else it is said when there is
        one."""
        if not isinstance(message, SaidToCoordinator):
            return True
        self._num_said += 1
        self._said.append(message)
        return not (self._has_lost_coordinator or self._is_awaiting)

    def handle(self, event: ControlArrived | PeerLost) -> list[LineAction]:
        """What is to be done, in order; ``event`` among it where it is for others. Raises
        :class:`ServersLostError` where nobody knows any more what the coordinator knew."""
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
        if event.peer == self._at and self._succession is not None:
            return [event, *self._follow(self._succession)]
        return [event]

    @property
    def _may_be_succeeded(self) -> bool:
        """Whether somebody may know all that the coordinator knew. Of who goes on here in place of
        another one its process says whether it is entrusted."""
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
        self._succession = message
        return self._follow(message) if self._has_lost_coordinator else []

    def _follow(self, succession: LeaderChanged) -> list[LineAction]:
        died = self._at
        if succession.host != died:
            self._at, self._standby, self._succession = succession.host, None, None
        self._is_awaiting = False
        self._forget(succession.heard)
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
