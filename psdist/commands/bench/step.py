"""``psdist bench step``: a training step beside DDP, MPI_Allreduce, and the raw exchange.

    srun --mpi=pmix -N 4 --ntasks-per-node=2 psdist bench step --size 64MiB --compute 0

In the same run, on the same ranks, in turns:

* ``job.prepare`` and ``step()`` as a user has them, in the mode that is set (sync);
* DistributedDataParallel over gloo between the workers, as it comes and with its fp16 hook;
* MPI_Allreduce of the bytes between the workers;
* the raw exchange: every worker sends each server its part of the bytes and gets as many back, in
  one message and in psdist's chunks, each echoed when it has arrived. The faster is the limit.

The model is layers with real parameters that *sleep* in forward and twice as long in backward:
they stand for accelerators, which leave the cores to communication. A repetition counts as its
slowest worker. What the hosts' interfaces have sent is counted, so that it is seen what carried
the bytes. Every worker is a group: DDP needs torch's default process group for all of them.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rich.console import Console
from rich.table import Table

from psdist.commands.bench.between import alone, between_ranks
from psdist.commands.bench.raw import echo, exchange, size_text, time_text
from psdist.commands.bench.sleeping import Sleepers
from psdist.protocol.ids import REGISTRAR, is_worker, worker_of
from psdist.protocol.memory import allocate
from psdist.protocol.partition import Partition, Piece
from psdist.ranks.agreement import allgather
from psdist.ranks.context import RankContext
from psdist.ranks.lobby import leave, wait_for_job
from psdist.ranks.server import build_loop
from psdist.servers.loop import ServerLoop
from psdist.servers.protocol.lobby import Lobby

if TYPE_CHECKING:  # at run time only inside functions: importing it starts MPI
    from mpi4py import MPI

_WARM_UP: Final = 3
_REST_S: Final = 5e-4
"""Ranks that wait for others' turns sleep: there may be fewer cores than ranks."""
_LEARNING_RATE: Final = 1e-3

RAW_WHOLE, RAW_CHUNKS = "raw MPI, whole", "raw MPI, chunks"
ALLREDUCE, PSDIST = "MPI_Allreduce", "psdist step"
DDP, DDP_FP16 = "DDP (gloo) step", "DDP (gloo, fp16 hook) step"
WAYS: Final = (RAW_WHOLE, RAW_CHUNKS, ALLREDUCE, PSDIST, DDP, DDP_FP16)
_WITH_SERVERS: Final = (RAW_WHOLE, RAW_CHUNKS, PSDIST)

