"""The replica of a shard in memory and on the network, as servers/protocol/replication decides.

outbox: messages that wait for the replica. recording: a set's loop that records every change.
shard_replica and keeping: the replicas on a server.
No code here runs without the setting ``replication``.

Both sides of replication on a server: the replica of its shard, and the replicas that it keeps.

Handles the messages of replicas and the failures of servers, as a part of the server's loop.
Decisions are made in psdist.servers.protocol.replication.

    replication = Replication(transport, options, server_options, buddy=2)
    loop = replication.make_loop(make_core, store, seats=[standby_seat, ModeSwitches()])

Only the coordinator declares failures. It sends TakeOver to the server with the replica, which
serves the shard in a hosted loop. For a new replica it sends KeepCopy to the server that is to keep
it, then FillCopy to the primary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import (
    CopyFilled,
    CopyLost,
    FillCopy,
    KeepCopy,
    KeepsCopy,
    Moved,
    Stop,
    TakenOver,
    TakeOver,
)
from psdist.protocol.events import Arrived, ControlArrived, Event, Offered, PeerLost, Sent
from psdist.protocol.header import Kind
from psdist.protocol.ids import COORDINATOR, describe_peer, is_spare, is_worker, server_id
from psdist.servers.loop import Decided, ServerLoop, ServerPart, ShardSets
from psdist.servers.parts import Admissions, CheckpointCopies, Departures, ModeSwitches
from psdist.servers.protocol.replication.primary import Filling, Primary
from psdist.servers.protocol.state import CHIEF, ServerCore
from psdist.servers.replication.keeping import KeptShard, ReplicationOptions
from psdist.servers.replication.outbox import Outbox, RecordFrame
from psdist.servers.replication.recording import RecordingSetLoop
from psdist.servers.set_loop import SetLoop
from psdist.servers.set_store import BuiltSet, ServerOptions, ShardStore
from psdist.transport import Transport


def require_coordinator(event: ControlArrived, me: int) -> None:
    """Raise :class:`ProtocolError` if another rank sent the message."""
    if event.peer != COORDINATOR:
        raise ProtocolError(
            f"{describe_peer(me)}: {describe_peer(event.peer)} sent "
            f"{type(event.message).__name__}; {describe_peer(COORDINATOR)} declares failures"
        )


class Replication(ServerPart):
    TAKES = (
        *(Kind.RECORD, Kind.RECORDED, RecordFrame),
        *(Moved, Stop, TakeOver, KeepCopy, FillCopy, CopyLost),
    )
    outlasts_shard = True

    def __init__(
        self,
        transport: Transport,
        options: ReplicationOptions,
        server_options: ServerOptions,
        *,
        buddy: int | None,
    ) -> None:
        """``buddy``: the server that keeps the replica; None for a spare, which has no shard, and
        after a takeover, when the shard has no replica."""
        self._options = options
        self._transport = transport
        self._server_options = server_options
        self._server = server_options.server
        self.outbox = Outbox(
            transport,
            Primary(server=self._server, replica=None if buddy is None else server_id(buddy)),
        )
        self.kept: dict[int, KeptShard] = {}
        """By server: the replicas of shards on this server."""
        self._hosted: dict[int, Replication] = {}
        """By server: the replication of each shard that this process has taken over."""
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

    @property
    def num_sets(self) -> int:
        """Number of sets that were described."""
        return len(self._built)

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: Event) -> Decided:
        if isinstance(event, Sent):
            assert isinstance(event.frame, RecordFrame)
            event.frame.outbox.take_back(event.frame)
        elif isinstance(event, Offered):
            if event.kind != Kind.RECORD:
                raise ProtocolError(
                    f"server {self._server}: {describe_peer(event.peer)} offered an acknowledgement"
                )
            self.kept_for(event.peer).on_offered(event)
        elif isinstance(event, Arrived):
            if event.header.kind == Kind.RECORDED:
                self.outbox.on_ack(event.peer, event.header.clock)
                self.go_on()
            else:
                self.kept_for(event.peer).on_arrived(event)
        elif isinstance(event, ControlArrived):
            require_coordinator(event, self._transport.me)
            self._obey(event)
        return ()

    def _obey(self, event: ControlArrived) -> None:
        message = event.message
        if isinstance(message, Stop):
            self.loop.finish()
        elif isinstance(message, Moved):
            self.move(message.server, message.host)
        elif isinstance(message, TakeOver):
            # The standby that replaced the coordinator serves its shard already.
            if message.server != COORDINATOR:
                self.host(message.server)
            self._transport.send_control(COORDINATOR, TakenOver(server=message.server))
        elif isinstance(message, KeepCopy):
            self._keep(message.server, number=message.number)
            answer = KeepsCopy(server=message.server, number=message.number)
            self._transport.send_control(COORDINATOR, answer)
        elif isinstance(message, FillCopy):
            filling = self._serving(message.server, event)
            filling.fill(keeper=message.keeper, number=message.number)
        elif isinstance(message, CopyLost):
            self._serving(message.server, event).on_copy_lost()

    def _serving(self, server: int, event: ControlArrived) -> Replication:
        """Return the replication of the shard of ``server``, which this process serves."""
        serving = self._hosted.get(server)
        if server == self._server:
            serving = self
        if serving is None:
            served = sorted(each.transport.me for each in (self.loop, *self.loop.hosted))
            raise ProtocolError(
                f"{describe_peer(self._server)}: {describe_peer(event.peer)} sent "
                f"{type(event.message).__name__} of the shard of server {server}; served here are "
                f"those of {served}"
            )
        return serving

    def kept_for(self, peer: int) -> KeptShard:
        """Return the replica of ``peer``. Raises :class:`ProtocolError` without one."""
        kept = self.kept.get(peer)
        if kept is None:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(peer)} has no replica here; replicas are "
                f"here of servers {sorted(self.kept)}"
            )
        return kept

    def takes_loss(self, peer: int) -> bool:
        return not is_worker(peer)

    def on_lost(self, event: PeerLost) -> None:
        """The network has reported a failure; the coordinator decides the consequences."""
        for each in (self, *self._hosted.values()):
            if event.peer == each.outbox.primary.replica:
                each.outbox.primary.on_replica_lost()

    def move(self, server: int, host: int) -> None:
        """``host`` has replaced ``server``, which the coordinator has declared failed."""
        self._transport.move(server_id(server), server_id(host))
        self.on_moved(server)

    def on_moved(self, server: int) -> None:
        """The coordinator has declared ``server`` failed."""
        for each in (self, *self._hosted.values()):
            if server_id(server) == each.outbox.primary.replica:
                each.on_copy_lost()

    def on_copy_lost(self) -> None:
        """The coordinator has declared the server of the replica failed."""
        self._filling = None
        self.outbox.go_alone()

    def on_built(self, built: BuiltSet) -> None:
        if built.set_index != len(self._built):
            raise InvariantError(f"set {built.set_index} was described after {len(self._built)}")
        self._built.append(built)
        for each in self.kept.values():
            each.on_built(built)
        primary = self.outbox.primary
        if primary.replica is not None and not primary.has_lost_replica:
            self._describe(primary.replica, built)

    def _describe(self, keeper: int, built: BuiltSet) -> None:
        """Send a spare the description of a set, because the chief does not."""
        if is_spare(keeper):
            self._transport.send_control(keeper, built.setup, built.set_index)

    def close(self) -> None:
        for each in self.kept.values():
            each.close_histories()

    # -- loops ---------------------------------------------------------------------------------

    def make_loop(
        self,
        make_core: Callable[[int, int], ServerCore],
        store: ShardStore | KeptShard,
        *,
        seats: Sequence[ServerPart] = (),
        make_set: Callable[..., SetLoop] = RecordingSetLoop,
    ) -> ServerLoop:
        """As :func:`psdist.servers.parts.plain_loop`, for a shard that may have a replica."""
        served = ShardSets(
            self.outbox,
            make_core,
            self._server_options,
            make_store=store.of_set,
            make_set=make_set,
        )
        copies = CheckpointCopies(store.keeper, self.outbox)
        return ServerLoop(self._transport, served, (copies, self, *seats, Admissions()))

    def host(
        self,
        server: int,
        make_seats: Callable[[Replication], Sequence[ServerPart]] = lambda _replication: (),
    ) -> ServerLoop:
        """Return a loop that continues a failed server from its replica here. ``make_seats``
        returns further parts of that loop."""
        kept = self.kept_for(server_id(server))
        replicas = kept.take_over()
        for replica in replicas:
            replica.log.taken_over(self._server)
        states = {index: replica.state for index, replica in enumerate(replicas)}
        transport = self._transport.host(server_id(server))
        replication = Replication(transport, self._options, kept.server_options, buddy=None)
        changes = ModeSwitches()
        hosted = replication.make_loop(
            lambda index, resumed_up_to: self._options.make_core(
                server, index, resumed_up_to, states.get(index)
            ),
            kept,
            seats=(*make_seats(replication), changes, Departures()),
        )
        for index, replica in enumerate(replicas):
            for each, actions in hosted.decide(ControlArrived(CHIEF, replica.setup, index)):
                each.do(actions)
        if replicas:
            changes.go_on_from(replicas[0].state.modes)
        self.loop.hosted.append(hosted)
        self._hosted[server] = replication
        return hosted

    # -- another replica -----------------------------------------------------------------------

    def _keep(self, server: int, *, number: int) -> None:
        """Keep another replica for the coordinator."""
        known = self.kept.get(server)
        if server == self._server or (known is not None and known.number >= number):
            raise InvariantError(f"told to keep replica {number} of server {server}")
        kept = self.kept[server] = KeptShard(
            self._options,
            self._server_options,
            transport=self._transport,
            server=server,
            number=number,
        )
        for built in self._built:
            kept.on_built(built)

    def fill(self, *, keeper: int, number: int) -> None:
        """Fill the ``number``-th replica on ``keeper``. Later sets are recorded from their
        beginning."""
        described = [each for each in self.loop.sets if each.executor is not None]
        self._sets = [each for each in described if isinstance(each, RecordingSetLoop)]
        self._keeper = keeper
        self.outbox.primary.begin_fill(server_id(keeper))
        for built in self._built:
            self._describe(keeper, built)
        for each in self._sets:
            each.begin_fill()
        chunks = [(each.set_index, chunk) for each in self._sets for chunk in each.core.chunks]
        self._filling = Filling(number=number, chunks=chunks)
        self.go_on()

    def go_on(self) -> bool:
        """Send the next chunks of a new replica, between events. After the last one end the fill,
        and tell the coordinator when the replica has it all."""
        filling, primary = self._filling, self.outbox.primary
        if filling is None or primary.has_lost_replica:
            return False
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
        return False

    def _may_send(self, set_index: int, chunk: int) -> bool:
        return self._sets[set_index].core.may_copy(chunk)
