"""Both sides of replication on a server: the replica of its shard, and the replicas that it keeps.

Handles the messages of replicas and the failures of servers for the server's loop. Decisions are
made in psdist.servers.protocol.replication.

    replication = Replication(transport, options, server_options, make_executor, buddy=2)
    replication.handle(event)             # True: the event was about replicas
    replication.on_built(set_index, partition, owners, setup)
    replication.fill(sets, keeper=3, number=2)      # after a failure: another replica

Only the coordinator declares failures. It sends TakeOver to the server with the replica. For a new
replica it sends KeepCopy to the server that is to keep it, then FillCopy to the primary.
"""

from __future__ import annotations

from collections.abc import Sequence

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import CopyFilled, KeepCopy, KeepsCopy, Setup
from psdist.protocol.events import Arrived, Event, Offered, Sent
from psdist.protocol.header import Kind
from psdist.protocol.ids import COORDINATOR, describe_peer, is_spare, server_id
from psdist.protocol.partition import Partition
from psdist.servers.protocol.replication.filling import Filling
from psdist.servers.protocol.replication.primary import Primary
from psdist.servers.replication.keeping import BuiltSet, KeptShard, ReplicationOptions
from psdist.servers.replication.outbox import Outbox, RecordFrame
from psdist.servers.replication.recording import RecordingSetLoop
from psdist.servers.set_loop import ServerOptions, SetLoop
from psdist.servers.shard.executor import MakeExecutor
from psdist.transport.base import Transport

__all__ = ["Replication", "ReplicationOptions"]

_RECORD, _RECORDED = int(Kind.RECORD), int(Kind.RECORDED)


