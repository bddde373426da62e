"""What recording costs per event, and how long a check takes (CPU seconds;
docs/reference/history.md).

python -m tests.benchmarks.scale.history
"""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path
from time import process_time

import numpy as np

from psdist.commands.check import check
from psdist.history import (
    CHECKSUM_DTYPE,
    EVENT_DTYPE,
    NO_CHUNK,
    PUSH_DTYPE,
    USE_DTYPE,
    EventFlag,
    ServerLog,
    WorkerLog,
)
from psdist.history.writers import EventKind, History, RunRecord, slice_places
from tests.support.history.memory import ServerHistory, WorkerHistory
from tests.support.history.toy_run import even_slices


def measure_writers(path_dir: Path, num: int = 200_000) -> None:
    server, worker = ServerHistory(path_dir, 0), WorkerHistory(path_dir, 0)
    start = process_time()
    for clock in range(num):
        server.apply(3, 1, clock, 1.0, 0.5)
    print(f"apply     {(process_time() - start) / num * 1e6:6.2f} us")
    start = process_time()
    for clock in range(num):
        server.checksum(3, clock, worker=0, clock=clock)
    print(f"checksum  {(process_time() - start) / num * 1e6:6.2f} us")
    for num_chunks in (1, 64, 512):
        zeros = np.zeros(num_chunks, int)
        columns = np.arange(num_chunks), zeros, np.arange(num_chunks), zeros, zeros > 0, zeros
        start = process_time()
        for iteration in range(num // 40):
            worker.uses(iteration, *columns)
        took_us = (process_time() - start) / (num // 40) * 1e6
        print(f"uses      {took_us:6.2f} us for one iteration of {num_chunks} chunks")
    start = process_time()
    for iteration in range(num):
        worker.push(iteration, 1.0, 4.0, (), 16)
    print(f"push      {(process_time() - start) / num * 1e6:6.2f} us for one iteration")
    server.close()
    worker.close()


def in_step(
    *, mode: str, num_groups: int, per_group: int, num_chunks: int, num_servers: int, num: int
) -> History:
    """A run whose groups stay in step for ``num`` iterations, made as arrays."""
    owners = np.arange(num_chunks) % num_servers
    positions = np.zeros((num, num_chunks), np.uint64)
    servers = []
    for server in range(num_servers):
        mine = np.flatnonzero(owners == server)
        events = np.zeros(num_groups * (num * len(mine) + 2), EVENT_DTYPE)
        joins, leaves = events[:num_groups], events[-num_groups:]
        for members, kind, clock in ((joins, EventKind.JOIN, 0), (leaves, EventKind.LEAVE, num)):
            members["kind"], members["clock"], members["chunk"] = kind, clock, NO_CHUNK
            members["group"] = np.arange(num_groups)
            members["weight"], members["lr_scale"] = per_group, 1.0
        applies = events[num_groups:-num_groups].reshape(num, len(mine), num_groups)
        applies["kind"], applies["chunk"] = EventKind.APPLY, mine[None, :, None]
        applies["clock"], applies["group"] = np.arange(num)[:, None, None], np.arange(num_groups)
        applies["weight"] = per_group
        applies["lr_scale"] = 1.0 if mode == "sync" else 1.0 / num_groups
        applies["flags"][:, :, -1 if mode == "sync" else slice(None)] = EventFlag.LAST
        before = np.arange(num)[:, None] - 1
        positions[:, mine] = np.where(
            before < 0, 1, before * len(mine) + np.arange(len(mine)) + 2
        ) * np.uint64(num_groups)
        no_sums = np.zeros(0, CHECKSUM_DTYPE)
        servers.append(ServerLog(server=server, events=events, checksums=no_sums, is_complete=True))
    uses = np.zeros((num, num_chunks), USE_DTYPE)
    uses["iteration"], uses["chunk"] = np.arange(num)[:, None], np.arange(num_chunks)
    uses["server"], uses["position"] = owners, positions
    uses["reply"] = np.maximum(0, np.arange(num) - 1)[:, None]
    pushes = np.zeros(num, PUSH_DTYPE)
    pushes["iteration"], pushes["chunk"] = np.arange(num), NO_CHUNK
    pushes["own"], pushes["weight"] = 1.0, per_group
    num_workers = num_groups * per_group
    run = RunRecord(
        psdist="bench",
        mode=mode,  # type: ignore[arg-type] # a name from the table below
        staleness=2 if mode == "ssp" else None,
        groups=tuple(
            tuple(range(group * per_group, (group + 1) * per_group)) for group in range(num_groups)
        ),
        slices=slice_places(lambda size: even_slices(num_chunks, size), [[0] * per_group])
        * num_groups,
        num_servers=num_servers,
        num_chunks=num_chunks,
        owners=tuple(owners.tolist()),
    )
    logs = (
        WorkerLog(worker=i, uses=uses.ravel(), pushes=pushes, is_complete=True)
        for i in range(num_workers)
    )
    return History(run=run, servers=tuple(servers), workers=tuple(logs))


def measure_check(**shape: int | str) -> None:
    history = in_step(**shape)  # type: ignore[arg-type] # the shapes of the table below
    start = process_time()
    report = check(history)
    took_s = process_time() - start
    assert report.proved, report.violations
    print(
        f"check     {took_s:6.1f} s for {report.num_uses:,} uses, {report.num_applies:,} applies, "
        f"{shape['num_groups']} groups, {shape['mode']}"
    )


if __name__ == "__main__":
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    with tempfile.TemporaryDirectory() as path_dir:
        measure_writers(Path(path_dir))
    small = {"per_group": 1, "num_chunks": 64}
    measure_check(mode="ssp", num_groups=4, num_servers=2, num=4000, **small)
    measure_check(mode="sync", num_groups=4, num_servers=2, num=4000, **small)
    measure_check(mode="ssp", num_groups=256, num_servers=8, num=64, **small)
    measure_check(mode="ssp", num_groups=8, per_group=4, num_chunks=320, num_servers=4, num=1000)
