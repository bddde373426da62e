"""Payloads that a receiver takes in another order than they were sent in, and two that are a lie.

    mpirun -n 2 python -m tests.support.programs.messages.payloads

The worker says "every payload was the right one"; the server prints the errors that a payload
shorter and one longer than its header says end in.
"""

from __future__ import annotations

import os
import random
import sys
from typing import TypeVar

from psdist.config.sources import resolve
from psdist.errors import ProtocolError, TransportError
from psdist.protocol.control import Progress, encode_control
from psdist.protocol.events import Arrived, Event, Frame, Offered
from psdist.protocol.header import HEADER_BYTES, Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.ranks.connecting import connect
from psdist.ranks.rank import Rank
from psdist.transport.mpi import MpiTransport

_E = TypeVar("_E", bound=Event)

SIZES = [1, 100, 4096, 70_000, 4097, 2_000_000, 3, 65_536, 10, 1_000_000]
ROUNDS = 5
NUM_TAGS = 16
"""Not a multiple of the payloads in a round: numbers wrap round in the middle of one."""


def main() -> None:
    context = connect(resolve(command_line={}, environment=os.environ))
    assert isinstance(context.endpoint, MpiTransport)
    context.endpoint._num_tags = NUM_TAGS
    if context.role == "server":
        receive(context)
    else:
        send(context)
    context.exit.close()


def payload(round_number: int, index: int) -> bytes:
    return random.Random(round_number * len(SIZES) + index).randbytes(SIZES[index])


def send(context: Rank) -> None:
    before, progress = context.endpoint.bytes_sent, Progress(worker=0, clock=1, samples=1)
    context.endpoint.send_control(worker_id(0), progress)
    context.endpoint.send_control(server_id(0), progress)
    for round_number in range(ROUNDS):
        for index in range(len(SIZES)):
            send_payload(context, payload(round_number, index), index)
        next_event(context, Arrived)
    of_round = sum(HEADER_BYTES + size for size in SIZES)
    of_control = HEADER_BYTES + len(encode_control(progress))
    assert context.endpoint.bytes_sent - before == ROUNDS * of_round + of_control
    for told in (9, 7):
        send_lie(context, b"12345678", told)
        next_event(context, Arrived)
    print("every payload was the right one", flush=True)


def send_payload(context: Rank, data: bytes, index: int) -> None:
    frame = Frame(memoryview(bytearray(data)))
    header = Header(kind=Kind.PUSH, sender=worker_id(0), clock=index, length=len(data))
    header.pack_into(frame.header)
    context.endpoint.send(server_id(0), frame)


def send_lie(context: Rank, data: bytes, told: int) -> None:
    """As MpiTransport.send does, which refuses this."""
    transport, server = context.endpoint, context.roles.rank_of_peer[server_id(0)]
    assert isinstance(transport, MpiTransport)
    header = bytearray(HEADER_BYTES)
    Header(kind=Kind.PUSH, sender=worker_id(0), length=told).pack_into(header)
    transport._comm.Send(header, dest=server, tag=int(Kind.PUSH))
    number = transport._num_sent[server]
    transport._num_sent[server] += 1
    transport._payloads.Send(data, dest=server, tag=number % NUM_TAGS)


def receive(context: Rank) -> None:
    order = random.Random(1)
    for round_number in range(ROUNDS):
        offers = [next_event(context, Offered) for _ in SIZES]
        assert [offer.num_bytes for offer in offers] == SIZES
        order.shuffle(offers)
        frames = {}
        for offer in offers:
            frame = Frame(memoryview(bytearray(offer.num_bytes)))
            context.endpoint.accept(offer.ticket, frame)
            frames[id(frame)] = frame
        for _ in SIZES:
            arrived = next_event(context, Arrived)
            assert arrived.frame is not None
            frame = frames.pop(id(arrived.frame))
            assert frame.payload is not None
            assert bytes(frame.payload) == payload(round_number, arrived.header.clock)
        answer(context)
    for _ in range(2):
        lie = next_event(context, Offered)
        try:
            context.endpoint.accept(lie.ticket, Frame(memoryview(bytearray(9))))
            next_event(context, Arrived)
        except (ProtocolError, TransportError) as error:
            print(error, flush=True)
        answer(context)


def answer(context: Rank) -> None:
    frame = Frame()
    Header(kind=Kind.REPLY, sender=server_id(0)).pack_into(frame.header)
    context.endpoint.send(worker_id(0), frame)


def next_event(context: Rank, kind: type[_E]) -> _E:
    """The next event of this kind; others are passed over."""
    waiting = context.waiting()
    while True:
        event = context.endpoint.poll()
        if isinstance(event, kind):
            return event
        if event is None:
            waiting.idle("the other rank")


if __name__ == "__main__":
    sys.exit(main())
