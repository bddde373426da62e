"""Control messages over MPI that come too early or too late for the job that their receiver is in.

    mpirun -n 2 python -m tests.support.programs.messages.generations

A Failure is handed out at once, and behind what was sent before it: it marks how far a receiver has
looked. The server says what it was given.
"""

from __future__ import annotations

import os

from psdist.config.sources import resolve
from psdist.protocol.control import Control, Failure, Resume, encode_control
from psdist.protocol.events import ControlArrived
from psdist.protocol.header import HEADER_BYTES
from psdist.protocol.ids import server_id, worker_id
from psdist.ranks.connecting import connect
from psdist.ranks.rank import Rank


def main() -> None:
    context = connect(resolve(command_line={}, environment=os.environ))
    assert not context.is_alone
    if context.me == worker_id(0):
        send(context)
    else:
        receive(context)
    context.exit.close()


def send(context: Rank) -> None:
    say(context, 0)
    context.advance()
    say(context, 1)
    of_this_job = HEADER_BYTES + len(encode_control(Resume(seq=1)))
    assert context.endpoint.bytes_sent == of_this_job
    context.advance()
    say(context, 2)
    mark(context)
    read(context)  # the server is in generation 3 now
    say(context, 3)
    mark(context)


def receive(context: Rank) -> None:
    print("in 0:", read(context), flush=True)
    context.advance()
    print("in 1:", [seq_of(context.endpoint.poll()), context.endpoint.poll()], flush=True)
    context.advance()
    print("in 2:", [seq_of(context.endpoint.poll()), context.endpoint.poll()], flush=True)
    context.advance()  # further than the worker
    mark(context, worker_id(0))
    print("in 3:", read(context), flush=True)


def say(context: Rank, seq: int) -> None:
    context.endpoint.send_control(server_id(0), Resume(seq=seq))


def mark(context: Rank, peer: int = server_id(0)) -> None:
    context.endpoint.send_control(peer, Failure(heading="", text="", exit_status=0))


def read(context: Rank) -> list[int]:
    """What is given up to the mark."""
    given: list[int] = []
    while True:
        event = context.endpoint.poll()
        if isinstance(event, ControlArrived) and isinstance(event.message, Failure):
            return given
        if isinstance(event, ControlArrived):
            given.append(seq_of(event))


def seq_of(event: object) -> int:
    assert isinstance(event, ControlArrived)
    message: Control = event.message
    assert isinstance(message, Resume)
    return message.seq


if __name__ == "__main__":
    main()
