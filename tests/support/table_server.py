"""A server of one set of tables, without a network: what is offered arrives at once.

server = TableServer(specs, mode="ssp", staleness=1)
server.describe(); server.register(0)
server.push(0, clock=0, payload=pack_push(...))
server.taken()                      # [(peer, header, payload), ...]: what it has sent since
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from psdist.protocol.control import Control, Register, Settings, Setup
from psdist.protocol.events import Arrived, ControlArrived, Event, Frame, Offered, PeerLost, Sent
from psdist.protocol.header import CodecCode, Dtype, Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.servers.parts import plain_loop
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.set_store import ServerOptions, ShardStore
from psdist.servers.shard.regions import Keeper
from psdist.servers.shard.tensors import TensorShard
from psdist.servers.tables.contents import contents_of
from psdist.servers.tables.service import RowService
from psdist.servers.tables.shard import TableShard
from psdist.tables.specs import TableSpecs

Taken = tuple[int, Header, bytes]


class _Network:
    """As much of a transport as a server needs."""

    bytes_sent = 0

    def __init__(self, server: int) -> None:
        self.me = server_id(server)
        self.events: deque[Event] = deque()
        self.sent: list[Taken] = []
        self.told: list[tuple[int, Control]] = []
        self.frames: list[Frame] = []
        """Those that were sent, while ``keeps_frames``."""
        self.keeps_frames = False
        self.lost: dict[int, str] = {}

    def poll(self) -> Event | None:
        return self.events.popleft() if self.events else None

    def send_control(self, peer: int, message: Control, set_index: int = 0) -> None:
        del set_index
        self.told.append((peer, message))

    def send(self, peer: int, frame: Frame) -> None:
        payload = b"" if frame.payload is None else bytes(frame.payload)
        num_bytes = frame.num_payload_bytes()
        self.sent.append((peer, Header.unpack(frame.header), payload[:num_bytes]))
        if self.keeps_frames:
            self.frames.append(frame)
        else:
            self.events.append(Sent(frame))

    def accept(self, ticket: Any, frame: Frame) -> None:
        header, payload = ticket
        assert frame.payload is not None
        frame.payload[: len(payload)] = payload
        frame.num_received = len(payload)
        self.events.append(Arrived(header.sender, header, frame))


class TableServer:
    def __init__(
        self,
        specs: TableSpecs,
        *,
        mode: str = "sync",
        staleness: int = 0,
        groups: Sequence[Sequence[int]] = ((0,), (1,)),
        num_servers: int = 1,
        keeper: Keeper | None = None,
        **more: Any,
    ) -> None:
        """The server with part 0. ``more``: for :func:`assemble_core`."""
        self.specs = specs
        self.network = _Network(0)
        self.service = RowService()
        self.hyper = pack_hyperparameters([{"lr": 0.1} for _ in specs.tables])
        self.loop = plain_loop(
            self.network,  # type: ignore[arg-type] # enough for the loop
            lambda _set_index, resumed_up_to: assemble_core(
                server=0,
                make_rule=rule_for(mode, staleness=staleness),
                groups=groups,
                resumed_up_to=resumed_up_to,
                **more,
            ),
            ServerOptions(
                server=0,
                shard_weights=(1.0,) * num_servers,
                modes=(mode,),
                receive_buffers=4,
            ),
            ShardStore(TensorShard, choose=contents_of, keeper=keeper),
            seats=[self.service],
        )

    @property
    def shard(self) -> TableShard:
        shard = self.loop.sets[0].executor
        assert isinstance(shard, TableShard)
        return shard

    def handle(self, *events: Event) -> None:
        """Handle the events, and all that follow."""
        self.network.events.extend(events)
        while self.network.events:
            self.loop.turn()
        self.loop.turn()  # nothing is left: time for parked pulls

    def control(self, worker: int, message: Control) -> None:
        self.handle(ControlArrived(worker_id(worker), message))

    def setup(self, **fields: Any) -> Setup:
        given: dict[str, Any] = {
            "partition": self.specs.partition().encode(),
            "optimizer": "torch.optim.SGD",
            "hyper": self.hyper,
            "tables": self.specs.encode(),
        }
        return Setup(**given | fields)

    def describe(self) -> None:
        """The chief describes the tables, and sends the values that no rank reads."""
        self.control(0, self.setup())
        chunks = self.specs.partition().chunks
        for part in self.shard.parts:
            self.send(0, Kind.INIT, bytes(chunks[part].num_bytes), chunk=part, codec=0)

    def register(self, *workers: int) -> None:
        for worker in workers:
            self.control(worker, Register(group=worker, workers=[worker], clock=0))
            self.control(worker, Settings(version=1, hyper=self.hyper, absent=[]))

    def send(self, worker: int, kind: Kind, payload: bytes | memoryview, **fields: Any) -> None:
        """A message of the worker, of the group of the same number."""
        given: dict[str, Any] = {
            "group": worker,
            "dtype": int(Dtype.FLOAT32),
            "codec": int(CodecCode.ROWS),
            "length": len(payload),
        }
        header = Header(kind=kind, sender=worker_id(worker), **given | fields)
        self.deliver(header, payload)

    def deliver(self, header: Header, payload: bytes | memoryview) -> None:
        if not len(payload):
            self.handle(Arrived(header.sender, header, None))
            return
        self.handle(
            Offered(
                *(header.sender, header.kind, header.chunk, len(payload), (header, bytes(payload))),
                set_index=header.set_index,
                clock=header.clock,
                pull_number=header.pull_number,
            )
        )

    def push(self, worker: int, payload: bytes | memoryview, *, clock: int, **fields: Any) -> None:
        self.send(worker, Kind.PUSH, payload, clock=clock, weight=1.0, settings=1, **fields)

    def lose(self, worker: int) -> None:
        self.handle(PeerLost(worker_id(worker), f"worker {worker}"))

    def taken(self) -> list[Taken]:
        """Return what the server has sent since the last call."""
        sent, self.network.sent = self.network.sent, []
        return sent