class Replication:
    def __init__(
        self,
        transport: Transport,
        options: ReplicationOptions,
        server_options: ServerOptions,
        make_executor: MakeExecutor,
        *,
        buddy: int | None,
    ) -> None:
        """``buddy``: the server that keeps the replica; None for a spare, which has no shard, and
        after a takeover, when the shard has no replica."""
        self.options = options
        self._transport = transport
        self._server_options = server_options
        self._make_executor = make_executor
        self._server = server_options.server
        self.outbox = Outbox(
            transport,
            Primary(server=self._server, replica=None if buddy is None else server_id(buddy)),
        )
        self.kept: dict[int, KeptShard] = {}
        """By server: the replicas of shards on this server."""
        self._built: list[BuiltSet] = []
        self._filling: Filling | None = None
        self._keeper = -1
        """The server that keeps the replica which is being filled."""
        self._sets: Sequence[RecordingSetLoop] = ()
        """The sets that are being sent."""
        if buddy is not None:  # every server with a replica keeps one, too
            for primary, its_buddy in enumerate(options.buddies):
                if its_buddy == self._server:
                    self._keep(primary, number=1)

    @property
    def is_over(self) -> bool:
        """True if the replica of this shard has every record, and no group can change a shard whose
        replica is here."""
        is_kept = all(each.is_over for each in self.kept.values())
        return is_kept and self.outbox.is_settled and self._filling is None

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: Event) -> bool:
        """Handle an event about replicas; False for other events."""
        if isinstance(event, Sent):
            if not isinstance(event.frame, RecordFrame):
                return False
            event.frame.outbox.take_back(event.frame)
        elif isinstance(event, Offered):
            if event.kind != _RECORD:
                return False
            self.kept_for(event.peer).on_offered(event)
        elif isinstance(event, Arrived):
            header = event.header
            if header.kind == _RECORDED:
                self.outbox.on_ack(event.peer, header.clock)
                self.go_on_filling()
            elif header.kind == _RECORD:
                self.kept_for(event.peer).on_arrived(event)
            else:
                return False
        else:
            return False
        return True

    def kept_for(self, peer: int) -> KeptShard:
        """Return the replica of ``peer``. Raises :class:`ProtocolError` without one."""
        kept = self.kept.get(peer)
        if kept is None:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(peer)} has no replica here; replicas are "
                f"here of servers {sorted(self.kept)}"
            )
        return kept

    def on_server_lost(self, peer: int) -> None:
        """The network has reported a failure; the coordinator decides the consequences."""
        if peer == self.outbox.primary.replica:
            self.outbox.primary.on_replica_lost()

    def on_moved(self, server: int) -> None:
        """The coordinator has declared ``server`` failed."""
        if server_id(server) == self.outbox.primary.replica:
            self.on_copy_lost()

    def on_copy_lost(self) -> None:
        """The coordinator has declared the server of the replica failed."""
        self._filling = None
        self.outbox.go_alone()

    def on_built(
        self, set_index: int, partition: Partition, owners: Sequence[int], setup: Setup
    ) -> None:
        """The chief has described a parameter set."""
        if set_index != len(self._built):
            raise InvariantError(f"set {set_index} was described after {len(self._built)}")
        built = BuiltSet(partition, owners, setup)
        self._built.append(built)
        for each in self.kept.values():
            each.on_built(built)
        primary = self.outbox.primary
        if primary.replica is not None and not primary.has_lost_replica:
            self._describe(primary.replica, set_index)

    def _describe(self, keeper: int, set_index: int) -> None:
        """Send a spare the description of a set, because the chief does not."""
        if is_spare(keeper):
            self._transport.send_control(keeper, self._built[set_index].setup, set_index)

    def close_histories(self) -> None:
        for each in self.kept.values():
            each.close_histories()

    # -- another replica -----------------------------------------------------------------------

    def keep(self, message: KeepCopy) -> None:
        """Keep another replica for the coordinator."""
        self._keep(message.server, number=message.number)
        answer = KeepsCopy(server=message.server, number=message.number)
        self._transport.send_control(COORDINATOR, answer)

    def _keep(self, server: int, *, number: int) -> None:
        known = self.kept.get(server)
        if server == self._server or (known is not None and known.number >= number):
            raise InvariantError(f"told to keep replica {number} of server {server}")
        kept = self.kept[server] = KeptShard(
            self.options,
            self._server_options,
            self._make_executor,
            transport=self._transport,
            server=server,
            number=number,
        )
        for built in self._built:
            kept.on_built(built)

    def fill(self, sets: Sequence[SetLoop], *, keeper: int, number: int) -> None:
        """Fill the ``number``-th replica on ``keeper``. ``sets``: those of the loop so far; later
        sets are recorded from their beginning."""
        described = [each for each in sets if each.executor is not None]
        self._sets = [each for each in described if isinstance(each, RecordingSetLoop)]
        self._keeper = keeper
        self.outbox.primary.begin_fill(server_id(keeper))
        for set_index in range(len(self._built)):
            self._describe(keeper, set_index)
        for each in self._sets:
            each.begin_fill()
        chunks = [(each.set_index, chunk) for each in self._sets for chunk in each.core.chunks]
        self._filling = Filling(number=number, chunks=chunks)
        self.go_on_filling()

    def go_on_filling(self) -> None:
        """Send the next chunks, between events. After the last one end the fill, and tell the
        coordinator when the replica has it all."""
        filling, primary = self._filling, self.outbox.primary
        if filling is None or primary.has_lost_replica:
            return
        filling.on_ack(primary.num_acknowledged)
        while (found := filling.next(self._may_send)) is not None:
            set_index, chunk = found
            filling.on_sent(self._sets[set_index].send_chunk(chunk))
        if filling.ends_with is None and filling.is_all_sent:
            for each in self._sets:
                each.end_fill(self._keeper)
            filling.ends_with = primary.num_recorded
            primary.end_fill()
        if filling.is_complete(primary.num_acknowledged):
            self._filling = None
            filled = CopyFilled(server=self._server, number=filling.number)
            self._transport.send_control(COORDINATOR, filled)

    def _may_send(self, set_index: int, chunk: int) -> bool:
        return self._sets[set_index].core.may_copy(chunk)
