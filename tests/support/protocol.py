"""A whole job in one process: the real loops, shards and state machines over the virtual network.

A :class:`Schedule` says everything that is random about a run (mode, groups, delays, who computes
how long, where collectives stand, what is empty or absent), made from one seed; :func:`play` runs
it and returns the job for looking at. Everybody's invariants are checked after every event, the
recorded history after the run.

    job = play(Schedule.from_seed(7))
    assert check(job.history()).proved
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from psdist.history.writers import History, RunRecord, ServerHistory, WorkerHistory, collect
from psdist.protocol.control import Setup
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.partition import Partition, Piece
from psdist.servers.loop import ServerLoop, ServerOptions
from psdist.servers.protocol.policy import Policy, policy_for
from psdist.servers.protocol.registrar import Registrar
from psdist.servers.protocol.state import ServerCore
from psdist.servers.shard.executor import MakeExecutor
from psdist.servers.shard.tensors import TensorShard
from psdist.transport.virtual import LinkModel, VirtualNetwork
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import make_loop
from psdist.workers.protocol.actions import Action
from psdist.workers.protocol.core import WorkerCore, WorkerEvent
from psdist.workers.protocol.seat import Seat
from tests.support.memory import SizeMemory, TensorMemory

CHUNK_BYTES = 4 * 64


@dataclass(frozen=True, kw_only=True)
class Schedule:
    seed: int
    mode: str = "sync"
    staleness: int = 0
    servers: int = 1
    group_sizes: tuple[int, ...] = (1, 1)
    num_chunks: int = 3
    iterations: tuple[int, ...] = (4, 4)
    """Iterations of each group: they may leave at different times."""
    collectives: tuple[tuple[int, ...], ...] = ((), ())
    """For each group the clocks before which it enters a collective; as many in every group."""
    compute_s: tuple[float, ...] = (1e-3, 1e-3)
    latency_s: float = 1e-5
    jitter_s: float = 1e-4
    duplicate_rate: float = 0.0
    sent_s: float = 0.0
    credits: int = 2
    receive_buffers: int = 3
    empty_rate: float = 0.0
    absent_rate: float = 0.0
    settings_rate: float = 0.0
    lr: float = 0.5

    @classmethod
    def from_seed(cls, seed: int) -> Schedule:
        pick = random.Random(seed)
        num_groups = pick.randint(1, 4)
        iterations = [pick.randint(1, 5)] * num_groups
        if pick.random() < 0.4:
            iterations = [pick.randint(0, 6) for _ in range(num_groups)]
        num_collectives = pick.choice([0, 0, 1, 2])
        collectives = tuple(
            tuple(sorted(pick.randint(0, count) for _ in range(num_collectives)))
            for count in iterations
        )
        return cls(
            seed=seed,
            mode=pick.choice(["sync", "ssp", "ssp", "async"]),
            staleness=pick.randint(0, 3),
            servers=pick.randint(1, 3),
            group_sizes=tuple(pick.choice([1, 1, 1, 2]) for _ in range(num_groups)),
            num_chunks=pick.randint(1, 6),
            iterations=tuple(iterations),
            collectives=collectives,
            compute_s=tuple(10 ** pick.uniform(-6, -3) for _ in range(num_groups)),
            latency_s=10 ** pick.uniform(-7, -4),
            jitter_s=10 ** pick.uniform(-7, -3),
            duplicate_rate=pick.choice([0.0, 0.0, 0.3]),
            credits=pick.randint(1, 4),
            receive_buffers=pick.randint(2, 6),
            empty_rate=pick.choice([0.0, 0.0, 0.3]),
            absent_rate=pick.choice([0.0, 0.0, 0.3]),
            settings_rate=pick.choice([0.0, 0.5]),
            sent_s=pick.choice([0.0, 0.0, 1e-4, 1e-2]),
        )


def small_partition(num_chunks: int) -> Partition:
    """Chunks of 64 elements; pieces that share a chunk, fill one, and span two."""
    pieces: list[Piece] = []
    left = num_chunks
    while left:
        length = 64 if left == 1 or len(pieces) % 2 else 100
        pieces.append(
            Piece(
                name=f"p{len(pieces)}",
                shape=(length,),
                stride=(1,),
                dtype="float32",
                optimizer_group=0,
            )
        )
        left -= 1 if length == 64 else 2
    return Partition.cut(pieces, chunk_bytes=CHUNK_BYTES)


class VirtualJob:
    def __init__(
        self,
        schedule: Schedule,
        *,
        policy: Callable[[int], Policy] | None = None,
        make_loop: Callable[..., ServerLoop] = ServerLoop,
        make_executor: MakeExecutor = TensorShard,
        make_memory: Callable[[Partition], TensorMemory | SizeMemory] = TensorMemory,
        verify_open_sends: bool = True,
        network: VirtualNetwork | None = None,
    ) -> None:
        """``policy`` and ``make_loop`` let a test break the servers on purpose; ``make_executor``
        and ``make_memory`` are the memory of servers and workers; ``network`` is that of a job
        before this one, whose ranks now do this job."""
        self.schedule = schedule
        self.make_memory = make_memory
        self.random = random.Random(schedule.seed)
        self.partition = small_partition(schedule.num_chunks)
        self.owners = self.partition.shard([1.0] * schedule.servers)
        self.network = network or VirtualNetwork(
            seed=schedule.seed,
            link=LinkModel(
                latency_s=schedule.latency_s,
                jitter_s=schedule.jitter_s,
                duplicate_rate=schedule.duplicate_rate,
                sent_s=schedule.sent_s,
            ),
            verify_open_sends=verify_open_sends,
        )
        self.groups: list[tuple[int, ...]] = []
        for size in schedule.group_sizes:
            first = sum(map(len, self.groups))
            self.groups.append(tuple(range(first, first + size)))
        self.servers: list[ServerLoop] = []
        self.server_histories: list[ServerHistory] = []
        num_workers = sum(schedule.group_sizes)
        make_policy = policy or (
            lambda _server: policy_for(schedule.mode, staleness=schedule.staleness)
        )
        for server in range(schedule.servers):
            history = ServerHistory(None, server)
            registrar = Registrar(num_workers=num_workers, num_servers=schedule.servers)
            loop = make_loop(
                self.network.endpoint(server_id(server)),
                ServerCore(server=server, policy=make_policy(server)),
                ServerOptions(
                    server=server,
                    shard_weights=(1.0,) * schedule.servers,
                    mode=schedule.mode,
                    receive_buffers=schedule.receive_buffers,
                    checksum_every=1,
                ),
                make_executor=make_executor,
                history=history,
                registrar=registrar if server == 0 else None,
            )
            self.servers.append(loop)
            self.server_histories.append(history)
            self.network.spawn(server_id(server), loop.actor())
        self.workers = [
            VirtualWorker(self, worker, group)
            for group, members in enumerate(self.groups)
            for worker in members
        ]
        for worker in self.workers:
            self.network.spawn(worker_id(worker.worker), worker.script())

    def check_invariants(self) -> None:
        for server in self.servers:
            server.core.check_invariants()

    def run(self) -> None:
        self.network.after_event = self.check_invariants
        self.network.run()
        for worker in self.workers:
            worker.core.check_invariants()
        assert not self.network.unfinished, f"still waiting: {self.network.unfinished}"

    def history(self) -> History:
        schedule = self.schedule
        record = RunRecord(
            psdist="test",
            mode=schedule.mode,  # type: ignore[arg-type]
            staleness=schedule.staleness if schedule.mode == "ssp" else None,
            groups=tuple(self.groups),
            num_servers=schedule.servers,
            num_chunks=len(self.partition.chunks),
            owners=self.owners,
            checksum_every=1,
        )
        return collect(record, self.server_histories, [w.history for w in self.workers])

    def parameters(self) -> torch.Tensor:
        """The servers' parameters, chunk after chunk."""
        parts = []
        for chunk, owner in enumerate(self.owners):
            executor = self.servers[owner].executor
            assert executor is not None
            current = self.servers[owner].core._chunks[chunk].current
            payload = executor.payload(chunk, current)
            assert payload is not None
            parts.append(torch.frombuffer(bytearray(payload), dtype=torch.float32))
        return torch.cat(parts)


