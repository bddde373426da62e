"""The spans of this rank's part in a job: where they go, and what its clock says against rank 0's.

    begin_trace(context)         # all ranks, when the job has begun: context.tracer is there
    end_trace(context)           # all ranks, when it is over

Clocks are compared over MPI, at both ends of the job: rank 0 asks each of the others in turn, some
times, and the least round trip counts (psdist.tracing.clocks). Who waits for its turn sleeps: there
may be fewer cores than ranks.
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

    from psdist.ranks.context import RankContext

_ROUND_TRIPS: Final = 20
_REST_S: Final = 5e-4
_TAG: Final = 9
_NUMBERS: Final = struct.Struct("<3q")


def begin_trace(context: RankContext) -> None:
    """This rank records spans from now on. Collective over all ranks of the job."""
    start = None
    if context.comm is not None:
        if context.clock_comm is None:
            context.clock_comm = context.comm.Dup()  # meets none of psdist's messages
        start = compare_clocks(context.clock_comm)
    about = _about(context, start)
    tracer = context.tracer = Tracer(context.run_directory.path, about)
    context.flushes.append(tracer.abandon)


def end_trace(context: RankContext) -> None:
    """The job is over, on all ranks."""
    tracer, context.tracer = context.tracer, None
    if tracer is not None:
        tracer.flush()
        # Where ranks may have died nobody knows who would answer.
        is_whole = context.clock_comm is not None and not context.config.max_deaths
        end = compare_clocks(context.clock_comm) if is_whole and context.clock_comm else None
        tracer.close(end=end)


def _about(context: RankContext, start: Offset | None) -> About:
    place, me = context.roles.places[context.rank], context.me
    role: Literal["server", "worker", "both"] = "worker" if is_worker(me) else "server"
    if context.comm is None:
        role = "both"
    return About(
        psdist=VERSION,
        rank=context.rank,
        num_ranks=len(context.roles.places),
        role=role,
        index=worker_of(me) if is_worker(me) else me,
        group=context.roles.group_of_worker[worker_of(me)] if is_worker(me) else None,
        host=place.host[:255],
        pid=os.getpid(),
        start=start,
    )


def compare_clocks(comm: MPI.Comm, *, clock: Callable[[], int] = time.monotonic_ns) -> Offset:
    """This rank's clock against rank 0's, now. Collective."""
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
    """That rank is there, and watches for nothing else."""
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
