"""Both sides of a server in a pair: its own shard has a copy at its buddy, and it keeps another's.

Handles, for the server's loop, the messages of copies and the deaths of servers; all else is the
loop's. It decides nothing (psdist.servers.protocol.replication).

    replication = Replication(transport, options, server_options, make_executor)
    replication.handle(event)             # True: it was about copies
    replication.on_built(set_index, partition, owners, setup)

A server's place is taken in one way: the registrar, who alone declares deaths, tells its buddy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psdist.errors import InvariantError, PeerLostError
from psdist.history.writers import ServerHistory
from psdist.protocol.checkpoints import FirstClocks
from psdist.protocol.control import Setup
from psdist.protocol.events import Arrived, Event, Frame, Offered, Sent
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import server_id
from psdist.protocol.partition import Partition
from psdist.servers.protocol.replication.picture import ShardPicture
from psdist.servers.protocol.replication.primary import Primary
from psdist.servers.protocol.replication.records import unpack_record
from psdist.servers.protocol.replication.replica import NumberedRecord, Replica, TakeRecord
from psdist.servers.protocol.state import ServerCore
from psdist.servers.replication.copies import ShardCopy
from psdist.servers.replication.outbox import Outbox, RecordFrame
from psdist.servers.set_loop import ServerOptions
from psdist.servers.shard.executor import MakeExecutor
from psdist.servers.shard.regions import Keeper
from psdist.transport.base import Transport

_RECORD, _RECORDED = int(Kind.RECORD), int(Kind.RECORDED)


@dataclass(frozen=True, kw_only=True)
class ReplicationOptions:
    """What servers need to know of one another's copies, beside what each knows of itself."""

    buddies: Sequence[int]
    """By server: who keeps the second copy of its shard."""
    num_groups: int
    make_core: Callable[[int, int, int, ShardPicture | None], ServerCore]
    """(server, set index, collectives that are over, what its buddy knows of it): the machine of a
    server whose place another one has taken; no picture of a set that came later."""
    make_history: Callable[[int, int], ServerHistory | None]
    """(server, set index): its log as its buddy writes it; None where nothing is recorded."""
    make_keeper: Callable[[int], Keeper | None]
    """Where the checkpoints of a server go whose place another one has taken."""
    first_clocks: Callable[[int], FirstClocks | None] = lambda _set_index: None


class Replication:
    def __init__(
        self,
        transport: Transport,
        options: ReplicationOptions,
        server_options: ServerOptions,
        make_executor: MakeExecutor,
    ) -> None:
        self.options = options
        self._transport = transport
        server = server_options.server
        self._primary = options.buddies.index(server)
        """The number of the server whose copy is kept here."""
        self.copied_options = dataclasses.replace(
            server_options, server=self._primary, keeper=options.make_keeper(self._primary)
        )
        """Those of that server."""
        self.outbox = Outbox(
            transport, Primary(server=server, buddy=server_id(options.buddies[server]))
        )
        self._replica = Replica(server=server, primary=self._primary)
        self._make_executor = make_executor
        self.copies: list[ShardCopy] = []
        """By parameter set."""
        self._free: list[Frame] = []
        """Memory for records."""

    @property
    def is_over(self) -> bool:
        """Whether both sides need one another no more: the buddy has been told everything, and no
        group can change the shard whose copy is kept here."""
        is_copied = self._replica.is_closed or not any(
            copy.picture.has_members for copy in self.copies
        )
        return is_copied and self.outbox.is_told

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: Event) -> bool:
        """Whether ``event`` was about copies; all that follows from it has been done then."""
        if isinstance(event, Sent):
            if not isinstance(event.frame, RecordFrame):
                return False
            self.outbox.take_back(event.frame)
        elif isinstance(event, Offered):
            if event.kind != _RECORD:
                return False
            self._take(self._replica.on_offered(event))
        elif isinstance(event, Arrived):
            header = event.header
            if header.kind == _RECORDED:
                self.outbox.on_recorded(event.peer, header.clock)
            elif header.kind == _RECORD:
                number, index = header.clock, header.set_index
                self._carry_out(self._replica.on_arrived(event.peer, number, index, event))
            else:
                return False
        else:
            return False
        return True

    def on_server_lost(self, peer: int) -> None:
        """The network says that a server has died; the registrar decides what follows."""
        if peer == self.outbox.primary.buddy:
            self.outbox.primary.on_buddy_lost()

    def on_moved(self, server: int) -> None:
        """The registrar says that ``server`` has died."""
        if server_id(server) == self.outbox.primary.buddy:
            self.outbox.go_alone()

    def on_built(
        self, set_index: int, partition: Partition, owners: Sequence[int], setup: Setup
    ) -> None:
        """The chief has described a parameter set: this server keeps a copy of the other's part."""
        if self._replica.is_closed:
            return  # what the other one would hold is served by this one
        if set_index != len(self.copies):
            raise InvariantError(f"set {set_index} was described after {len(self.copies)}")
        options = self.options
        self.copies.append(
            ShardCopy(
                self.copied_options,
                setup,
                partition,
                [chunk for chunk, owner in enumerate(owners) if owner == self._primary],
                set_index=set_index,
                num_groups=options.num_groups,
                make_executor=self._make_executor,
                history=options.make_history(self._primary, set_index),
                first=options.first_clocks(set_index),
            )
        )
        self._carry_out(self._replica.on_set_built())

    def _take(self, records: Sequence[TakeRecord]) -> None:
        for record in records:
            frame = self._free.pop() if self._free else None
            if frame is None or frame.capacity < record.num_bytes:
                from psdist.protocol.memory import (
                    allocate,
                )  # as in psdist.servers.replication.outbox

                frame = Frame(allocate(record.num_bytes))
            self._transport.accept(record.ticket, frame)

    def _carry_out(self, records: Sequence[NumberedRecord]) -> None:
        for number, set_index, event in records:
            header, frame = event.header, event.frame
            record = unpack_record(frame.payload[header.settings : header.length])
            self.copies[set_index].carry_out(record, frame, header.settings)
            self._free.append(frame)
            self._take(self._replica.on_carried_out(number))
            self._tell(number)

    def _tell(self, number: int) -> None:
        frame = Frame()
        Header(kind=_RECORDED, sender=self._transport.me, clock=number).pack_into(frame.header)
        self._transport.send(server_id(self._primary), frame)

    def close_histories(self) -> None:
        for copy in self.copies:
            copy.close_history()

    # -- in another one's place ----------------------------------------------------------------

    def take_over(self, server: int) -> Sequence[ShardCopy]:
        """The registrar says that ``server`` has died, and that this one takes its place: what that
        one held. Raises :class:`PeerLostError` where its shard was not complete."""
        if server != self._primary or self._replica.is_closed:
            raise InvariantError(f"told to take the place of server {server}")
        self._replica.close()
        if not all(copy.picture.is_complete for copy in self.copies):
            who = self._transport.lost.get(server_id(server), f"server {server}")
            raise PeerLostError(f"{who} (while a model was being set up)")
        return self.copies
