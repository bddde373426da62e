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

from psdist.codecs.raw import RAW
from psdist.codecs.wire import payload_rule
from psdist.protocol.control import Collected, Control, Registered, Setup
from psdist.protocol.events import Arrived, ControlArrived, Offered
from psdist.protocol.header import Dtype, Flag, Header, Kind
from psdist.protocol.ids import REGISTRAR, server_id
from psdist.protocol.partition import Partition, Piece
from psdist.workers.protocol.actions import (
    AcceptCopy,
    AcceptReply,
    Action,
    SendControl,
    SendPull,
    SendPush,
)
from psdist.workers.protocol.core import WorkerCore
from psdist.workers.protocol.seat import Seat

OWNERS = (0, 1, 0, 1, 0, 1)
BYTES = 4 * 64
PARTITION = Partition.cut(
    [Piece(name="p", shape=(64 * 6,), stride=(1,), dtype="float32", optimizer_group=0)],
    chunk_bytes=BYTES,
)
RULE = payload_rule(RAW, PARTITION)
SETUP = Setup(partition=b"cut", optimizer="torch.optim.SGD", hyper=b"hyper")


def make_core(
    worker: int = 0, *, members: tuple[int, ...] = (0,), num_servers: int = 2, credits: int = 2
) -> WorkerCore:
    seat = Seat(worker=worker, group=7, members=members, num_servers=num_servers)
    core = WorkerCore(seat, describe_group=lambda group: f"group {group} on n{group}")
    core.take_slice(PARTITION, owners=OWNERS, credits=credits, replies=RULE)
    return core


def push(core: WorkerCore, **changed: Any) -> list[Action]:
    arguments: dict[str, Any] = {
        "clock": core.clock, "hyper": b"hyper", "absent": (), "weight": 1.0, "empty": (),
    }  # fmt: skip
    return core.begin_push(**{**arguments, **changed})


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
    control(core, REGISTRAR, answer)


class Network:
    """Replies to what a machine sends, in an order and with duplicates that a seed decides."""

    def __init__(self, core: WorkerCore, seed: int, *, duplicate_rate: float = 0.3) -> None:
        self.core = core
        self.random = random.Random(seed)
        self.duplicate_rate = duplicate_rate
        self.offers: list[Header] = []
        self.transfers: list[Header] = []
        self.copied: list[int] = []

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, SendPush | SendPull):
                assert action.peer == server_id(OWNERS[action.header.chunk])
                self.core.count_pushed(action.header.length)
                self.offers.append(reply_to(action.header))
                if self.random.random() < self.duplicate_rate:
                    self.offers.append(reply_to(action.header))
            elif isinstance(action, AcceptReply | AcceptCopy):
                chunk = action.ticket.chunk
                assert chunk not in [each.chunk for each in self.transfers], "one at a time"
                self.transfers.append(action.ticket)
                if isinstance(action, AcceptCopy):
                    self.copied.append(action.chunk)
        self.core.check_invariants()

    def step(self) -> None:
        """One event, any of those that are under way."""
        waiting = [*self.offers, *self.transfers]
        header = self.random.choice(waiting)
        if any(header is each for each in self.offers):
            self.offers = [each for each in self.offers if each is not header]
            event: Any = Offered(header.sender, Kind.REPLY, header.chunk, BYTES, header)
        else:
            self.transfers = [each for each in self.transfers if each is not header]
            event = Arrived(header.sender, header, None)
        self.do(self.core.handle(event))

    def run(self) -> None:
        """Until the machine waits for nothing; duplicates may still be under way."""
        while not self.core.is_idle:
            self.step()
