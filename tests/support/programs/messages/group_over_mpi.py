"""Everything that a GroupChannel over MPI does, in groups of 2, 3 and 4 of the same ranks.

    mpirun -n 4 python -m tests.support.programs.messages.group_over_mpi

Each rank prints what it has seen; LONGEST: bytes of the longest message. ENDS=1: of a group of
two the rank at place 1 ends instead, without a word.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from mpi4py import MPI

from psdist.errors import CollectiveError, InvariantError, TransportError, WaitTimeoutError
from psdist.protocol.ids import worker_id
from psdist.protocol.partition import Span
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import make_loop
from psdist.workers.group import mpi
from psdist.workers.group.channel import AloneChannel, GroupChannel
from psdist.workers.group.mpi import MpiChannel
from psdist.workers.group.tier import GroupMpi, start, stop
from psdist.workers.group.two_levels import TwoLevelChannel
from psdist.workers.loop import WorkerLoop
from psdist.workers.protocol import Seat
from tests.support.group_operations import expected, finish, operations
from tests.support.virtual.network import VirtualNetwork

SLICES = [[Span(0, 0, 12)], [Span(0, 12, 24)]]


def say(*words: object) -> None:
    print(*words, flush=True)


def loop_of(channel: GroupChannel, *, timeout_s: float = 60.0) -> WorkerLoop:
    """Of which nothing comes: the worker waits for its group only."""
    place = channel.place
    return make_loop(
        VirtualNetwork().endpoint(worker_id(place)),
        Seat(worker=place, group=0, members=(place,), num_servers=1),
        waiting=Waiting(is_spinning=False, timeout_s=timeout_s),
    )


def all_operations(comm: MPI.Intracomm) -> None:
    channel = MpiChannel(comm, is_spinning=comm.Get_size() == 2)
    result = finish(operations(channel, channel.duplicate()))
    is_right = result == expected(channel.place, channel.size)
    say(f"{channel.place} of {channel.size}: {is_right}")
    two_at_once(channel)
    exchange(channel)
    different_calls(channel)
    if channel.size == 2:
        late_worker(channel, comm)
        refused(channel, comm)
    channel.close()


def two_at_once(channel: GroupChannel) -> None:
    """The second is asked for first; both bring more than fits a first message."""
    rows = [[[100.0 * number + place] * 40 for place in range(channel.size)] for number in (1, 2)]
    first, second = (channel.agree("any", row[channel.place]) for row in rows)
    found = loop_of(channel).wait_for(second, "any")
    is_right = [loop_of(channel).wait_for(first, "any"), found] == rows
    say(f"{channel.place} of {channel.size} at once: {is_right}")


def exchange(channel: MpiChannel) -> None:
    """Bytes from each to each and to itself: so many that they do not divide by the turns."""
    size, place = channel.size, channel.place

    def bytes_of(sender: int, receiver: int) -> torch.Tensor:
        return torch.full((5 * sender + 7 * receiver,), 10 * sender + receiver, dtype=torch.uint8)

    given = [bytes_of(place, receiver) for receiver in range(size)]
    wanted = [bytes_of(sender, place) for sender in range(size)]
    for in_turns in (1, 4):
        taken = torch.zeros(sum(map(len, wanted)), dtype=torch.uint8)
        to, of = list(map(len, given)), list(map(len, wanted))
        pending = channel.exchange(torch.cat(given), to, taken, of, in_turns=in_turns)
        loop_of(channel).wait_for(pending, "step")
        say(f"{place} of {size} exchanged: {torch.equal(taken, torch.cat(wanted))}")


def different_calls(channel: GroupChannel) -> None:
    try:
        call = "pull" if channel.place == 1 else "save"
        loop_of(channel).wait_for(channel.agree(call), "save")
    except CollectiveError as error:
        say(f"{channel.place} of {channel.size} told: {error}")


def late_worker(channel: GroupChannel, comm: MPI.Intracomm) -> None:
    if channel.place == 0:
        comm.Recv(bytearray(1), 1, 3)  # when the other has given up
        pending = channel.agree("barrier")
    else:
        pending = channel.agree("barrier")
        try:
            loop_of(channel, timeout_s=0.2).wait_for(pending, "barrier")
        except WaitTimeoutError as error:
            say(f"late: {error}")
        comm.Send(bytearray(1), 0, 3)
    loop_of(channel).wait_for(pending, "barrier")


def refused(channel: GroupChannel, comm: MPI.Intracomm) -> None:
    for spans in ([Span(0, 0, 12), Span(0, 11, 24)], [Span(0, 0, 12), Span(0, 12, 25)]):
        try:
            channel.reduce_scatter([torch.ones(24)], [[span] for span in spans])
        except InvariantError as error:
            say(f"refused: {error}")
    if channel.place == 1:
        pending = channel.all_gather([torch.zeros(24)], SLICES)
        try:
            pending.result()
        except InvariantError as error:
            say(f"refused: {error}")
        comm.Send(bytearray(1), 0, 3)
        loop_of(channel).wait_for(pending, "step")
    else:
        comm.Recv(bytearray(1), 1, 3)
        loop_of(channel).wait_for(channel.all_gather([torch.ones(24)], SLICES), "step")


def over_hosts(comm: MPI.Intracomm, hosts: Sequence[int]) -> None:
    place = comm.Get_rank()
    here = comm.Split(hosts[place], place)
    inner: GroupChannel = AloneChannel()
    if here.Get_size() > 1:
        inner = MpiChannel(here, is_spinning=False)
    over = MpiChannel(comm, is_spinning=False)
    channel = TwoLevelChannel(inner, over, hosts=hosts)
    result = finish(operations(channel, channel.duplicate()))
    is_right = result == expected(place, len(hosts), hosts)
    say(f"{place} on hosts {''.join(map(str, hosts))}: {is_right}")


def by_tier(comm: MPI.Intracomm) -> None:
    """As a job starts it."""

    def broadcast(data: bytes | None) -> bytes:
        return bytes(comm.bcast(data, root=0))

    channel = start(
        "mpi",
        index=comm.Get_rank(),
        size=comm.Get_size(),
        device=torch.device("cpu"),
        timeout_s=60.0,
        broadcast=broadcast,
        is_spinning=False,
        mpi=GroupMpi(comm=comm, takes_gpu_memory=lambda: False),
    )
    finish(iter([channel.agree("barrier")]))  # type: ignore[arg-type] # one operation
    say("by tier:", type(channel).__name__)
    stop(channel)


def one_ends(comm: MPI.Intracomm) -> None:
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    channel = MpiChannel(comm, is_spinning=False)
    if channel.place == 1:
        os.abort()
    try:
        loop_of(channel).wait_for(
            channel.reduce_scatter([torch.ones(24)], SLICES), "optimizer.step"
        )
    except TransportError as error:
        say(f"ended: {error}")
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    if os.environ.get("ENDS"):
        one_ends(world.Dup())
    mpi._LONGEST = int(os.environ.get("LONGEST", mpi._LONGEST))  # type: ignore[misc]
    for size in (2, 3, 4):
        comm = world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
        if comm != MPI.COMM_NULL:
            all_operations(comm)
    for hosts in ([0, 0, 1, 1], [0, 1, 0, 0]):
        over_hosts(world.Dup(), hosts)
    by_tier(world.Dup())


main()
