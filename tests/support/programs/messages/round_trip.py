"""One push and its reply between a worker and a server, over psdist's own transport.

    mpirun -n 2 python -m tests.support.programs.messages.round_trip

Everything of a real job but the training (torch is not loaded): start, agreement on the
configuration, roles, run directory, transport, close. The settings come from the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from psdist.config.sources import resolve
from psdist.protocol.control import Done, Stop
from psdist.protocol.events import Arrived, ControlArrived, Event, Frame, Offered, Sent
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.ranks.connecting import connect
from psdist.ranks.rank import Rank

NUM_BYTES = 100_000


def main() -> None:
    context = connect(resolve(command_line={}, environment=os.environ))
    if context.role == "server":
        serve(context)
    else:
        push(context)
    context.exit.close()


def push(context: Rank) -> None:
    sent = Frame(memoryview(bytearray(os.urandom(NUM_BYTES))))
    received = Frame(memoryview(bytearray(NUM_BYTES)))
    header = Header(kind=Kind.PUSH, sender=worker_id(0), chunk=3, clock=7, length=NUM_BYTES)
    header.pack_into(sent.header)
    context.endpoint.send(server_id(0), sent)
    reply = exchange(context, received, until=lambda event: isinstance(event, Arrived))
    assert received.payload == sent.payload
    assert isinstance(reply, Arrived)
    assert reply.header.clock == 7
    context.endpoint.send_control(server_id(0), Done(worker=0, statistics={}))
    exchange(
        context,
        received,
        until=lambda event: isinstance(event, ControlArrived) and isinstance(event.message, Stop),
    )


def serve(context: Rank) -> None:
    frame = Frame(memoryview(bytearray(NUM_BYTES)))
    push = exchange(context, frame, until=lambda event: isinstance(event, Arrived))
    assert isinstance(push, Arrived)
    reply = push.header._replace(kind=Kind.REPLY, sender=server_id(0))
    reply.pack_into(frame.header)
    context.endpoint.send(worker_id(0), frame)
    seen: list[type] = []

    def is_over(event: Event) -> bool:
        seen.append(event.message.__class__ if isinstance(event, ControlArrived) else type(event))
        return {Sent, Done} <= set(seen)

    exchange(context, frame, until=is_over)
    context.endpoint.send_control(worker_id(0), Stop())


def exchange(context: Rank, frame: Frame, *, until: Callable[[Event], bool]) -> Event:
    """Receive what is offered into ``frame`` until an event satisfies ``until``; that event."""
    waiting = context.waiting()
    while True:
        event = context.endpoint.poll()
        if event is None:
            waiting.idle("the other rank")
            continue
        waiting.reset()
        if isinstance(event, Offered):
            context.endpoint.accept(event.ticket, frame)
        if until(event):
            return event


if __name__ == "__main__":
    sys.exit(main())
