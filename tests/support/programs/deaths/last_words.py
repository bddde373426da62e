"""Worker 1 sends messages and is killed; what had left it comes before its loss, and nothing after.

    mpirun -n 3 --with-ft ulfm python -m tests.support.programs.deaths.last_words

Worker 0 polls all the time, server 0 only when worker 1 is dead. Each says what it has seen.
"""

from __future__ import annotations

import os
import signal
import time

from psdist.config.sources import resolve
from psdist.protocol.control import Metrics
from psdist.protocol.events import ControlArrived, Event, Frame, Offered, PeerLost, Sent
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.ranks.connecting import connect
from psdist.ranks.failure import wait_until_read
from psdist.ranks.rank import Rank
from tests.support.numbered import OrderWatch, send_numbered

DEAD = worker_id(1)
LEFT = 10
"""Messages that leave it: so few that MPI takes their headers at once."""
SPOKEN = ControlArrived(worker_id(0), Metrics(line={"text": "has spoken"}))


def main() -> None:
    context = connect(resolve(command_line={}, environment=os.environ))
    if context.me == DEAD:
        die(context)
    if context.me == server_id(0):
        time.sleep(1.0)
    survive(context)
    end(context)


def die(context: Rank) -> None:
    transport = context.endpoint
    for peer in (server_id(0), worker_id(0)):
        for number in range(LEFT):
            send_numbered(transport, peer, number)
    # MPI moves a message as long as this while both sides take part: it does not leave, and so
    # neither do the ones behind it.
    transport.send_control(server_id(0), Metrics(line={"text": "x" * 1_000_000}))
    for number in range(LEFT, LEFT + 5):
        send_numbered(transport, server_id(0), number)
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        transport.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def survive(context: Rank) -> None:
    transport, watch, tickets = context.endpoint, OrderWatch(), []
    event: Event | None = None
    while not isinstance(event, PeerLost):
        event = transport.poll()
        if isinstance(event, Offered):
            tickets.append(event.ticket)
        if event is not None:
            watch.see(event)
    for ticket in tickets:
        transport.accept(ticket, Frame(memoryview(bytearray(200_000))))
    frame = Frame(memoryview(bytearray(1_000_000)))
    Header(kind=Kind.PUSH, sender=context.me, length=frame.capacity).pack_into(frame.header)
    transport.send(DEAD, frame)
    after: list[Event] = []
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        late = transport.poll()
        if late is not None and late != SPOKEN:
            after.append(late)
    assert after == [Sent(frame)], after
    assert transport.lost == {DEAD: event.who}
    print(f"{context.who}: {watch.announced[DEAD]} messages, then lost: {event.who}", flush=True)


def end(context: Rank) -> None:
    """When both have spoken, and not by MPI_Finalize: it may wait for the dead for ever
    (open-mpi/ompi issue 11404). A job of psdist's ends in MPI_Abort then, too."""
    assert context.comms.world is not None
    transport = context.endpoint
    if context.me == server_id(0):
        while transport.poll() != SPOKEN:  # sent until it is heard here
            pass
        wait_until_read()
        context.comms.world.Abort(0)
    while True:
        transport.send_control(server_id(0), SPOKEN.message)
        transport.poll()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
