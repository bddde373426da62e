"""``psdist bench group``: the cost of a group's part of an iteration, compared with torch.

    mpirun -n 3 psdist bench group --sizes 1MiB,16MiB          # 1 server, a group of 2 workers

In each repetition every way is timed once, between the same ranks: *exchange*, reduce-scatter of
the gradients and all-gather of the parameters as a job's group does them, in shared memory, over
gloo and over MPI; ``MPI_Allreduce`` and gloo's all-reduce of as many bytes; *step*, a whole
iteration of a small network of that size, psdist's and DistributedDataParallel's, by bucket size.

Small sizes are timed several times in a row, so that the barrier before counts little. The slowest
worker counts. A speed-up is the median over the repetitions. Each repetition measures both.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from psdist.commands.bench import measured_on, plot, show, size_text, write_result
from psdist.commands.bench.between import between_ranks
from psdist.ranks.agreement import allgather
from psdist.ranks.rank import Rank

if TYPE_CHECKING:
    import torch

    from psdist.job import Job
    from psdist.workers.group.channel import GroupChannel, Pending

SHARED, TORCH, MPI_TIER = "exchange, shared memory", "exchange, gloo", "exchange, MPI"
MPI_ALLREDUCE, ALLREDUCE = "MPI_Allreduce", "gloo all-reduce"
STEP = "step, psdist"
DDP_STEPS = {f"step, DDP, {size} MiB": size for size in (4, 25, 100)}
"""By way: the size of DDP's buckets, ``bucket_cap_mb``."""
WAYS = (SHARED, TORCH, MPI_TIER, MPI_ALLREDUCE, ALLREDUCE, STEP, *DDP_STEPS)

_WARM_UP = 3
_ROW_BYTES = 16 << 20
"""Maximum bytes that are exchanged in a row."""
_ROW_CALLS = 16
"""Maximum exchanges in a row."""
_REST_S = 0.02
_LAYERS = 4
_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size: seconds of each way in each repetition, of the slowest worker."""

    num_bytes: int
    times_s: dict[str, list[float]]

    def faster(self, way: str, than: str) -> float:
        """How many times as fast ``way`` is; the median of the repetitions."""
        pairs = zip(self.times_s[than], self.times_s[way], strict=True)
        return statistics.median(slow / fast for slow, fast in pairs)

    def best_ddp(self) -> str:
        """Return the way of DDP whose median is least."""
        return min(DDP_STEPS, key=lambda way: statistics.median(self.times_s[way]))


def group(
    sizes: list[int], repeats: int, json_path: Path | None, plot_path: Path | None = None
) -> int:
    """Run the benchmark on all ranks; the exit status."""
    return between_ranks(
        {"servers": "1", "group": "node", "progress": "off"},
        why_not=_why_not,
        run=lambda context: _take_part(context, sizes, repeats, json_path, plot_path),
    )


def _why_not(context: Rank) -> str:
    if not context.is_alone and min(map(len, context.roles.groups)) > 1:
        return ""
    return (
        "bench group measures between the workers of a group: every host needs two workers or "
        "more, and a server; start it as mpirun -n 3 psdist bench group"
    )


def _take_part(
    context: Rank,
    sizes: list[int],
    repeats: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> int:
    from psdist import joining
    from psdist.ranks import server

    if context.role == "server":
        return server.serve(context)
    job = joining.init()
    rows = _measure_all(context, job, sizes, repeats)
    status = joining.finish()
    if job.is_chief:
        _report(context, rows, repeats, json_path)
        if plot_path is not None:
            plot.write(plot_path, drawn(rows, note=_where(context, repeats)))
    return status


def _measure_all(context: Rank, job: Job, sizes: list[int], repeats: int) -> list[Row]:
    import torch.distributed as dist

    from psdist.workers.early.overlap import WATCHED_OF_SETS
    from psdist.workers.group.mpi import MpiChannel
    from psdist.workers.group.process_group import ProcessGroupChannel
    from psdist.workers.group.shared_memory import connect as share

    over = ProcessGroupChannel(place=dist.get_rank(), size=dist.get_world_size())
    is_spinning = context.waiting().is_spinning
    shared, why_not = share(over, is_spinning=is_spinning)
    assert context.comms.group is not None
    over_mpi = MpiChannel(context.comms.group.Dup(), is_spinning=is_spinning)
    if shared is None and job.is_chief:
        print(f"  no shared memory in this group: {why_not}", flush=True)
    assert context.comms.workers is not None
    rows = []
    for num_bytes in sizes:
        ways = _exchanges(context, over, over_mpi, shared, num_bytes) | _steps(job, num_bytes)
        for _ in range(WATCHED_OF_SETS):  # overlap watches: no later step costs as much
            ways[STEP]()
        calls = max(1, min(_ROW_CALLS, _ROW_BYTES // num_bytes))
        times = _measure(ways, repeats, calls=calls)
        told = allgather(context.comms.workers, json.dumps(times).encode())
        everybody = [json.loads(each) for each in told]
        slowest = {
            way: [max(at) for at in zip(*(mine[way] for mine in everybody), strict=True)]
            for way in times
        }
        rows.append(Row(num_bytes=num_bytes, times_s=slowest))
        if job.is_chief:
            print(f"  {size_text(num_bytes)}: measured", flush=True)
    if shared is not None:
        shared.close()
    over_mpi.close()
    return rows


def _measure(
    ways: dict[str, Callable[[], object]], repeats: int, *, calls: int
) -> dict[str, list[float]]:
    """Seconds of a call of each way in each repetition, as this worker saw them; ``calls`` are made
    in a row."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + _WARM_UP):
        for way, run in ways.items():
            dist.barrier()
            began_s = time.perf_counter()
            for _ in range(calls):
                run()
            if repeat >= _WARM_UP:
                times[way].append((time.perf_counter() - began_s) / calls)
    return times


