"""``psdist bench step``: a training step, and DDP, MPI_Allreduce and the raw exchange.

    srun --mpi=pmix -N 4 --ntasks-per-node=2 psdist bench step --size 64MiB --compute 0

On the same ranks, in turns: ``job.prepare`` and ``step()`` in the mode that is set; DDP over gloo
between the workers, plain and with its fp16 hook; MPI_Allreduce of the bytes between the workers;
and the raw exchange: every worker sends each server its part of the bytes and gets as many back, in
one message and in psdist's chunks. The faster raw way is the limit.

The model is layers with real parameters that *sleep* in forward and twice as long in backward: they
imitate accelerators, which leave the cores to communication. A repetition counts as its slowest
worker. CPU time of all ranks and bytes that the hosts' interfaces sent are counted. Every worker is
a group: DDP needs torch's default process group for all of them.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from psdist.commands.bench import echo, exchange, sent
from psdist.commands.bench.between import (
    alone,
    between_ranks,
    leave_job,
    lobby_of,
    start_torch,
    wait_for_all,
)
from psdist.commands.bench.links import LinkSampler
from psdist.commands.bench.sleeping import Shards, Sleepers, layer_sizes
from psdist.commands.bench.step_report import (
    ALLREDUCE,
    DDP,
    DDP_FP16,
    PSDIST,
    RAW_CHUNKS,
    RAW_WHOLE,
    WAYS,
    StepOptions,
    report,
    result_of,
)
from psdist.protocol.ids import is_worker
from psdist.protocol.memory import allocate
from psdist.ranks.agreement import allgather
from psdist.ranks.lobby import leave, wait_for_job
from psdist.ranks.rank import Rank
from psdist.ranks.server import build_loop
from psdist.servers.loop import ServerLoop

if TYPE_CHECKING:  # at run time only inside functions: importing it starts MPI
    from mpi4py import MPI

_WARM_UP: Final = 3
_REST_S: Final = 5e-4
"""Ranks that wait for others' turns sleep: there may be fewer cores than ranks."""
_LEARNING_RATE: Final = 1e-3


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


def _measure(context: Rank, options: StepOptions) -> int:
    import torch

    torch.set_num_threads(max(1, int(context.core_share)))
    assert context.comms.world is not None
    between = context.comms.world.Dup()  # its barriers never meet psdist's messages
    among = between.Split(int(is_worker(context.me)), context.number)
    kind = _WorkerSide if is_worker(context.me) else _ServerSide
    side = kind(context, between, among, options)
    mine = side.measure()
    everybody = [json.loads(each) for each in allgather(between, json.dumps(mine).encode())]
    if context.number == 0:
        report(result_of(context, options, everybody), options)
    side.leave()
    return 0


