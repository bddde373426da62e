"""The spans of this rank's part in a job: their file, and its clock compared with rank 0's.

    tracer = begin_trace(session)        # on all ranks, when the job has begun
    end_trace(session, tracer)           # on all ranks, when it has ended

Clocks are compared over MPI when the job begins and ends: rank 0 asks every other rank in turn,
several times, and uses the shortest round trip (psdist.tracing.clocks). A rank sleeps until its
turn, because there may be fewer cores than ranks.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

from psdist.protocol.ids import is_worker, worker_of
from psdist.tracing.clocks import Offset, RoundTrip, best
from psdist.tracing.files import About
from psdist.tracing.tracer import Tracer
from psdist.version import VERSION

if TYPE_CHECKING:  # at run time only inside functions: importing it starts MPI
    from mpi4py import MPI

    from psdist.ranks.session import JobSession

_ROUND_TRIPS: Final = 20
_REST_S: Final = 5e-4
_TAG: Final = 9
_NUMBERS: Final = struct.Struct("<3q")


def begin_trace(session: JobSession) -> Tracer:
    """Return the recorder of this rank's spans. Collective over all ranks of the job."""
    comm = session.rank.comms.clocks()
    start = None if comm is None else compare_clocks(comm)
    tracer = Tracer(session.run_directory.path, _about(session, start))
    session.exit.flushes.append(tracer.abandon)
    return tracer


def end_trace(session: JobSession, tracer: Tracer) -> None:
    """End the records. Collective over all ranks of the job."""
    tracer.flush()
    comm = session.rank.comms.clocks()
    # If ranks may have failed, it is unclear which of them would answer.
    end = None if comm is None or session.config.max_deaths else compare_clocks(comm)
    tracer.close(end=end)


def _about(session: JobSession, start: Offset | None) -> About:
    place, me = session.roles.places[session.rank.number], session.rank.me
    role: Literal["server", "worker", "both"] = "worker" if is_worker(me) else "server"
    if session.rank.is_alone:
        role = "both"
    return About(
        psdist=VERSION,
        rank=session.rank.number,
        num_ranks=len(session.roles.places),
        role=role,
        index=worker_of(me) if is_worker(me) else me,
        group=session.roles.group_of_worker[worker_of(me)] if is_worker(me) else None,
        host=place.host[:255],
        pid=os.getpid(),
        start=start,
    )


def compare_clocks(comm: MPI.Comm, *, clock: Callable[[], int] = time.monotonic_ns) -> Offset:
    """Return the offset of this rank's clock to rank 0's, now. Collective."""
    if comm.Get_rank() == 0:
        for rank in range(1, comm.Get_size()):
            _greet(comm, rank)
            found = best([_round_trip(comm, rank, clock) for _ in range(_ROUND_TRIPS)])
            numbers = _NUMBERS.pack(found.at_ns, found.offset_ns, found.bound_ns)
            comm.Send(bytearray(numbers), dest=rank, tag=_TAG)
        return Offset(at_ns=clock(), offset_ns=0, bound_ns=0)
    while not comm.Iprobe(source=0, tag=_TAG):
        time.sleep(_REST_S)
    message = bytearray(_NUMBERS.size)
    for _ in range(1 + _ROUND_TRIPS):
        comm.Recv(message, source=0, tag=_TAG)
        comm.Send(bytearray(_NUMBERS.pack(clock(), 0, 0)), dest=0, tag=_TAG)
    comm.Recv(message, source=0, tag=_TAG)
    at_ns, offset_ns, bound_ns = _NUMBERS.unpack(message)
    return Offset(at_ns=at_ns, offset_ns=offset_ns, bound_ns=bound_ns)


def _greet(comm: MPI.Comm, rank: int) -> None:
    """Wait until ``rank`` answers, so that the round trips do not include its sleep."""
    message = bytearray(_NUMBERS.size)
    comm.Send(message, dest=rank, tag=_TAG)
    while not comm.Iprobe(source=rank, tag=_TAG):
        time.sleep(_REST_S)
    comm.Recv(message, source=rank, tag=_TAG)


def _round_trip(comm: MPI.Comm, rank: int, clock: Callable[[], int]) -> RoundTrip:
    message = bytearray(_NUMBERS.size)
    sent_ns = clock()
    comm.Send(message, dest=rank, tag=_TAG)
    comm.Recv(message, source=rank, tag=_TAG)
    return sent_ns, _NUMBERS.unpack(message)[0], clock()
