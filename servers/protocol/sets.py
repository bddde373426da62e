"""Which parameter set an event is about, and which may come next; pure.

Every set has a :class:`~psdist.servers.protocol.state.ServerCore` of its own on every server:
clocks, slots, settings and membership of one set never meet those of another, so that no push of
one waits for another's. This module decides what they share: sets are numbered from 0 without
gaps, in the order of the ``prepare`` calls, which all workers share.

    sets = SetNumbers(server=0)
    sets.of(event)                # 0; ProtocolError for a set that there is not
    sets.count                    # ... 2 after the first Setup or Register of set 1
"""

from __future__ import annotations

from typing import NoReturn

from psdist.errors import ProtocolError
from psdist.protocol.control import (
    Leave,
    Register,
    Settings,
    Setup,
    StateValues,
    StateWanted,
    Suspend,
    WhoIsMissing,
)
from psdist.protocol.events import Arrived, ControlArrived, Offered
from psdist.protocol.header import MOST_SETS
from psdist.protocol.ids import describe_peer
from psdist.servers.protocol.assembly import RULES

_BEGINS_A_SET = (Setup, Register)
_OF_A_SET = (
    *_BEGINS_A_SET,
    *(StateValues, StateWanted, Settings, Suspend, Leave, WhoIsMissing),
    *(message for rule in RULES for message in rule.TAKES),
)


class SetNumbers:
    def __init__(self, *, server: int) -> None:
        self._server = server
        self.count = 1
        """Sets that there are."""

    def of(self, event: Offered | Arrived | ControlArrived) -> int:
        """The set of ``event``, the next one if it begins that."""
        if isinstance(event, Arrived):
            index, begins = event.header.set_index, False
        elif isinstance(event, Offered):
            index, begins = event.set_index, False
        else:
            index, begins = event.set_index, isinstance(event.message, _BEGINS_A_SET)
            if index and not isinstance(event.message, _OF_A_SET):
                name = type(event.message).__name__
                self._refuse(event.peer, f"{name} of set {index}; it concerns the whole job")
        if index < self.count:
            return index
        if not begins or index != self.count or index >= MOST_SETS:
            self._refuse(
                event.peer,
                f"a message about parameter set {index}; there are {self.count}, {MOST_SETS} at "
                "most",
            )
        self.count += 1
        return index

    def _refuse(self, peer: int, what: str) -> NoReturn:
        raise ProtocolError(f"server {self._server}: {describe_peer(peer)} sent {what}")
