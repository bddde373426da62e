"""A rank's side of its line to the registrar, which may die and have a successor; pure.

With buddies the registrar has a *deputy*, the buddy of server 0, which takes its place when it
dies. So that nothing is lost then, and nothing taken twice, both sides of the line between a rank
and the registrar count what they say, and keep it until the other side has it (and of what the
registrar has heard the deputy knows). The network keeps the order of a pair, and what comes of
somebody who dies is a beginning of what left him: numbers need not be sent.

    line = RegistrarLine(me=worker_id(0), deputy=server_id(1))
    line.say(enter)                             # True: send it now
    line.handle(PeerLost(REGISTRAR, "server 0"))
    line.handle(ControlArrived(server_id(1), Succeeds(heard=0, is_over=False)))
                                                # Follow(1), Say(Follows(received=0)), Say(enter)

Whoever goes on with the deputy has heard both: from the network that the registrar has died, so
that nothing of it comes any more, and from the deputy that it has its place. Nobody obeys two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

from psdist.errors import ProtocolError, ServersLostError
from psdist.protocol.control import (
    Admit,
    AskSteps,
    Buried,
    Bury,
    Busy,
    Cancel,
    Collected,
    Commit,
    CommitMode,
    Control,
    CopyFilled,
    CopyLost,
    Departed,
    Done,
    Enter,
    Failure,
    FillCopy,
    Finish,
    Finished,
    Follows,
    HeardUpTo,
    Held,
    KeepCopy,
    KeepsCopy,
    LossReported,
    Metrics,
    ModeProposed,
    Moved,
    NotedToo,
    Progress,
    Propose,
    ProposeMode,
    Ready,
    Rebuilt,
    ReceivedUpTo,
    Regroup,
    Release,
    Replace,
    Resume,
    Resumed,
    RoundTook,
    StepsFixed,
    Stop,
    Succeeds,
    Survive,
    TakenOver,
    TakeOver,
    Welcome,
    WhoIsAbsent,
    WriteFailed,
    Written,
)
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import REGISTRAR, describe_peer

SAID_TO_REGISTRAR: Final = (
    *(Enter, Resumed, Done, Finished, Metrics, Progress, Written, WriteFailed, Held, Busy),
    *(Buried, TakenOver, ModeProposed, KeepsCopy, CopyFilled, Ready),
    *(RoundTook, LossReported, AskSteps),
)
SAID_BY_REGISTRAR: Final = (
    *(Resume, Finish, Collected, Stop, Propose, Release, Commit, Cancel, TakeOver, Moved),
    *(Departed, Bury, Survive, ProposeMode, CommitMode, KeepCopy, FillCopy, StepsFixed),
    *(CopyLost, Admit, Welcome, Replace),
)
"""What is counted. WhoIsAbsent and Absent change nothing and may be lost; Failure ends the job;
where there is Rebuilt or Regroup there is no deputy."""
FOR_REGISTRAR: Final = (
    *SAID_TO_REGISTRAR,
    *(WhoIsAbsent, Failure, NotedToo, ReceivedUpTo, Follows, Rebuilt, Regroup),
)
"""All that is for the registrar; what else is sent to its id is for the shard of server 0."""
TOLD_EVERY: Final = 16
"""After so many messages the other side is told that they need not be kept any more."""


@dataclass(frozen=True, slots=True)
class Say:
    """To the registrar."""

    message: Control


@dataclass(frozen=True, slots=True)
class Follow:
    """The registrar is found in the process of this server from now on."""

    host: int


LineAction: TypeAlias = ControlArrived | PeerLost | Say | Follow
"""An event is for whoever owns the line."""


def lost_registrar(who: str, others: Iterable[str]) -> ServersLostError:
    return ServersLostError(who, [*others], of="what the registrar knows")


def num_done(done: Sequence[Any], wanted: Sequence[Any]) -> int:
    """How many of ``wanted``, which the registrar was to do in this order behind all others, are
    the last that it has ``done``."""
    for count in range(min(len(done), len(wanted)), 0, -1):
        if list(done[len(done) - count :]) == list(wanted[:count]):
            return count
    return 0


class RegistrarLine:
    def __init__(self, *, me: int, deputy: int, who_has_died: str = "") -> None:
        """``who_has_died``: the registrar, where it had died when this rank came in place of
        another one."""
        self._me = me
        self._deputy = deputy
        self._dead_registrar = who_has_died
        self._dead_deputy = ""
        self._said: deque[Control] = deque()
        """What the deputy may not know."""
        self._num_said = 0
        self._num_received = 0
        self._succession: Succeeds | None = None
        self._has_followed = False
        self._is_over = False

    @property
    def num_kept(self) -> int:
        return len(self._said)

    @property
    def _is_kept(self) -> bool:
        """Whether anybody may want to hear again what was said."""
        return not (self._dead_deputy or self._has_followed)

    def say(self, message: Control) -> bool:
        """Whether ``message``, to the registrar, leaves now; else it is said when there is one."""
        if not isinstance(message, SAID_TO_REGISTRAR):
            return True
        self._num_said += 1
        if self._is_kept:
            self._said.append(message)
        return not self._dead_registrar or self._has_followed

    def handle(self, event: ControlArrived | PeerLost) -> list[LineAction]:
        """What is to be done, in order; ``event`` among it where it is for others. Raises
        :class:`ServersLostError` where nobody knows any more what the registrar knew."""
        if isinstance(event, PeerLost):
            return self._on_lost(event)
        message = event.message
        if isinstance(message, Succeeds):
            return self._on_succeeds(event.peer, message)
        if event.peer != REGISTRAR:
            return [event]
        if isinstance(message, HeardUpTo):
            self._forget(message.count)
            return []
        if not isinstance(message, SAID_BY_REGISTRAR):
            return [event]
        self._num_received += 1
        if isinstance(message, Stop) or not self._num_received % TOLD_EVERY:
            return [event, Say(ReceivedUpTo(count=self._num_received))]
        return [event]

    def _on_lost(self, event: PeerLost) -> list[LineAction]:
        if event.peer == REGISTRAR:
            self._dead_registrar = event.who
        elif event.peer == self._deputy:
            self._dead_deputy = event.who
            self._said.clear()
        else:
            return [event]
        if self._dead_registrar and self._dead_deputy and not self._is_over:
            names = [self._dead_registrar, self._dead_deputy]
            names.remove(event.who)
            raise lost_registrar(event.who, names)
        if event.peer == REGISTRAR and self._succession is not None:
            return [event, *self._follow(self._succession)]
        return [event]

    def _on_succeeds(self, peer: int, message: Succeeds) -> list[LineAction]:
        if peer not in (self._deputy, REGISTRAR):
            self._refuse(peer, "says that it is the registrar's successor")
        if message.is_over:
            self._is_over = True
            said: list[Control] = [Stop()]
            if message.dead:
                generation, chief = message.generation, message.chief
                said.insert(0, Survive(generation=generation, dead=message.dead, chief=chief))
            return [ControlArrived(REGISTRAR, each) for each in said]
        self._succession = message
        return self._follow(message) if self._dead_registrar else []

    def _follow(self, succession: Succeeds) -> list[LineAction]:
        if not self._has_followed:
            self._forget(succession.heard)
        again = list(self._said)
        self._has_followed = True
        self._said.clear()
        follows = Say(Follows(received=self._num_received))
        return [Follow(self._deputy), follows, *map(Say, again)]

    def _forget(self, count: int) -> None:
        """The first ``count`` that were said."""
        num_new = count - (self._num_said - len(self._said))
        if not 0 <= num_new <= len(self._said):
            if self._dead_deputy and count <= self._num_said:
                return  # nothing was kept any more
            self._refuse(REGISTRAR, f"has heard {count} messages of {self._num_said}")
        for _ in range(num_new):
            self._said.popleft()

    def _refuse(self, peer: int, why: str) -> NoReturn:
        raise ProtocolError(f"{describe_peer(self._me)}: {describe_peer(peer)} {why}")
