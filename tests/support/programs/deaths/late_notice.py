"""Server 1 fails and continues in server 0's process; the worker is told so before its own network
has told it of the death, and what is sent to it from there comes.

    PSDIST_SERVERS=2 mpirun -n 3 --with-ft ulfm python -m tests.support.programs.deaths.late_notice
"""

from __future__ import annotations

import os
import signal
import time

from psdist.config.sources import resolve
from psdist.protocol.events import Arrived, Frame, Offered, PeerLost
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.ranks.connecting import connect
from psdist.ranks.rank import Rank
from tests.support.programs.deaths.last_words import end

DEAD, HOST = server_id(1), server_id(0)
SAID = b"what the dead server's successor says"


def main() -> None:
    context = connect(resolve(command_line={}, environment=os.environ))
    if context.me == DEAD:
        os.kill(os.getpid(), signal.SIGKILL)
    elif context.me == HOST:
        go_on(context)
    else:
        receive(context)
    end(context)


def go_on(context: Rank) -> None:
    transport = context.endpoint
    while not isinstance(transport.poll(), PeerLost):
        pass
    frame = Frame(memoryview(bytearray(SAID)))
    Header(kind=Kind.REPLY, sender=DEAD, length=len(SAID)).pack_into(frame.header)
    transport.host(DEAD).send(worker_id(0), frame)


def receive(context: Rank) -> None:
    transport = context.endpoint
    time.sleep(1.0)  # whoever does not poll hears nothing of a death
    transport.move(DEAD, HOST)
    offers: list[Offered] = []
    has_heard = False
    while not (has_heard and offers):
        event = transport.poll()
        has_heard |= isinstance(event, PeerLost)
        if isinstance(event, Offered):
            offers.append(event)
    assert not transport.lost, "who continues is lost no more"
    frame = Frame(memoryview(bytearray(len(SAID))))
    transport.accept(offers[0].ticket, frame)
    arrived = None
    while not isinstance(arrived, Arrived):
        arrived = transport.poll()
    assert frame.payload == SAID
    print(f"{context.who}: it has come", flush=True)


if __name__ == "__main__":
    main()
