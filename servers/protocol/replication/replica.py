"""In which order a buddy takes the records of a server, and what it tells it; pure.

Records are numbered; what is offered is taken a few at a time, and carried out strictly in order,
whatever the order in which payloads are complete. Behind each the server is told: two servers hold
it now. When this server has taken the other's place (``close``), nothing of the other counts any
more.

    replica = Replica(server=2, primary=1)
    replica.on_offered(event)             # [TakeRecord(ticket, num_bytes)]
    replica.on_arrived(peer, 1, record)   # [record]: carry these out, and tell their numbers
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
"""Records that are received at the same time, or wait for those before them: the memory of a buddy
beside its copy of the shard."""


@dataclass(slots=True)
class TakeRecord:
    """Receive an offered record into memory of its own."""

    ticket: Any
    num_bytes: int


class NumberedRecord(NamedTuple):
    """``content`` is the loop's: what has arrived."""

    number: int
    set_index: int
    content: Any


class Replica:
    def __init__(self, *, server: int, primary: int) -> None:
        """``primary``: the number of the server whose second copy is kept here."""
        self._server = server
        self.primary = primary
        self.is_closed = False
        self._num_offered = 0
        self.num_carried_out = 0
        self._offers: deque[TakeRecord] = deque()
        """That wait for others to be carried out."""
        self._num_taken = 0
        """Records that are being received, or have arrived and wait."""
        self._arrived: dict[int, NumberedRecord] = {}
        self._num_sets = 0

    def on_set_built(self) -> list[NumberedRecord]:
        """The next parameter set was described here: its records can be carried out."""
        self._num_sets += 1
        return self._in_order()

    def on_offered(self, event: Offered) -> list[TakeRecord]:
        self._require_primary(event.peer)
        if self.is_closed or event.clock <= self._num_offered:
            return []  # of one that is dead, or a second delivery
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
        """A record is here: what can be carried out now, in order."""
        self._require_primary(peer)
        if self.is_closed:
            return []
        if not self.num_carried_out < number <= self._num_offered or number in self._arrived:
            self._refuse(peer, f"sent record {number}, which was not asked for")
        self._arrived[number] = NumberedRecord(number, set_index, content)
        return self._in_order()

    def _in_order(self) -> list[NumberedRecord]:
        ready = []
        number = self.num_carried_out + 1
        while (record := self._arrived.get(number)) and record.set_index < self._num_sets:
            del self._arrived[number]
            ready.append(record)
            number += 1
        return ready

    def on_carried_out(self, number: int) -> list[TakeRecord]:
        """Record ``number``, the next one, is in the copy: what is received instead of it."""
        if number != self.num_carried_out + 1:
            raise InvariantError(f"record {number} was carried out after {self.num_carried_out}")
        self.num_carried_out = number
        self._num_taken -= 1
        return self._take()

    def close(self) -> None:
        """This server takes the primary's place, or the primary needs none any more."""
        self.is_closed = True
        self._offers.clear()
        self._arrived.clear()

    def _require_primary(self, peer: int) -> None:
        if peer != server_id(self.primary):
            self._refuse(peer, f"sent a record; this server keeps the copy of {self.primary}'s")

    def _refuse(self, peer: int, why: str) -> NoReturn:
        raise ProtocolError(f"server {self._server}: {describe_peer(peer)} {why}")
