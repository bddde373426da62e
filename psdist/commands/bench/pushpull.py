"""``psdist bench pushpull``: push + pull, and the raw MPI exchange of the same bytes.

    mpirun -n 2 --mca pml ob1 --mca btl self,sm psdist bench pushpull --sizes 4KiB,1MiB

Each repetition does one push + pull through psdist (servers apply SGD), then the raw exchange
twice: every worker sends each server its bytes and gets as many back, in one message and in
psdist's chunks. The faster raw way is the limit. The mode is async: waiting for others is not what
this measures. Each size is a job of its own: the next meets none of its messages. Over several
hosts the table has what the plan predicts of the slowest link (PSDIST_HOSTS_PLACEMENT,
PSDIST_HOSTS_NETWORK).
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from psdist.commands.bench import (
    echo,
    exchange,
    measured_on,
    plot,
    show,
    size_text,
    time_text,
    write_result,
)
from psdist.commands.bench.between import alone, between_ranks
from psdist.commands.bench.sleeping import Shards
from psdist.protocol.control import Setup
from psdist.protocol.ids import COORDINATOR, is_worker, worker_of
from psdist.protocol.memory import allocate, as_tensor
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.ranks.agreement import allgather
from psdist.ranks.rank import Rank
from psdist.ranks.wire import credits_of
from psdist.servers.loop import ServerLoop
from psdist.servers.parts import CoordinatorSeat, Reports, plain_loop
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.coordinator import CoordinatorAction, EndJob
from psdist.servers.protocol.coordinator_assembly import assemble
from psdist.servers.set_store import ServerOptions, ShardStore
from psdist.servers.shard.tensors import TensorShard
from psdist.workers.assembly import make_loop
from psdist.workers.loop import WorkerLoop
from psdist.workers.model.saving import PlainMemory
from psdist.workers.protocol import Seat

if TYPE_CHECKING:  # at run time only inside functions: importing it starts MPI
    from mpi4py import MPI

_HYPER = pack_hyperparameters([{"lr": 0.001}])
_WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size: medians over the repetitions, of the slowest worker, in seconds."""

    num_bytes: int
    chunks: int
    push_pull_s: float
    raw_whole_s: float
    raw_chunks_s: float
    predicted_s: float
    """Prediction of the plan for the slowest link; 0 if no link is crossed."""
    all_push_pull_s: tuple[float, ...]
    all_raw_whole_s: tuple[float, ...]
    all_raw_chunks_s: tuple[float, ...]

    @property
    def raw_s(self) -> float:
        """The limit: the faster raw way."""
        return min(self.raw_whole_s, self.raw_chunks_s)

    @property
    def share_of_raw(self) -> float:
        return self.raw_s / self.push_pull_s


def pushpull(
    sizes: list[int],
    repeats: int,
    servers: int,
    json_path: Path | None,
    plot_path: Path | None = None,
) -> int:
    """Run the benchmark on all ranks; the exit status."""
    return between_ranks(
        {"mode": "async", "servers": str(servers), "group": "rank"},
        why_not=alone("bench pushpull", "mpirun -n 2"),
        run=lambda context: _measure_all(context, sizes, repeats, json_path, plot_path),
    )