Compute: TypeAlias = tuple[float, bool]
"""How long the layers of a step sleep: seconds, or (True) so many times the raw exchange."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    num_bytes: int
    layers: int
    compute: Compute
    repeats: int
    servers: int | None
    json_path: Path | None


def step(options: StepOptions) -> int:
    """Run the benchmark on all ranks; the exit status."""
    settings = {"group": "rank"}
    if options.servers is not None:
        settings["servers"] = str(options.servers)
    return between_ranks(
        settings,
        why_not=alone("bench step", "mpirun -n 4"),
        run=lambda context: _measure(context, options),
    )


def _measure(context: RankContext, options: StepOptions) -> int:
    import torch

    torch.set_num_threads(max(1, int(context.core_share)))
    assert context.comm is not None
    between = context.comm.Dup()  # its barriers never meet psdist's messages
    among = between.Split(int(is_worker(context.me)), context.rank)
    kind = _WorkerSide if is_worker(context.me) else _ServerSide
    side = kind(context, between, among, options)
    mine = side.measure()
    everybody = [json.loads(each) for each in allgather(between, json.dumps(mine).encode())]
    if context.rank == 0:
        report(_result(context, options, everybody), options)
    side.leave()
    return 0


class _Side:
    """What both sides share: the bytes, cut as psdist cuts the model, and the turns."""

    def __init__(
        self, context: RankContext, between: MPI.Comm, among: MPI.Comm, options: StepOptions
    ) -> None:
        """``among``: the ranks of this role alone."""
        self.context, self.between, self.among, self.options = context, between, among, options
        self.sizes = layer_sizes(options.num_bytes, options.layers)
        self.partition = cut(self.sizes, context.config.chunk_bytes)
        self.owners = self.partition.shard(context.roles.shard_weights)
        self.sent = dict.fromkeys(WAYS, 0)
        host = context.roles.places[context.rank].host
        ranks = [place.rank for place in context.roles.places if place.host == host]
        self._counts_for_host = context.rank == min(ranks)

    def chunks_of(self, server: int) -> list[int]:
        return [chunk for chunk, owner in enumerate(self.owners) if owner == server]

    def bytes_of(self, server: int) -> int:
        return sum(self.partition.chunks[chunk].num_bytes for chunk in self.chunks_of(server))

    def meet(self) -> None:
        """All ranks are here; who waits sleeps."""
        meeting = self.between.Ibarrier()
        while not meeting.Test():
            time.sleep(_REST_S)

    def turns(self, ways: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
        """Every way in its turn, so often; the seconds that each took."""
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, run in ways.items():
                self.meet()
                before = sent_bytes() if self._counts_for_host else 0
                self.meet()
                times[way].append(run())
                self.meet()
                if self._counts_for_host:
                    self.sent[way] += sent_bytes() - before
        return times


class _ServerSide(_Side):
    def measure(self) -> dict[str, Any]:
        context, roles = self.context, self.context.roles
        self._lobby: Lobby | None = None
        if context.me == REGISTRAR:
            self._lobby = Lobby(num_workers=roles.num_workers, num_servers=roles.num_servers)
        wait_for_job(context, self._lobby)
        self._loop, self._reporter = build_loop(context, context.transport)
        self._waiting = context.waiting(has_deadline=False)
        self._serve()  # set-up
        whole = [[allocate(self.bytes_of(context.me))] for _ in roles.worker_ranks]
        parts = [
            [allocate(self.partition.chunks[i].num_bytes) for i in self.chunks_of(context.me)]
            for _ in roles.worker_ranks
        ]
        ways: dict[str, Callable[[], float]] = {
            RAW_WHOLE: lambda: self._echo(whole),
            RAW_CHUNKS: lambda: self._echo(parts),
            ALLREDUCE: lambda: 0.0,
            PSDIST: self._serve,
            DDP: lambda: 0.0,
            DDP_FP16: lambda: 0.0,
        }
        self.turns(ways, _WARM_UP)
        self.between.Barrier()  # workers agree on the computation
        self.sent = dict.fromkeys(self.sent, 0)
        self.turns(ways, self.options.repeats)
        self._loop.run(
            self._waiting, on_idle=self._reporter.on_idle if self._reporter else lambda: None
        )
        slots = _slots(self._loop)
        context.end_job()
        return {"sent": self.sent, "slots": slots}

    def leave(self) -> None:
        while wait_for_job(self.context, self._lobby):
            pass
        self.context.close()

    def _echo(self, memories: list[list[memoryview]]) -> float:
        echo(self.between, memories, self.context.roles.worker_ranks)
        return 0.0

    def _serve(self) -> float:
        """Serve until every worker has said that its part of the turn is over."""
        is_over = self.between.Ibarrier()
        while not is_over.Test():
            if self._loop.turn():
                self._waiting.reset()
            else:
                self._waiting.idle("messages")
        return 0.0


class _WorkerSide(_Side):
    def measure(self) -> dict[str, Any]:
        from mpi4py import MPI

        from psdist.joining import init

        self._job = init()
        before_s = time.perf_counter()
        self._served, self._optimizer = self._prepare(Sleepers(self.sizes))
        prepared_s = time.perf_counter() - before_s
        self._start_torch()
        models = {PSDIST: self._served, **self._ddp_models()}
        servers = range(self.context.roles.num_servers)
        ranks = self.context.roles.server_ranks
        whole = [[self._pair(self.bytes_of(server))] for server in servers]
        parts = [
            [self._pair(self.partition.chunks[i].num_bytes) for i in self.chunks_of(server)]
            for server in servers
        ]
        summed = self._pair(self.partition.num_bytes)[0]
        into = allocate(len(summed))
        ways: dict[str, Callable[[], float]] = {
            RAW_WHOLE: lambda: exchange(self.between, whole, ranks),
            RAW_CHUNKS: lambda: exchange(self.between, parts, ranks),
            ALLREDUCE: lambda: self._allreduce(summed, into),
            PSDIST: lambda: self._serve_me(lambda: self._step(models[PSDIST], self._optimizer)),
            DDP: lambda: self._step(*self._with_sgd[DDP]),
            DDP_FP16: lambda: self._step(*self._with_sgd[DDP_FP16]),
        }
        warm = self.turns(ways, _WARM_UP)
        seconds, is_factor = self.options.compute
        if is_factor:
            raw_s = min(statistics.median(warm[RAW_WHOLE]), statistics.median(warm[RAW_CHUNKS]))
            seconds *= self.among.allreduce(raw_s, op=MPI.MAX)
        for model in models.values():
            sleepers = getattr(model, "module", model)
            sleepers.seconds = seconds
        self.between.Barrier()
        self.sent = dict.fromkeys(self.sent, 0)
        times = self.turns(ways, self.options.repeats)
        self._job.close()
        return {
            "times": times,
            "sent": self.sent,
            "compute_s": seconds,
            "prepare_s": prepared_s,
            "gloo": self._gloo,
        }

    def leave(self) -> None:
        leave(self.context)

    def _prepare(self, model: Sleepers) -> tuple[Any, Any]:
        import torch

        prepared: list[Any] = []

        def prepare() -> float:
            optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
            prepared.extend(self._job.prepare(model, optimizer))
            return 0.0

        self._serve_me(prepare)
        return prepared[0], prepared[1]

    def _serve_me(self, run: Callable[[], float]) -> float:
        """``run()`` while the servers serve."""
        took_s = run()
        over = self.between.Ibarrier()
        while not over.Test():
            time.sleep(_REST_S)
        return took_s

    def _start_torch(self) -> None:
        """torch's default process group, which was this worker's own, becomes all workers'."""
        import torch.distributed as dist

        dist.destroy_process_group()
        worker, workers = worker_of(self.context.me), self.context.roles.num_workers
        host = self.context.roles.places[self.context.roles.worker_ranks[0]].host
        is_first = worker == 0
        store = None
        for who in (True, False):  # the first opens the port before others come
            if is_first is who:
                port = 0 if is_first else self.among.bcast(None, root=0)
                address = "localhost" if is_first else host
                if self._is_one_host():
                    address = "localhost"
                store = dist.TCPStore(  # type: ignore[attr-defined] # exported, not in __all__
                    address, port, workers, is_master=is_first, wait_for_workers=False
                )
                if is_first:
                    self.among.bcast(store.port, root=0)
        self._gloo = os.environ.get("GLOO_SOCKET_IFNAME", "of the host's name")
        if "GLOO_SOCKET_IFNAME" not in os.environ and self._is_one_host():
            self._gloo = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=store, rank=worker, world_size=workers)

    def _is_one_host(self) -> bool:
        return len({place.host for place in self.context.roles.places}) == 1

    def _ddp_models(self) -> dict[str, Any]:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        models: dict[str, Any] = {}
        self._with_sgd: dict[str, tuple[Any, Any]] = {}
        for way in (DDP, DDP_FP16):
            model = DistributedDataParallel(Sleepers(self.sizes))
            if way == DDP_FP16:
                model.register_comm_hook(None, fp16_compress_hook)
            models[way] = model
            self._with_sgd[way] = model, torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
        return models

    def _pair(self, num_bytes: int) -> tuple[memoryview, memoryview]:
        """Memory to send, written (until then all of it is one page of zeros), and to receive."""
        data = allocate(num_bytes)
        data[:] = b"\x01" * num_bytes
        return data, allocate(num_bytes)

    def _step(self, model: Any, optimizer: Any) -> float:
        import torch

        self.among.Barrier()
        before_s = time.perf_counter()
        optimizer.zero_grad()
        loss = model(torch.zeros(()))
        loss.backward()
        optimizer.step()
        return time.perf_counter() - before_s

    def _allreduce(self, data: memoryview, into: memoryview) -> float:
        from mpi4py import MPI

        self.among.Barrier()
        before_s = time.perf_counter()
        self.among.Allreduce([data, MPI.FLOAT], [into, MPI.FLOAT], op=MPI.SUM)
        return time.perf_counter() - before_s