def _exchanges(
    context: Rank,
    over: GroupChannel,
    over_mpi: GroupChannel,
    shared: GroupChannel | None,
    num_bytes: int,
) -> dict[str, Callable[[], object]]:
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    from psdist.protocol.memory import allocate, as_bytes, as_tensor
    from psdist.protocol.partition import ALIGN, Span

    length = max(num_bytes // 4, 1)
    bounds = [length * place // over.size // ALIGN * ALIGN for place in range(over.size)]
    bounds.append(length)
    slices = [[Span(0, *bounds[place : place + 2])] for place in range(over.size)]
    flat = torch.ones(length)

    def exchange(channel: GroupChannel) -> Callable[[], object]:
        gradients, values = (
            as_tensor(take(4 * length), "float32", length).fill_(1.0)
            for take in (channel.allocate, allocate)
        )

        def run() -> None:
            _finish(channel.reduce_scatter([gradients], slices))
            _finish(channel.all_gather([values], slices))

        return run

    in_group = context.comms.group
    assert in_group is not None
    ways: dict[str, Callable[[], object]] = {} if shared is None else {SHARED: exchange(shared)}
    return ways | {
        TORCH: exchange(over),
        MPI_TIER: exchange(over_mpi),
        MPI_ALLREDUCE: lambda: in_group.Allreduce(MPI.IN_PLACE, [as_bytes(flat), MPI.FLOAT]),
        ALLREDUCE: lambda: dist.all_reduce(flat),
    }


def _finish(pending: Pending[None]) -> None:
    while not pending.is_done():
        pending.wait(_REST_S)
    pending.result()


def _steps(job: Job, num_bytes: int) -> dict[str, Callable[[], object]]:
    import torch

    width = max(int((num_bytes / 4 / _LAYERS) ** 0.5), 1)

    def network() -> torch.nn.Module:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]
        return torch.nn.Sequential(*layers)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        batch = torch.ones(_BATCH, width)

        def run() -> None:
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()

        return run

    ours = network()
    steps = {STEP: step(*job.prepare(ours, torch.optim.SGD(ours.parameters(), lr=1e-3)))}
    for way, size in DDP_STEPS.items():
        ddp = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=size)
        steps[way] = step(ddp, torch.optim.SGD(ddp.parameters(), lr=1e-3))
    return steps


def drawn(rows: Sequence[Row], *, note: str) -> str:
    """The table as a plot."""
    sizes = [
        plot.Size(
            size_text(row.num_bytes),
            [plot.Way(way, row.times_s[way]) for way in WAYS if way in row.times_s],
        )
        for row in rows
    ]
    return plot.plot("A group's part of an iteration, and torch's", sizes, note=note)


def _where(context: Rank, repeats: int) -> str:
    groups = ", ".join(str(len(each)) for each in context.roles.groups)
    return (
        f"groups of {groups} workers and 1 server, {len(context.roles.places)} ranks, "
        f"{os.cpu_count()} cores; {repeats} repetitions, {time.strftime('%Y-%m-%d')}"
    )


def _report(context: Rank, rows: Sequence[Row], repeats: int, json_path: Path | None) -> None:
    from mpi4py import MPI

    facts = measured_on(MPI.Get_library_version())
    roles = context.roles
    cores = os.cpu_count() or 1
    ranks = len(roles.places)
    load = "more ranks than cores" if context.core_share < 1 else "a core for each rank"
    table = Table(
        title=(
            f"groups of {', '.join(str(len(each)) for each in roles.groups)} workers and 1 server, "
            f"{ranks} ranks, {cores} cores: {load}; {facts['mpi']}; median and quartiles of "
            f"{repeats}"
        )
    )
    for name in ("bytes", "way", "time", "quartiles", "x as fast"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in rows:
        for way in WAYS:
            if way in row.times_s:
                table.add_row(size_text(row.num_bytes), way, *_columns(row, way))
        table.add_section()
    show(table, width=120)
    print(f"x as fast: as {ALLREDUCE}, or for a step as DDP with its best buckets")
    if json_path is None:
        json_path = context.session.run_directory.path / "group.json"
    result = {
        **facts,
        "groups": [len(each) for each in roles.groups],
        "ranks": ranks,
        "more_ranks_than_cores": context.core_share < 1,
        "repeats": repeats,
        "rows": [asdict(row) for row in rows],
    }
    write_result(json_path, result)


def _columns(row: Row, way: str) -> tuple[str, str, str]:
    times = row.times_s[way]
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    than = row.best_ddp() if way in (STEP, *DDP_STEPS) else ALLREDUCE
    return (
        f"{middle * 1e3:.2f} ms",
        f"{low * 1e3:.2f} to {high * 1e3:.2f}",
        "" if way == than else f"{row.faster(way, than):.2f}",
    )