def _measure_all(
    context: Rank,
    sizes: list[int],
    repeats: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> int:
    import torch

    torch.set_num_threads(max(1, int(context.core_share)))
    assert context.comms.world is not None
    between = context.comms.world.Dup()  # its barriers never meet psdist's messages
    rows: list[Row] = []
    for num_bytes in sizes:
        side = _WorkerSide if is_worker(context.me) else _ServerSide
        times = side(context, between, num_bytes).measure(repeats)
        row = _row(between, context, num_bytes, times)
        if context.number == 0:
            rows.append(row)
            print(f"  {size_text(num_bytes)}: {row.share_of_raw:.2f} of raw", flush=True)
    if context.number == 0:
        _report(context, rows, repeats, json_path)
        if plot_path is not None:
            plot.write(plot_path, drawn(context, rows, repeats))
    context.exit.close()
    return 0


class _Side(Shards):
    """The part of both sides: the model of one tensor, in psdist's chunks."""

    def __init__(self, context: Rank, between: MPI.Comm, num_bytes: int) -> None:
        super().__init__(context, [max(num_bytes // 4, 1)])
        self.context, self.between = context, between


class _Failures(Reports):
    """Ends the job if a worker reports an error."""

    def __init__(self, context: Rank) -> None:
        self._context = context

    def on_action(self, action: CoordinatorAction) -> None:
        if isinstance(action, EndJob):
            failure = action.failure
            self._context.exit.abort(failure.heading, failure.text, failure.exit_status)


class _ServerSide(_Side):
    def measure(self, repeats: int) -> list[list[float]]:
        context, roles = self.context, self.context.roles
        buffers = context.session.config.receive_buffers
        coordinator = assemble(num_workers=roles.num_workers, num_servers=roles.num_servers)
        seat = CoordinatorSeat(coordinator, _Failures(context))
        loop = plain_loop(
            context.session.transport,
            lambda _set_index, _resumed_up_to: assemble_core(
                server=context.me, make_rule=rule_for("async"), groups=roles.groups
            ),
            ServerOptions(
                server=context.me,
                shard_weights=roles.shard_weights,
                modes=("async",),
                receive_buffers=None if buffers == "auto" else buffers,
            ),
            ShardStore(TensorShard),
            seats=[seat] if context.me == COORDINATOR else [],
        )
        waiting = context.waiting(has_deadline=False)
        self._serve(loop, waiting)  # set-up
        chunks = self.chunks_of(context.me)
        whole = [allocate(self.bytes_of(context.me)) for _ in roles.worker_ranks]
        parts = [
            [allocate(self.partition.chunks[chunk].num_bytes) for chunk in chunks]
            for _ in roles.worker_ranks
        ]
        for _ in range(repeats + _WARM_UP):
            self._serve(loop, waiting)
            self.between.Barrier()
            echo(self.between, [[memory] for memory in whole], roles.worker_ranks)
            self.between.Barrier()
            echo(self.between, parts, roles.worker_ranks)
        loop.run(waiting)
        return []

    def _serve(self, loop: ServerLoop, waiting: Any) -> None:
        """Serve until every worker has ended its part of the repetition."""
        self.between.Barrier()
        is_over = self.between.Ibarrier()
        while not is_over.Test():
            if loop.turn():
                waiting.reset()
            else:
                waiting.idle("messages")


class _WorkerSide(_Side):
    def measure(self, repeats: int) -> list[list[float]]:
        context, partition = self.context, self.partition
        num_servers, worker = context.roles.num_servers, worker_of(context.me)
        memory = PlainMemory(partition)
        for chunk in partition.chunks:
            as_tensor(memory.gradient_bytes(chunk), "float32", chunk.length).fill_(1.0)
        seat = Seat(worker=worker, group=worker, members=(worker,), num_servers=num_servers)
        loop = make_loop(context.session.transport, seat, waiting=context.waiting())
        loop.take_slice(
            partition,
            owners=self.owners,
            credits=credits_of(context.session.config, context.roles.num_workers, partition),
            frames=memory,
        )
        self._in_turn(lambda: self._set_up(loop))
        clock = 0
        times: list[list[float]] = [[], [], []]

        def push() -> None:
            loop.push(clock=clock, hyper=_HYPER, absent=(), weight=1.0, empty=())

        in_chunks = [
            [
                (memory.gradient_bytes(chunk), memory.parameter_bytes(chunk))
                for chunk in partition.chunks
                if self.owners[chunk.index] == server
            ]
            for server in range(num_servers)
        ]
        whole = [
            (allocate(self.bytes_of(server)), allocate(self.bytes_of(server)))
            for server in range(num_servers)
        ]
        for data, _ in whole:  # until it is written, all of it is one page of zeros
            as_tensor(data, "float32", len(data) // 4).fill_(1.0)
        for _ in range(repeats + _WARM_UP):
            times[0].append(self._in_turn(push))
            clock += 1
            self.between.Barrier()
            pairs = [[pair] for pair in whole]
            times[1].append(exchange(self.between, pairs, context.roles.server_ranks))
            self.between.Barrier()
            times[2].append(exchange(self.between, in_chunks, context.roles.server_ranks))
        loop.finish({})
        loop.wait_until_stopped(context.waiting())
        return [each[_WARM_UP:] for each in times]

    def _in_turn(self, run: Callable[[], None]) -> float:
        """``run()`` while the servers serve; the seconds that it took."""
        self.between.Barrier()
        before_s = time.perf_counter()
        run()
        took_s = time.perf_counter() - before_s
        self.between.Ibarrier().Wait()
        return took_s

    def _set_up(self, loop: WorkerLoop) -> None:
        setup = Setup(partition=self.partition.encode(), optimizer="torch.optim.SGD", hyper=_HYPER)
        loop.join(setup if loop.core.seat.is_chief else None)
        loop.pull(clock=0, chunks=loop.core.mine)


def _row(comm: MPI.Comm, context: Rank, num_bytes: int, times: list[list[float]]) -> Row:
    """The slowest worker of each repetition; rank 0 has the result, others a copy."""
    everybody = [json.loads(each) for each in allgather(comm, json.dumps(times).encode())]
    workers = [mine for mine in everybody if mine]  # servers measure nothing
    slowest = [
        tuple(max(each) for each in zip(*(mine[way] for mine in workers), strict=True))
        for way in range(3)
    ]
    partition = _Side(context, comm, num_bytes).partition
    return Row(
        num_bytes=num_bytes,
        chunks=len(partition.chunks),
        push_pull_s=statistics.median(slowest[0]),
        raw_whole_s=statistics.median(slowest[1]),
        raw_chunks_s=statistics.median(slowest[2]),
        predicted_s=_predicted_s(context, num_bytes),
        all_push_pull_s=slowest[0],
        all_raw_whole_s=slowest[1],
        all_raw_chunks_s=slowest[2],
    )


def _predicted_s(context: Rank, num_bytes: int) -> float:
    plan = context.bootstrap.plan
    return 0.0 if plan is None else plan.cost_s * num_bytes / plan.model_bytes


def drawn(context: Rank, rows: list[Row], repeats: int) -> str:
    """The table as a plot."""
    sizes = [
        plot.Size(
            size_text(row.num_bytes),
            [
                plot.Way("push + pull", row.all_push_pull_s),
                plot.Way("raw MPI, whole", row.all_raw_whole_s),
                plot.Way("raw MPI, chunks", row.all_raw_chunks_s),
            ],
            limit_s=row.predicted_s or None,
        )
        for row in rows
    ]
    note = (
        f"{context.roles.num_servers} servers, {context.roles.num_workers} workers; "
        f"{repeats} repetitions, {time.strftime('%Y-%m-%d')}"
    )
    return plot.plot("Push + pull, and the raw exchange of the same bytes", sizes, note=note)


def _report(context: Rank, rows: list[Row], repeats: int, json_path: Path | None) -> None:
    from mpi4py import MPI

    facts = measured_on(MPI.Get_library_version())
    components = {key: os.environ.get(f"OMPI_MCA_{key}", "default") for key in ("pml", "btl")}
    table = Table(
        title=(
            f"push + pull, {context.roles.num_servers} servers, {context.roles.num_workers} "
            f"workers, {facts['mpi']}, pml {components['pml']}, btl {components['btl']}; "
            f"medians of {repeats}"
        )
    )
    names = ["bytes", "chunks", "push + pull", "raw, whole", "raw, chunks", "above raw", "of raw"]
    is_predicted = any(row.predicted_s for row in rows)
    for name in [*names, "predicted"] if is_predicted else names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            size_text(row.num_bytes),
            str(row.chunks),
            time_text(row.push_pull_s),
            time_text(row.raw_whole_s),
            time_text(row.raw_chunks_s),
            time_text(row.push_pull_s - row.raw_s),
            f"{row.share_of_raw:.2f}",
            *([time_text(row.predicted_s)] if is_predicted else []),
        )
    show(table, width=100)
    if json_path is None:
        json_path = context.session.run_directory.path / "pushpull.json"
    result = {
        **facts,
        "components": components,
        "placement": context.session.config.placement,
        "servers": context.roles.num_servers,
        "workers": context.roles.num_workers,
        "repeats": repeats,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    write_result(json_path, result)
