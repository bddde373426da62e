"""A worker's state machine without a network: commands, replies and answers for its unit tests.

core = make_core()
network = Network(core, seed=1)
network.do(push(core))
network.run()
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from psdist.codecs.wire import payload_rule
from psdist.protocol.control import Collected, Control, Registered, Setup
from psdist.protocol.events import Arrived, ControlArrived, Offered
from psdist.protocol.header import Dtype, Flag, Header, Kind
from psdist.protocol.ids import COORDINATOR, server_id
from psdist.protocol.partition import Partition, Piece
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import (
    AcceptReply,
    Action,
    SendControl,
    SendPull,
    SendPush,
)
from psdist.workers.protocol.core import WorkerCore

OWNERS = (0, 1, 0, 1, 0, 1)
BYTES = 4 * 64
PARTITION = Partition.cut(
    [Piece(name="p", shape=(64 * 6,), stride=(1,), dtype="float32", optimizer_group=0)],
    chunk_bytes=BYTES,
)
RULE = payload_rule(None, PARTITION)
SETUP = Setup(partition=b"cut", optimizer="torch.optim.SGD", hyper=b"hyper")


def make_core(
    worker: int = 0,
    *,
    members: tuple[int, ...] = (0,),
    num_servers: int = 2,
    credits: int = 2,
    order: Sequence[int] = (),
) -> WorkerCore:
    seat = Seat(worker=worker, group=7, members=members, num_servers=num_servers)
    core = WorkerCore(seat, describe_group=lambda group: f"group {group} on n{group}")
    core.take_slice(PARTITION, owners=OWNERS, credits=credits, replies=RULE, order=order)
    return core


def push(core: WorkerCore, **changed: Any) -> list[Action]:
    arguments: dict[str, Any] = {
        "clock": core.clock, "hyper": b"hyper", "absent": (), "weight": 1.0, "empty": (), **changed,
    }  # fmt: skip
    empty = arguments.pop("empty")
    return core.begin_iteration(**arguments) + core.finish_push(empty=empty)


def reply_to(header: Header, **changed: Any) -> Header:
    is_pull = header.kind == Kind.PULL
    return Header(
        kind=Kind.REPLY,
        sender=server_id(OWNERS[header.chunk]),
        chunk=header.chunk,
        clock=header.clock,
        pull_number=header.pull_number,
        flags=Flag.FOR_PULL if is_pull else Flag.NONE,
        length=BYTES,
        position=10 + header.clock,
        min_done=header.clock,
        dtype=Dtype.FLOAT32,
        chunk_version=1,
    )._replace(**changed)


def unchanged(header: Header, **changed: Any) -> Header:
    """The reply to a push or pull whose sender holds the newest version already."""
    reply = reply_to(header, chunk_version=header.chunk_version, length=0)
    return reply._replace(flags=reply.flags | Flag.UNCHANGED, **changed)


def offer(header: Header, ticket: Any = "ticket") -> Offered:
    """Return the offer of the payload after ``header``."""
    return Offered(
        *(header.sender, header.kind, header.chunk, header.length, ticket),
        clock=header.clock,
        pull_number=header.pull_number,
    )


def receipt_of(header: Header, **changed: Any) -> Header:
    return Header(
        kind=Kind.RECEIPT,
        sender=server_id(OWNERS[header.chunk]),
        chunk=header.chunk,
        clock=header.clock,
    )._replace(**changed)


def control(core: WorkerCore, peer: int, message: Control) -> list[Action]:
    actions = core.handle(ControlArrived(peer, message))
    core.check_invariants()
    return actions


def messages(actions: Sequence[Action]) -> list[tuple[int, Control]]:
    """The control messages among ``actions``, each with its peer."""
    return [(each.peer, each.message) for each in actions if isinstance(each, SendControl)]


def register(core: WorkerCore) -> None:
    core.begin_register()
    for server in range(core.seat.num_servers):
        control(core, server_id(server), Registered(group=7, server=server))


def collect(core: WorkerCore, seq: int, *, error: str = "") -> None:
    answer = Collected(seq=seq, payloads=[b"mine"], runs=[0, 3], values=b"", error=error)
    control(core, COORDINATOR, answer)


class Network:
    """Replies to what a machine sends, in an order and with duplicates that a seed decides; where
    it holds what the chunk's values are still, without payload."""

    def __init__(self, core: WorkerCore, seed: int, *, duplicate_rate: float = 0.3) -> None:
        self.core = core
        self.random = random.Random(seed)
        self.duplicate_rate = duplicate_rate
        self.offers: list[Header] = []
        self.transfers: list[Header] = []
        self.is_copying = False
        self.copied: list[int] = []
        self.version = dict.fromkeys(range(len(OWNERS)), 1)
        """By chunk, at its server."""
        self.landed: dict[int, int] = {}
        """By chunk, the version that was received into place last."""
        self.num_unchanged = 0

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, SendPush | SendPull):
                assert action.peer == server_id(OWNERS[action.header.chunk])
                reply = self.answer(action.header)
                self.offers.append(reply)
                if self.random.random() < self.duplicate_rate:
                    self.offers.append(reply._replace())
            elif isinstance(action, AcceptReply):
                chunk = action.ticket.chunk
                assert chunk not in [each.chunk for each in self.transfers], "one at a time"
                self.transfers.append(action.ticket)
                if self.is_copying:
                    self.copied.append(chunk)
                else:
                    self.landed[chunk] = action.ticket.chunk_version
        self.core.check_invariants()

    def answer(self, header: Header) -> Header:
        self.version[header.chunk] += self.random.random() < 0.3
        version = self.version[header.chunk]
        if header.chunk_version == version:
            self.num_unchanged += 1
            return unchanged(header)
        return reply_to(header, chunk_version=version)

    def step(self) -> None:
        """One event, any of those that are under way."""
        waiting = [*self.offers, *self.transfers]
        header = self.random.choice(waiting)
        if any(header is each for each in self.offers):
            self.offers = [each for each in self.offers if each is not header]
            event: Any = offer(header, header)
            if not header.length:
                event = Arrived(header.sender, header, None)
        else:
            self.transfers = [each for each in self.transfers if each is not header]
            event = Arrived(header.sender, header, None)
        self.do(self.core.handle(event))

    def run(self) -> None:
        """Until the machine waits for nothing; duplicates may still be under way."""
        while not self.core.is_idle:
            self.step()