class _Side(Shards):
    """The part of both sides: the bytes, in psdist's chunks, and the turns."""

    def __init__(
        self, context: Rank, between: MPI.Comm, among: MPI.Comm, options: StepOptions
    ) -> None:
        """``among``: the ranks of this role alone."""
        self.context, self.between, self.among, self.options = context, between, among, options
        self.sizes = layer_sizes(options.num_bytes, options.layers)
        super().__init__(context, self.sizes)
        self.sent = dict.fromkeys(WAYS, 0)
        self.cpu = dict.fromkeys(WAYS, (0.0, 0.0))
        """Seconds of this rank in user and kernel mode, of all repetitions."""
        host = context.roles.places[context.number].host
        ranks = [place.rank for place in context.roles.places if place.host == host]
        self._counts_for_host = context.number == min(ranks)
        is_sampling = options.links and self._counts_for_host
        self._links = {way: LinkSampler() for way in WAYS if is_sampling}

    def meet(self) -> None:
        wait_for_all(self.between, _REST_S)

    def forget_warm_up(self) -> None:
        """From here on bytes, CPU time and links count."""
        self._links = {way: LinkSampler() for way in self._links}
        self.sent = dict.fromkeys(self.sent, 0)
        self.cpu = dict.fromkeys(self.cpu, (0.0, 0.0))

    def links(self) -> dict[str, dict[str, Any]]:
        """Way -> interface of this host -> how long it was idle."""
        return {
            way: {name: each._asdict() for name, each in sampler.idle().items()}
            for way, sampler in self._links.items()
        }

    def turns(self, ways: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
        """Every way in its turn, so often; the seconds that each took."""
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, run in ways.items():
                self.meet()
                before = sent()
                self.meet()
                user_s, system_s = cpu_seconds()
                with self._links.get(way, nullcontext()):
                    times[way].append(run())
                    user_end_s, system_end_s = cpu_seconds()
                    so_far = self.cpu[way]
                    self.cpu[way] = (
                        so_far[0] + user_end_s - user_s,
                        so_far[1] + system_end_s - system_s,
                    )
                    self.meet()
                if self._counts_for_host:
                    self.sent[way] += (sent() - before).num_bytes
        return times


class _ServerSide(_Side):
    def measure(self) -> dict[str, Any]:
        context, roles = self.context, self.context.roles
        self._lobby = lobby_of(context)
        wait_for_job(context, self._lobby)
        self._loop, self._duty = build_loop(context.session, context.session.transport)
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
        self.forget_warm_up()
        self.turns(ways, self.options.repeats)
        self._loop.run(self._waiting, on_idle=self._duty.on_idle)
        slots = _slots(self._loop)
        context.session.end()
        return {"sent": self.sent, "cpu": self.cpu, "links": self.links(), "slots": slots}

    def leave(self) -> None:
        leave_job(self.context, self._lobby)

    def _echo(self, memories: list[list[memoryview]]) -> float:
        echo(self.between, memories, self.context.roles.worker_ranks)
        return 0.0

    def _serve(self) -> float:
        """Serve until every worker has ended its part of the turn."""
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
        self._steps = 1
        before_s = time.perf_counter()
        self._served, self._optimizer = self._prepare(Sleepers(self.sizes))
        prepared_s = time.perf_counter() - before_s
        self._gloo = start_torch(self.context, self.among)
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
        self._steps = self.options.steps
        seconds, is_factor = self.options.compute
        if is_factor:
            raw_s = min(statistics.median(warm[RAW_WHOLE]), statistics.median(warm[RAW_CHUNKS]))
            seconds *= self.among.allreduce(raw_s, op=MPI.MAX)
        for model in models.values():
            sleepers = getattr(model, "module", model)
            sleepers.seconds = seconds
        self.between.Barrier()
        self.forget_warm_up()
        times = self.turns(ways, self.options.repeats)
        self._job.close()
        return {
            "times": times,
            "sent": self.sent,
            "cpu": self.cpu,
            "links": self.links(),
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
        self.meet()
        return took_s

    def _ddp_models(self) -> dict[str, Any]:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        models: dict[str, Any] = {}
        self._with_sgd: dict[str, tuple[Any, Any]] = {}
        for way in (DDP, DDP_FP16):
            model = DistributedDataParallel(
                Sleepers(self.sizes), bucket_cap_mb=self.options.ddp_bucket_mib
            )
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
        for _ in range(self._steps):
            optimizer.zero_grad()
            loss = model(torch.zeros(()))
            loss.backward()
            optimizer.step()
        for parameter in model.parameters():
            parameter.data_ptr()  # overlap = full: who reads a parameter waits for its values
        return (time.perf_counter() - before_s) / self._steps

    def _allreduce(self, data: memoryview, into: memoryview) -> float:
        from mpi4py import MPI

        self.among.Barrier()
        before_s = time.perf_counter()
        self.among.Allreduce([data, MPI.FLOAT], [into, MPI.FLOAT], op=MPI.SUM)
        return time.perf_counter() - before_s


def cpu_seconds() -> tuple[float, float]:
    """Return the CPU time of this process and all its threads, in user and in kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def _slots(loop: ServerLoop) -> dict[str, Any]:
    each = loop.statistics()["sets"][0]
    return {key: each[key] for key in ("receive_slots", "most_slots_used") if key in each}