def layer_sizes(num_bytes: int, layers: int) -> list[int]:
    """Float32 elements of each layer: as even as it goes, one at least."""
    elements = max(num_bytes // 4, layers)
    least, more = divmod(elements, layers)
    return [least + (index < more) for index in range(layers)]


def cut(sizes: Sequence[int], chunk_bytes: int | str) -> Partition:
    """As ``job.prepare`` cuts the layers."""
    pieces = [
        Piece(
            name=f"layers.{index}.weight",
            shape=(size,),
            stride=(1,),
            dtype="float32",
            optimizer_group=0,
        )
        for index, size in enumerate(sizes)
    ]
    return Partition.cut(pieces, chunk_bytes=chunk_bytes if isinstance(chunk_bytes, int) else None)


def sent_bytes(text: str | None = None) -> int:
    """What this host's interfaces have sent, those but loopback; ``text``: of /proc/net/dev."""
    if text is None:
        try:
            text = Path("/proc/net/dev").read_text(encoding="ascii")
        except OSError:
            return 0
    total = 0
    for line in text.splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() != "lo":
            total += int(counts.split()[8])
    return total


def _slots(loop: ServerLoop) -> dict[str, Any]:
    each = loop.statistics()["sets"][0]
    return {key: each[key] for key in ("receive_slots", "most_slots_used") if key in each}


# -- what is told ----------------------------------------------------------------------------------


def _result(
    context: RankContext, options: StepOptions, everybody: list[dict[str, Any]]
) -> dict[str, Any]:
    from mpi4py import MPI

    workers = [each for each in everybody if "times" in each]
    rows = []
    for way in WAYS:
        slowest = [max(each) for each in zip(*(it["times"][way] for it in workers), strict=True)]
        most_sent = max(each["sent"][way] for each in everybody) / options.repeats
        rows.append({"way": way, "sent_bytes": round(most_sent), "all_s": slowest})
    roles, plan, config = context.roles, context.plan, context.config
    partition = cut(layer_sizes(options.num_bytes, options.layers), config.chunk_bytes)
    link_s = plan.cost_s * partition.num_bytes / plan.model_bytes if plan and plan.links else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "mpi": MPI.Get_library_version().split(",")[0].strip("\0 \n"),
        "components": {
            key: os.environ.get(f"OMPI_MCA_{key}", "default") for key in ("pml", "mtl", "btl")
        },
        "gloo_interface": workers[0]["gloo"],
        "servers": roles.num_servers,
        "workers": roles.num_workers,
        "hosts": len({place.host for place in roles.places}),
        "ranks_to_cores": ranks_to_cores(context),
        "load": round(os.getloadavg()[0], 1),
        "mode": config.mode,
        "num_bytes": partition.num_bytes,
        "layers": options.layers,
        "chunks": len(partition.chunks),
        "chunk_bytes": partition.max_chunk_bytes,
        "credits": config.credits,
        "receive_buffers": config.receive_buffers,
        "slots": [each["slots"] for each in everybody if "slots" in each],
        "compute_s": workers[0]["compute_s"],
        "prepare_s": max(each["prepare_s"] for each in workers),
        "repeats": options.repeats,
        "link_limit_s": link_s,
        "rows": rows,
    }


