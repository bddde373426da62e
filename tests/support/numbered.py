"""Numbered messages of every sort, and a watch over the order in which they are announced.

send_numbered(transport, peer, number)         # for number in range(n)
watch = OrderWatch()
watch.see(event)                               # AssertionError names the message out of order
"""

from __future__ import annotations

import random
from collections import Counter

from psdist.protocol.control import Progress
from psdist.protocol.events import Arrived, ControlArrived, Event, Frame, Offered
from psdist.protocol.header import Header, Kind
from psdist.transport import Transport

SIZES = (1, 100, 5000, 200_000)
"""Bytes of payloads: MPI moves small and large ones in different ways."""
KINDS = (Kind.PUSH, Kind.REPLY, Kind.PULL, Kind.INIT)


def send_numbered(transport: Transport, peer: int, number: int) -> None:
    """Message ``number`` to ``peer``: with a payload, without, or a control message."""
    pick = random.Random(f"{transport.me} {peer} {number}")
    sort = pick.choice(["payload", "empty", "control"])
    if sort == "control":
        transport.send_control(peer, Progress(worker=0, clock=number, samples=pick.randrange(9)))
        return
    num_bytes = pick.choice(SIZES) if sort == "payload" else 0
    frame = Frame(memoryview(bytearray(num_bytes)) if num_bytes else None)
    header = Header(
        kind=pick.choice(KINDS), sender=transport.me, chunk=number, clock=number, length=num_bytes
    )
    header.pack_into(frame.header)
    transport.send(peer, frame)


class OrderWatch:
    """Messages that one endpoint has received, by peer."""

    def __init__(self) -> None:
        self.announced: Counter[int] = Counter()
        """How many messages of each peer: those numbered 0 and up to this."""
        self.complete: Counter[int] = Counter()
        """How many of them are here, payload included."""

    def see(self, event: Event) -> None:
        if isinstance(event, Offered):
            self._next(event.peer, event.chunk)
        elif isinstance(event, Arrived):
            if event.frame is None:
                self._next(event.peer, event.header.clock)
            self.complete[event.peer] += 1
        elif isinstance(event, ControlArrived):
            assert isinstance(event.message, Progress)
            self._next(event.peer, event.message.clock)
            self.complete[event.peer] += 1

    def _next(self, peer: int, number: int) -> None:
        expected = self.announced[peer]
        assert number == expected, f"{number} of peer {peer} came where {expected} belongs"
        self.announced[peer] += 1