def check_after_every_event(core: WorkerCore) -> None:
    """From now on a worker's machine looks at itself whenever it has handled something."""
    handle = core.handle

    def handle_and_check(event: WorkerEvent) -> list[Action]:
        actions = handle(event)
        core.check_invariants()
        return actions

    core.handle = handle_and_check  # type: ignore[method-assign]


class VirtualWorker:
    def __init__(self, job: VirtualJob, worker: int, group: int) -> None:
        schedule = job.schedule
        self.job, self.worker, self.group = job, worker, group
        self.place = job.groups[group].index(worker)
        self.history = WorkerHistory(None, worker)
        self.random = random.Random(f"{schedule.seed} {group}")  # the same in all of the group
        partition = job.partition
        self.slices = partition.slices(schedule.group_sizes[group])
        self.mine = self.slices[self.place]
        self.memory = job.make_memory(partition)
        self.parameters = self.memory.parameters
        self.clock = 0
        self.at = 0  # how far in its script, for the group's barrier
        self.seat = Seat(
            worker=worker, group=group, members=job.groups[group], num_servers=schedule.servers
        )
        self.loop = make_loop(
            job.network.endpoint(worker_id(worker)),
            self.seat,
            waiting=Waiting(is_spinning=False),
        )
        self.loop.take_slice(
            partition, owners=job.owners, credits=schedule.credits, frames=self.memory
        )
        self.core = self.loop.core
        check_after_every_event(self.core)
        self.positions = np.zeros(len(partition.chunks), dtype=np.int64)
        self.staleness_seen: list[int] = []

    # -- the script, as a generator ------------------------------------------------------------

    def script(self) -> Iterator[float | None]:  # type: ignore[return]
        job, loop, schedule = self.job, self.loop, self.job.schedule
        if self.seat.is_chief:
            self._send_setup()
        if self.seat.is_leader:
            loop.begin_register()
            yield from self._until(lambda: not self.core.is_joining)
        loop.begin_pull(clock=0, chunks=self.mine, is_fresh=True)
        yield from self._until(lambda: self.core.is_idle)
        yield from self._share()
        yield from self._collective("prepare")
        collectives = list(schedule.collectives[self.group]) if schedule.collectives else []
        for clock in range(schedule.iterations[self.group]):
            while collectives and collectives[0] <= clock:
                collectives.pop(0)
                yield from self._collective("barrier")
            self._note_uses()
            yield schedule.compute_s[self.group] * (0.5 + job.random.random())
            yield from self._iteration()
        while collectives:
            collectives.pop(0)
            yield from self._collective("barrier")
        self.history.close()
        loop.finish({})
        yield from self._until(lambda: self.core.is_stopped)

    def _send_setup(self) -> None:
        job = self.job
        self.memory.fill_parameters()
        self.loop.begin_setup(
            Setup(
                partition=job.partition.encode(),
                optimizer="torch.optim.SGD",
                hyper=self._hyper(job.schedule.lr),
            )
        )

    def _hyper(self, lr: float) -> bytes:
        return pack_hyperparameters([{"lr": lr}])

    def _iteration(self) -> Iterator[float | None]:
        schedule, pick = self.job.schedule, self.random
        # Every worker draws the same, whatever its slice: its group agrees on what is absent.
        lr = schedule.lr
        if pick.random() < schedule.settings_rate:
            # In sync all groups must agree on it: a function of the clock.
            lr = schedule.lr / (1 + self.clock % 3)
        absent = [
            piece
            for piece in range(len(self.job.partition.pieces))
            if pick.random() < schedule.absent_rate
        ]
        if schedule.mode == "sync" and schedule.settings_rate:
            lr = schedule.lr / (1 + self.clock % 3)
        is_skipped = pick.random() < schedule.empty_rate
        weight = 0.0 if is_skipped else float(schedule.group_sizes[self.group])
        self.memory.fill_gradients(1.0 + self.group + self.clock % 2, absent=absent)
        empty = {
            chunk.index
            for chunk in self.job.partition.chunks
            if is_skipped or all(segment.piece in absent for segment in chunk.segments)
        }
        self.loop.begin_push(
            clock=self.clock,
            hyper=self._hyper(lr),
            absent=absent,
            weight=weight,
            empty=empty & set(self.mine),
        )
        yield from self._until(lambda: self.core.is_idle)
        self.clock += 1
        yield from self._share()

    def _share(self) -> Iterator[float | None]:
        """The group's all-gather: every worker gets the slices of the others."""
        mates = [self.job.workers[worker] for worker in self.job.groups[self.group]]
        yield from self._wait_for(mates)
        for mate in mates:
            for chunk in mate.mine:
                self.memory.copy_from(mate.memory, chunk)
                self.positions[chunk] = mate.core.versions[chunk].position
        yield from self._wait_for(mates)

    def _wait_for(self, mates: list[VirtualWorker]) -> Iterator[float | None]:
        self.at += 1
        while any(mate.at < self.at for mate in mates):
            if self.loop.transport.lost:
                self.loop.turn()  # a mate may be dead: torch.distributed would raise
            yield 1e-6

    def _note_uses(self) -> None:
        versions = self.core.versions
        self.staleness_seen += [
            max(0, self.clock - versions[chunk].min_done) for chunk in self.mine
        ]
        chunks, owners = np.arange(len(self.positions)), self.job.owners
        positions = self.positions.copy()
        self.history.uses(self.clock, chunks, owners, positions, **self.memory.checksums())

    def _collective(self, name: str) -> Iterator[float | None]:
        self.loop.begin_collective(name)
        yield from self._until(lambda: self.core.is_collected)
        self.core.take_collected()

    def _until(self, is_done: Callable[[], bool]) -> Iterator[float | None]:
        self.loop.turn()
        while not is_done():
            yield None
            self.loop.turn()


def play(schedule: Schedule, **broken: object) -> VirtualJob:
    job = VirtualJob(schedule, **broken)  # type: ignore[arg-type]
    job.run()
    return job


def smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Simpler schedules to try when one fails: for shrinking by hand."""
    yield replace(schedule, duplicate_rate=0.0)
    yield replace(schedule, collectives=tuple(() for _ in schedule.group_sizes))
    yield replace(schedule, servers=1)
    yield replace(schedule, num_chunks=1)
    yield replace(schedule, empty_rate=0.0, absent_rate=0.0, settings_rate=0.0)
