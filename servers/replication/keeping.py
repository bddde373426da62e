"""The replica of another server's shard, with all its parameter sets.

    kept = KeptShard(options, server_options, transport=transport, server=1, number=1)
    kept.on_built(built)                  # a set was described: its records can be applied
    kept.on_offered(event)
    kept.on_arrived(event)                # applied in order, and acknowledged
    kept.take_over()                      # the replicas, after the primary has failed

Decisions are made in psdist.servers.protocol.replication.replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psdist.errors import InvariantError, PeerLostError
from psdist.protocol.checkpoints import FirstClocks
from psdist.protocol.events import Arrived, Frame, Offered
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import server_id
from psdist.servers.protocol.replication.records import Record, SnapshotBegin, SnapshotEnd
from psdist.servers.protocol.replication.replica import NumberedRecord, Replica, TakeRecord
from psdist.servers.protocol.replication.shard_state import ShardState
from psdist.servers.protocol.state import ServerCore
from psdist.servers.replication.shard_replica import ShardReplica
from psdist.servers.set_store import BuiltSet, ServerOptions, SetStore, ShardStore
from psdist.servers.shard.regions import Keeper
from psdist.transport import Transport

_RECORDED = int(Kind.RECORDED)


@dataclass(frozen=True, kw_only=True)
class ReplicationOptions:
    """Settings of the replicas of a job, for each server."""

    buddies: Sequence[int]
    """By server: the server that keeps its replica at the start."""
    num_groups: int
    make_core: Callable[[int, int, int, ShardState | None], ServerCore]
    """(server, set index, ended collectives, state of the replica): the machine that continues a
    failed server's set; None for the state of a later set."""
    make_store: Callable[[int, int], ShardStore]
    """(server, number of the replica): where the replica is kept. Its checkpoints are those of the
    server after a takeover."""
    first_clocks: Callable[[int], FirstClocks | None] = lambda _set_index: None
    num_substitutes: int = 0
    """The last groups, which may join after others have failed."""


class KeptShard:
    def __init__(
        self,
        options: ReplicationOptions,
        server_options: ServerOptions,
        *,
        transport: Transport,
        server: int,
        number: int,
    ) -> None:
        """``server_options``: this server's own; ``server``: the primary; ``number``: of the
        replica."""
        self.number = number
        self.server_options = dataclasses.replace(server_options, server=server)
        """The options of the primary."""
        self.replicas: list[ShardReplica] = []
        """By parameter set, from its first record on."""
        self._options = options
        self._transport = transport
        self._server = server
        self._store = options.make_store(server, number)
        self._replica = Replica(server=server_options.server, primary=server)
        self._built: list[BuiltSet] = []
        self._free: list[Frame] = []
        """Memory for records."""

    @property
    def is_over(self) -> bool:
        """True if no group can change the shard any more, or its primary still fills the replica:
        a job does not end before that."""
        states = [replica.state for replica in self.replicas]
        if self._replica.is_closed or any(each.is_partial for each in states):
            return True
        return not any(each.has_members for each in states)

    def on_built(self, built: BuiltSet) -> None:
        self._built.append(built)
        self._apply(self._replica.on_set_built())

    def on_offered(self, event: Offered) -> None:
        self._take(self._replica.on_offered(event))

    def on_arrived(self, event: Arrived) -> None:
        header = event.header
        self._apply(self._replica.on_arrived(event.peer, header.clock, header.set_index, event))

    def _take(self, records: Sequence[TakeRecord]) -> None:
        for record in records:
            frame = self._free.pop() if self._free else None
            if frame is None or frame.capacity < record.num_bytes:
                from psdist.protocol.memory import allocate  # with torch: not in simulations

                frame = Frame(allocate(record.num_bytes))
            self._transport.accept(record.ticket, frame)

    def _apply(self, records: Sequence[NumberedRecord]) -> None:
        for number, set_index, event in records:
            header, frame = event.header, event.frame
            record = Record.decode(frame.payload[header.settings : header.length])
            if set_index == len(self.replicas):
                self._begin(set_index, is_filled=isinstance(record, SnapshotBegin))
            frame.num_received = header.settings
            self.replicas[set_index].apply(record, frame)
            if isinstance(record, SnapshotEnd):
                self._free.clear()  # frames of whole chunks are larger than all later ones
            else:
                self._free.append(frame)
            self._take(self._replica.on_applied(number))
            self._acknowledge(number)

    def _begin(self, set_index: int, *, is_filled: bool) -> None:
        """The first record of a set has arrived."""
        options = self._options
        self.replicas.append(
            ShardReplica(
                self.server_options,
                self._store.of_set(set_index),
                self._built[set_index],
                num_groups=options.num_groups,
                num_substitutes=options.num_substitutes,
                first=options.first_clocks(set_index),
                is_filled=is_filled,
            )
        )

    def _acknowledge(self, number: int) -> None:
        frame = Frame()
        Header(kind=_RECORDED, sender=self._transport.me, clock=number).pack_into(frame.header)
        self._transport.send(server_id(self._server), frame)

    def take_over(self) -> Sequence[ShardReplica]:
        """The coordinator has declared the primary failed: return its replicas. Raises
        :class:`PeerLostError` if one is incomplete."""
        if self._replica.is_closed:
            raise InvariantError(f"told to take over server {self._server} twice")
        self._replica.close()
        is_known = len(self.replicas) == len(self._built)
        if not is_known or not all(replica.state.is_complete for replica in self.replicas):
            who = self._transport.lost.get(server_id(self._server), f"server {self._server}")
            raise PeerLostError(f"{who} (while a model was being set up)")
        return self.replicas

    @property
    def keeper(self) -> Keeper:
        """The checkpoints of the server after the takeover."""
        return self._store.keeper

    def of_set(self, set_index: int) -> SetStore:
        """Return where the server that takes over keeps a set: in its replica, or in a new store
        for a later set."""
        if set_index < len(self.replicas):
            return self.replicas[set_index].as_store()
        return self._store.of_set(set_index)

    def close_histories(self) -> None:
        for replica in self.replicas:
            replica.close_history()
