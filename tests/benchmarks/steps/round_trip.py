"""What a push + pull costs one process that is both the worker and the server.

    mpirun -n 1 --mca pml ob1 --mca btl self,sm python -m tests.benchmarks.steps.round_trip
    ... python -m tests.benchmarks.steps.round_trip --functions        # and where the bytecodes go

Both ends are real: loops, state machines and :class:`MpiTransport`, over two communicators of one
rank, one for each direction. They take turns, so that nobody waits: what is left is work.
Bytecodes executed inside psdist are the same in every run; CPU time is the least of many blocks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

from mpi4py import MPI

from psdist.protocol.control import Setup
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.memory import as_tensor
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.partition import Partition, Piece
from psdist.servers.parts import plain_loop
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.set_store import ServerOptions, ShardStore
from psdist.servers.shard.tensors import TensorShard
from psdist.transport.mpi import MpiTransport
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import make_loop
from psdist.workers.loop import WorkerLoop
from psdist.workers.model.saving import PlainMemory
from psdist.workers.protocol import Seat

_HYPER = pack_hyperparameters([{"lr": 0.001}])
_WARM_UP, _COUNTED = 20, 10
_BLOCKS, _BLOCK = 60, 200


class _End:
    """One end of two communicators of one rank: sends on the one and receives on the other, as
    MpiTransport asks one communicator between two ranks to."""

    def __init__(self, out: MPI.Comm, into: MPI.Comm, duplicate: _End | None = None) -> None:
        self.Isend, self.Get_attr = out.Isend, out.Get_attr
        self.Irecv, self.Improbe = into.Irecv, into.Improbe
        self.Get_rank = lambda: 1
        self.Dup = lambda: duplicate


def _transports() -> tuple[MpiTransport, MpiTransport]:
    """The worker's and the server's."""
    there, back = MPI.COMM_SELF.Dup(), MPI.COMM_SELF.Dup()
    payload_there, payload_back = MPI.COMM_SELF.Dup(), MPI.COMM_SELF.Dup()

    def transport(end: _End, me: int, other: int) -> MpiTransport:
        roles: Any = SimpleNamespace(
            rank_of_peer={other: 0, me: 1},
            peer_of_rank={0: other, 1: me},
            peers_of_rank={0: (other,), 1: (me,)},
        )
        comm: Any = end
        return MpiTransport(comm, roles)

    worker = _End(there, back, _End(payload_there, payload_back))
    server = _End(back, there, _End(payload_back, payload_there))
    return (
        transport(worker, worker_id(0), server_id(0)),
        transport(server, server_id(0), worker_id(0)),
    )


class RoundTrip:
    def __init__(self, num_bytes: int) -> None:
        piece = Piece(
            name="tensor", shape=(num_bytes // 4,), stride=(1,), dtype="float32", optimizer_group=0
        )
        partition = Partition.cut([piece], chunk_bytes=None)
        assert len(partition.chunks) == 1
        of_worker, of_server = _transports()
        waiting = Waiting(is_spinning=True)
        self.server = plain_loop(
            of_server,
            lambda _set_index, _resumed_up_to: assemble_core(
                server=0, make_rule=rule_for("async"), groups=[(0,)]
            ),
            ServerOptions(server=0, shard_weights=(1.0,), modes=("async",), receive_buffers=None),
            ShardStore(TensorShard),
        )
        memory = PlainMemory(partition)
        for chunk in partition.chunks:
            as_tensor(memory.gradient_bytes(chunk), "float32", chunk.length).fill_(1.0)
        seat = Seat(worker=0, group=0, members=(0,), num_servers=1)
        self.worker: WorkerLoop = make_loop(of_worker, seat, waiting=waiting)
        self.worker.take_slice(partition, owners=(0,), credits=4, frames=memory)
        setup = Setup(partition=partition.encode(), optimizer="torch.optim.SGD", hyper=_HYPER)
        self.worker.begin_setup(setup)
        self.worker.begin_register()
        self._until(lambda: not self.worker.core.membership.is_joining)
        self.clock = 0

    def _until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.server.turn()
            self.worker.turn()

    def push(self) -> None:
        self.worker.begin_push(clock=self.clock, hyper=_HYPER, absent=(), weight=1.0, empty=())
        wait = self.worker.wait_for_replies()
        while not wait.is_done():
            self.server.turn()
            self.worker.turn(wait.is_done)
        self.clock += 1


def bytecodes(trip: RoundTrip) -> Counter[str]:
    """By function, per push + pull."""
    counts: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "call":
            if not frame.f_globals.get("__name__", "").startswith("psdist"):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode":
            module = frame.f_globals["__name__"]
            counts[f"{module}.{frame.f_code.co_qualname}"] += 1
        return trace

    for _ in range(_WARM_UP):
        trip.push()
    sys.settrace(trace)
    try:
        for _ in range(_COUNTED):
            trip.push()
    finally:
        sys.settrace(None)
    return counts


def least_us(trip: RoundTrip) -> float:
    """CPU time of a push + pull, both ends."""
    blocks = []
    for _ in range(_BLOCKS):
        before_s = time.process_time()
        for _ in range(_BLOCK):
            trip.push()
        blocks.append((time.process_time() - before_s) / _BLOCK)
    return min(blocks) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--functions", action="store_true")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    for num_bytes in (4096, 65536):
        trip = RoundTrip(num_bytes)
        counts = bytecodes(trip)
        print(
            f"{num_bytes} bytes: {counts.total() / _COUNTED:.0f} bytecodes, "
            f"{least_us(trip):.1f} us of CPU time"
        )
        if arguments.functions:
            for name, count in counts.most_common(60):
                print(f"  {count / _COUNTED:7.0f}  {name}")


if __name__ == "__main__":
    main()