def ranks_to_cores(context: RankContext) -> tuple[int, int]:
    """Of the machine where they are scarcest: its ranks, and the cores that they share. Hosts of
    one kernel share theirs, whatever they claim."""
    machines: dict[str, list[tuple[int, ...]]] = {}
    for place in context.roles.places:
        machines.setdefault(place.kernel or place.host, []).append(place.cores)
    counted = [
        (len(ranks), max(1, len(set(itertools.chain.from_iterable(ranks)))))
        for ranks in machines.values()
    ]
    return max(counted, key=lambda each: each[0] / each[1])


def report(result: dict[str, Any], options: StepOptions) -> None:
    print(header(result), flush=True)
    Console(width=None if sys.stdout.isatty() else 110).print(table(result))
    if options.json_path is not None:
        options.json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {options.json_path}")


def header(result: dict[str, Any]) -> str:
    """What was measured, where, and what carried the bytes."""
    ranks, cores = result["ranks_to_cores"]
    crowded = f"{ranks} ranks share {cores} cores" + (
        ": they take turns on them, so only ratios count" if ranks > cores else ""
    )
    components = ", ".join(f"{key} {name}" for key, name in result["components"].items())
    hosts = result["hosts"]
    carried = "nothing left a host" if hosts == 1 else "bytes sent are those of the hosts' links"
    return "\n".join(
        [
            f"step of {size_text(result['num_bytes'])} in {result['layers']} layers, "
            f"{result['compute_s']:.3f} s of sleep a step; {result['mode']}, "
            f"{result['servers']} servers, {result['workers']} workers on {hosts} hosts",
            f"{result['mpi']}, {components}; gloo over {result['gloo_interface']}; {carried}",
            f"{crowded}; load {result['load']}",
            f"{result['chunks']} chunks of at most {size_text(result['chunk_bytes'])}, credits "
            f"{result['credits']}, receive_buffers {result['receive_buffers']}: "
            f"{max(each['receive_slots'] for each in result['slots'])} slots a server, "
            f"{max(each['most_slots_used'] for each in result['slots'])} used",
        ]
    )


def table(result: dict[str, Any]) -> Table:
    made = Table(title=f"medians of {result['repeats']}, of the slowest worker")
    made.add_column("", no_wrap=True)
    for name in ("median", "quartiles", "of limit", "of raw", "host sends"):
        made.add_column(name, justify="right", no_wrap=True)
    link_s = result["link_limit_s"]
    medians = {row["way"]: statistics.median(row["all_s"]) for row in result["rows"]}
    raw_s = min(medians[RAW_WHOLE], medians[RAW_CHUNKS])
    if link_s is not None:
        made.add_row("link limit, as planned", time_text(link_s), "", "1.00", "", "")
    for row in result["rows"]:
        median = medians[row["way"]]
        low, _, high = quartiles(row["all_s"])
        made.add_row(
            row["way"],
            time_text(median),
            _range(low, high),
            f"{median / link_s:.2f}" if link_s else "",
            f"{median / raw_s:.2f}",
            f"{row['sent_bytes'] / 2**20:.1f} MiB",
        )
    return made


def _range(low: float, high: float) -> str:
    return f"{low * 1e3:.3g} .. {high * 1e3:.3g} ms"


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    if len(seconds) < 2:
        return seconds[0], seconds[0], seconds[0]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, middle, high
