"""The order in which a replica receives, applies and acknowledges records; pure.

Records are numbered. A few of those that are offered are received at a time. They are applied
strictly in order, whatever the order in which their payloads arrive, and acknowledged one by one.
After a takeover (``close``) records of the former primary are ignored.

    replica = Replica(server=2, primary=1)
    replica.on_offered(event)             # [TakeRecord(ticket, num_bytes)]
    replica.on_arrived(peer, 1, record)   # [record]: apply these, and acknowledge them
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.events import Offered
from psdist.protocol.header import MOST_CREDITS
from psdist.protocol.ids import describe_peer, server_id

MOST_TAKEN = 4
"""Maximum number of records that are being received or wait for earlier ones. They need memory in
addition to the replica."""


@dataclass(slots=True)
class TakeRecord:
    """Receive an offered record into memory of its own."""

    ticket: Any
    num_bytes: int


class NumberedRecord(NamedTuple):
    """``content`` is the loop's event."""

    number: int
    set_index: int
    content: Any


class Replica:
    def __init__(self, *, server: int, primary: int) -> None:
        """``primary``: the number of the server whose replica is here."""
        self._server = server
        self.primary = primary
        self.is_closed = False
        self._num_offered = 0
        self.num_applied = 0
        self._offers: deque[TakeRecord] = deque()
        """Offers that wait until earlier records are applied."""
        self._num_taken = 0
        """Number of records that are being received or wait for earlier ones."""
        self._arrived: dict[int, NumberedRecord] = {}
        self._num_sets = 0

    def on_set_built(self) -> list[NumberedRecord]:
        """The next parameter set was described here. Return its records that can be applied."""
        self._num_sets += 1
        return self._in_order()

    def on_offered(self, event: Offered) -> list[TakeRecord]:
        self._require_primary(event.peer)
        if self.is_closed or event.clock <= self._num_offered:
            return []  # after the takeover, or delivered twice
        if event.clock != self._num_offered + 1 or len(self._offers) > MOST_CREDITS**2:
            self._refuse(event.peer, f"offers record {event.clock} after {self._num_offered}")
        self._num_offered += 1
        self._offers.append(TakeRecord(event.ticket, event.num_bytes))
        return self._take()

    def _take(self) -> list[TakeRecord]:
        taken = []
        while self._offers and self._num_taken < MOST_TAKEN:
            self._num_taken += 1
            taken.append(self._offers.popleft())
        return taken

    def on_arrived(
        self, peer: int, number: int, set_index: int, content: Any
    ) -> list[NumberedRecord]:
        """A record has arrived. Return the records that can be applied now, in order."""
        self._require_primary(peer)
        if self.is_closed:
            return []
        if not self.num_applied < number <= self._num_offered or number in self._arrived:
            self._refuse(peer, f"sent record {number}, which was not accepted")
        self._arrived[number] = NumberedRecord(number, set_index, content)
        return self._in_order()

    def _in_order(self) -> list[NumberedRecord]:
        ready = []
        number = self.num_applied + 1
        while (record := self._arrived.get(number)) and record.set_index < self._num_sets:
            del self._arrived[number]
            ready.append(record)
            number += 1
        return ready

    def on_applied(self, number: int) -> list[TakeRecord]:
        """Record ``number``, the next one, was applied. Return the offers to accept now."""
        if number != self.num_applied + 1:
            raise InvariantError(f"record {number} was applied after {self.num_applied}")
        self.num_applied = number
        self._num_taken -= 1
        return self._take()

    def close(self) -> None:
        """This server takes over the shard, or the primary needs no replica any more."""
        self.is_closed = True
        self._offers.clear()
        self._arrived.clear()

    def _require_primary(self, peer: int) -> None:
        if peer != server_id(self.primary):
            self._refuse(
                peer, f"sent a record; this server keeps the replica of server {self.primary}"
            )

    def _refuse(self, peer: int, why: str) -> NoReturn:
        raise ProtocolError(f"server {self._server}: {describe_peer(peer)} {why}")
