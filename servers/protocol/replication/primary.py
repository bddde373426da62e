"""Messages that a server holds until its replica has the records before them; pure.

A server sends its replica a record of every change of its shard, numbered from 1. A message after a
change may reveal the change. It is therefore held until the replica has acknowledged the record.
Two servers then have every update that was acknowledged to a worker. Messages leave in the order in
which they were made.

If the replica's process fails, no message leaves until the coordinator has declared the failure
(``go_alone``). This server may itself be cut off and declared failed, while the replica's server
serves the shard.

A server without a replica may be told to fill another one (``begin_fill``). No message is held
until the whole shard is in flight. After ``end_fill`` messages are held as before.

    primary = Primary(server=1, replica=server_id(2))
    primary.count_record()                # 1: send the replica this record
    primary.hold(output)                  # True: held here
    primary.on_ack(server_id(2), 1)       # [output]: may leave now
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.ids import describe_peer

MOST_FILLING = 2
"""Maximum number of chunks in flight."""


class Primary:
    def __init__(self, *, server: int, replica: int | None) -> None:
        """``replica``: the id of the process that keeps it; None without a replica."""
        self._server = server
        self.replica = replica
        self._former: set[int] = set()
        """Processes of earlier replicas, which have failed."""
        self.has_lost_replica = replica is None
        """True if the network has reported the failure: no more records are sent."""
        self.is_alone = replica is None
        """True if the coordinator has declared the failure: no message is held any more."""
        self.is_filling = False
        """True while a part of the shard has not been sent to a new replica."""
        self.num_recorded = 0
        self.num_acknowledged = 0
        """Invariant: num_acknowledged <= num_recorded."""
        self._outputs: deque[tuple[int, Any]] = deque()
        """Held messages, each with the number of records that the replica must have first."""

    @property
    def is_settled(self) -> bool:
        """True if no message is held and no record is in flight."""
        is_at_rest = self.is_alone and not self.is_filling
        return not self._outputs and (is_at_rest or self.num_acknowledged == self.num_recorded)

    def count_record(self) -> int:
        """Return the number of the next record; 0 without a replica."""
        if self.has_lost_replica:
            return 0
        self.num_recorded += 1
        return self.num_recorded

    def hold(self, output: Any) -> bool:
        """Hold a message; False if it may leave at once."""
        if self.is_alone:
            return False
        if not self.has_lost_replica and self.num_acknowledged == self.num_recorded:
            return False
        self._outputs.append((self.num_recorded, output))
        return True

    def on_ack(self, peer: int, number: int) -> list[Any]:
        """The replica has all records up to ``number``. Return the messages that may leave now, in
        order. Raises :class:`ProtocolError` for an acknowledgement of other records."""
        if peer in self._former:
            return []
        if peer != self.replica or not self.num_acknowledged < number <= self.num_recorded:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(peer)} acknowledged {number} records; "
                f"{self._describe_replica()} was sent {self.num_recorded} and has acknowledged "
                f"{self.num_acknowledged}"
            )
        self.num_acknowledged = number
        if self.has_lost_replica:
            return []
        outputs, free = self._outputs, []
        while outputs and outputs[0][0] <= number:
            free.append(outputs.popleft()[1])
        return free

    def on_replica_lost(self) -> None:
        self.has_lost_replica = True

    def go_alone(self) -> list[Any]:
        """The coordinator has declared the replica failed, and not this server. Return all messages
        that were held."""
        self.has_lost_replica = self.is_alone = True
        self.is_filling = False
        free = [output for _, output in self._outputs]
        self._outputs.clear()
        return free

    def begin_fill(self, replica: int) -> None:
        """The coordinator has chosen a new, empty replica. Its records are numbered from 1."""
        if not self.is_alone or self.is_filling:
            raise InvariantError(f"server {self._server} was told to fill two replicas")
        if self.replica is not None:
            self._former.add(self.replica)
        self.replica, self.has_lost_replica, self.is_filling = replica, False, True
        self.num_recorded = self.num_acknowledged = 0

    def end_fill(self) -> None:
        """The whole shard was sent: from now on messages are held for the replica."""
        if not self.is_filling:
            raise InvariantError(f"server {self._server} has filled no replica")
        self.is_filling = self.is_alone = False

    def _describe_replica(self) -> str:
        return "no replica" if self.replica is None else describe_peer(self.replica)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself."""
        stamps = [stamp for stamp, _ in self._outputs]
        if stamps != sorted(stamps) or self.num_acknowledged > self.num_recorded:
            raise InvariantError(f"outputs wait for records {stamps} of {self.num_recorded}")
        if self.is_alone and stamps:
            raise InvariantError("outputs are held without a replica")
        if not self.has_lost_replica and stamps and stamps[0] <= self.num_acknowledged:
            raise InvariantError(
                f"an output waits for record {stamps[0]}; the replica has {self.num_acknowledged}"
            )


class Filling:
    """The chunks that a server sends a new replica while training continues. At most
    :data:`MOST_FILLING` are in flight, which bounds memory and leaves the network to training. A
    chunk without values, or with new values on their way, waits while others go first."""

    def __init__(self, *, number: int, chunks: Iterable[tuple[int, int]]) -> None:
        """``number``: the replica's; ``chunks``: set and chunk."""
        self.number = number
        self._waiting = deque(chunks)
        self._in_flight: deque[int] = deque()
        """Numbers of the records that carry chunks."""
        self.ends_with: int | None = None
        """Number of the last record; None until all chunks are sent."""

    @property
    def is_all_sent(self) -> bool:
        return not self._waiting

    def next(self, is_ready: Callable[[int, int], bool]) -> tuple[int, int] | None:
        """Return the set and the chunk to send now; None if no chunk can be sent."""
        if len(self._in_flight) >= MOST_FILLING:
            return None
        for _ in range(len(self._waiting)):
            if is_ready(*self._waiting[0]):
                return self._waiting.popleft()
            self._waiting.rotate(-1)
        return None

    def on_sent(self, number: int) -> None:
        """Record ``number`` carries the chunk."""
        self._in_flight.append(number)

    def on_ack(self, number: int) -> None:
        """The replica has all records up to ``number``."""
        while self._in_flight and self._in_flight[0] <= number:
            self._in_flight.popleft()

    def is_complete(self, num_acknowledged: int) -> bool:
        """True if the replica has the whole shard."""
        return self.ends_with is not None and num_acknowledged >= self.ends_with
