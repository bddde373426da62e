"""Both sides of a server in a pair: its own shard has a copy elsewhere, and it keeps others'.

Handles, for the server's loop, the messages of copies and the deaths of servers; all else is the
loop's. It decides nothing (psdist.servers.protocol.replication).

    replication = Replication(transport, options, server_options, make_executor, buddy=2)
    replication.handle(event)             # True: it was about copies
    replication.on_built(set_index, partition, owners, setup)
    replication.fill(sets, keeper=3, number=2)      # the buddy has died: another copy is made

A server's place is taken in one way: the coordinator, who alone declares deaths, tells who keeps
the copy. Another copy begins in one way, too: the coordinator tells the one who is to keep it, and
then the one that fills it.
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
        """``buddy``: who keeps the second copy; None for a server that goes on in place of one that
        has died, of whose shard there is one copy, and for a spare, which has none."""
        self.options = options
        self._transport = transport
        self._server_options = server_options
        self._make_executor = make_executor
        self._server = server_options.server
        self.outbox = Outbox(
            transport,
            Primary(server=self._server, buddy=None if buddy is None else server_id(buddy)),
        )
        self.kept: dict[int, KeptShard] = {}
        """By server: copies of shards, kept here."""
        self._built: list[BuiltSet] = []
        self._filling: Filling | None = None
        self._keeper = -1
        """Who keeps what is being filled."""
        self._sets: Sequence[RecordingSetLoop] = ()
        """Those of which it is."""
        if buddy is not None:  # this one is another one's
            for primary, its_buddy in enumerate(options.buddies):
                if its_buddy == self._server:
                    self._keep(primary, number=1)

    @property
    def is_over(self) -> bool:
        """Whether nobody needs this server for a copy any more: who keeps this one's has been told
        everything, and no group can change a shard whose copy is kept here."""
        is_kept = all(each.is_over for each in self.kept.values())
        return is_kept and self.outbox.is_told and self._filling is None

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: Event) -> bool:
        """Whether ``event`` was about copies; all that follows from it has been done then."""
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
                self.outbox.on_recorded(event.peer, header.clock)
                self.go_on_filling()
            elif header.kind == _RECORD:
                self.kept_for(event.peer).on_arrived(event)
            else:
                return False
        else:
            return False
        return True

    def kept_for(self, peer: int) -> KeptShard:
        """The copy of the shard of ``peer``, a server."""
        kept = self.kept.get(peer)
        if kept is None:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(peer)} has no copy here; kept are those "
                f"of {sorted(self.kept)}"
            )
        return kept

    def on_server_lost(self, peer: int) -> None:
        """The network says that a server has died; the coordinator decides what follows."""
        if peer == self.outbox.primary.buddy:
            self.outbox.primary.on_buddy_lost()

    def on_moved(self, server: int) -> None:
        """The coordinator says that ``server`` has died."""
        if server_id(server) == self.outbox.primary.buddy:
            self.on_copy_lost()

    def on_copy_lost(self) -> None:
        """The coordinator says that who had the copy, or was to have it, has died."""
        self._filling = None
        self.outbox.go_alone()

    def on_built(
        self, set_index: int, partition: Partition, owners: Sequence[int], setup: Setup
    ) -> None:
        """The chief has described a parameter set: this server keeps copies of others' parts."""
        if set_index != len(self._built):
            raise InvariantError(f"set {set_index} was described after {len(self._built)}")
        built = BuiltSet(partition, owners, setup)
        self._built.append(built)
        for each in self.kept.values():
            each.on_built(built)
        primary = self.outbox.primary
        if primary.buddy is not None and not primary.has_lost_buddy:
            self._describe(primary.buddy, set_index)

    def _describe(self, keeper: int, set_index: int) -> None:
        """To a spare, which the chief does not know."""
        if is_spare(keeper):
            self._transport.send_control(keeper, self._built[set_index].setup, set_index)

    def close_histories(self) -> None:
        for each in self.kept.values():
            each.close_histories()

    # -- another copy --------------------------------------------------------------------------

    def keep(self, message: KeepCopy) -> None:
        """The coordinator wants another copy of a shard to be kept here."""
        self._keep(message.server, number=message.number)
        answer = KeepsCopy(server=message.server, number=message.number)
        self._transport.send_control(COORDINATOR, answer)

    def _keep(self, server: int, *, number: int) -> None:
        known = self.kept.get(server)
        if server == self._server or (known is not None and known.number >= number):
            raise InvariantError(f"told to keep copy {number} of the shard of server {server}")
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
        """Another server keeps the ``number``-th copy from now on, and knows nothing yet. ``sets``:
        of this loop; who comes later, it is told of from its beginning."""
        described = [each for each in sets if each.executor is not None]
        self._sets = [each for each in described if isinstance(each, RecordingSetLoop)]
        self._keeper = keeper
        self.outbox.begin_fill(server_id(keeper))
        for set_index in range(len(self._built)):
            self._describe(keeper, set_index)
        for each in self._sets:
            each.begin_fill()
        chunks = [(each.set_index, chunk) for each in self._sets for chunk in each.core.chunks]
        self._filling = Filling(number=number, chunks=chunks)
        self.go_on_filling()

    def go_on_filling(self) -> None:
        """Between events: tell of as many chunks as there is room for; when all were told, of the
        end, and when the buddy has all that, the coordinator."""
        filling, primary = self._filling, self.outbox.primary
        if filling is None or primary.has_lost_buddy:
            return
        filling.on_held(primary.num_held)
        while (found := filling.next(self._may_tell)) is not None:
            set_index, chunk = found
            filling.on_told(self._sets[set_index].tell_chunk(chunk))
        if filling.ends_with is None and filling.is_all_told:
            for each in self._sets:
                each.end_fill(self._keeper)
            filling.ends_with = primary.num_recorded
            primary.end_fill()
        if filling.is_over(primary.num_held):
            self._filling = None
            filled = CopyFilled(server=self._server, number=filling.number)
            self._transport.send_control(COORDINATOR, filled)

    def _may_tell(self, set_index: int, chunk: int) -> bool:
        return self._sets[set_index].may_tell(chunk)
