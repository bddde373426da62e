"""A whole job in one process: the real loops, shards and state machines over the virtual network.

A :class:`Schedule` says everything that is random about a run (mode, groups, delays, who computes
how long, where collectives stand, what is empty or absent), made from one seed; :func:`play` runs
it and returns the job for looking at. Everybody's invariants are checked after every event, the
recorded history after the run.

    job = play(Schedule.from_seed(7))
    prove(job)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.commands.check import check
from psdist.history.writers import History, RunRecord, ServerHistory, collect
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.partition import Partition, Piece
from psdist.servers.loop import ServerLoop, ServerOptions
from psdist.servers.protocol.policy import Policy, policy_for
from psdist.servers.protocol.registrar import Registrar
from psdist.servers.protocol.state import ServerCore
from psdist.servers.shard.executor import MakeExecutor
from psdist.servers.shard.tensors import TensorShard
from psdist.transport.virtual import LinkModel, VirtualNetwork
from psdist.workers.group.alone import AloneChannel
from psdist.workers.group.channel import GroupChannel
from psdist.workers.group.virtual import VirtualGroup
from tests.support.virtual_worker import VirtualWorker

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
    """How often an iteration of a group is skipped, because one of its workers has nothing."""
    absent_rate: float = 0.0
    """Share of gradients that a worker lacks; half of them all of its group."""
    short_rate: float = 0.0
    """Share of batches that are short, so that workers of a group weigh differently."""
    nan_rate: float = 0.0
    """Share of a worker's gradients that are not finite; their iterations are skipped."""
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
            group_sizes=tuple(pick.choice([1, 1, 2, 3, 4]) for _ in range(num_groups)),
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
            short_rate=pick.choice([0.0, 0.3]),
            nan_rate=pick.choice([0.0, 0.0, 0.05]),
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
        make_worker: Callable[[VirtualJob, int, int], VirtualWorker] = VirtualWorker,
        wire: Wire = RAW_WIRE,
        verify_open_sends: bool = True,
        network: VirtualNetwork | None = None,
    ) -> None:
        """``policy``, ``make_loop`` and ``make_worker(job, worker, group)`` let a test break
        servers and workers on purpose; ``make_executor`` is the memory of servers; ``network`` is
        that of a job before this one, whose ranks now do this job."""
        self.schedule = schedule
        self.wire = wire
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
        self.channels = [self._channels(members) for members in self.groups]
        """Each group's ends of its channel, by place."""
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
                ServerCore(server=server, policy=make_policy(server), groups=self.groups),
                ServerOptions(
                    server=server,
                    shard_weights=(1.0,) * schedule.servers,
                    mode=schedule.mode,
                    receive_buffers=schedule.receive_buffers,
                    checksum_every=1,
                    wire=wire,
                ),
                make_executor=make_executor,
                history=history,
                registrar=registrar if server == 0 else None,
            )
            self.servers.append(loop)
            self.server_histories.append(history)
            self.network.spawn(server_id(server), loop.actor())
        self.workers = [
            make_worker(self, worker, group)
            for group, members in enumerate(self.groups)
            for worker in members
        ]
        for worker in self.workers:
            self.network.spawn(worker_id(worker.worker), worker.script())

    def _channels(self, members: Sequence[int]) -> list[GroupChannel]:
        if len(members) == 1:
            return [AloneChannel()]
        schedule = self.schedule
        link = LinkModel(latency_s=schedule.latency_s, jitter_s=schedule.jitter_s)
        peers = [worker_id(worker) for worker in members]
        group = VirtualGroup(self.network, peers, seed=schedule.seed, link=link)
        return [group.channel(place) for place in range(len(members))]

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
            assert isinstance(executor, TensorShard)
            current = self.servers[owner].core._chunks[chunk].current
            parts.append(executor._memory[chunk].buffer(current).clone())
        return torch.cat(parts)


def play(schedule: Schedule, **broken: object) -> VirtualJob:
    job = VirtualJob(schedule, **broken)  # type: ignore[arg-type]
    job.run()
    return job


def prove(job: VirtualJob) -> None:
    """The history of ``job`` keeps the mode's rules, and workers count staleness as it does."""
    report = check(job.history())
    assert report.proved, report.violations[:5]
    seen = [staleness for worker in job.workers for staleness in worker.staleness_seen]
    assert max(seen, default=0) == report.max_staleness, "client and check disagree on staleness"


def smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Simpler schedules to try when one fails: for shrinking by hand."""
    yield replace(schedule, duplicate_rate=0.0)
    yield replace(schedule, collectives=tuple(() for _ in schedule.group_sizes))
    yield replace(schedule, servers=1)
    yield replace(schedule, num_chunks=1)
    yield replace(schedule, empty_rate=0.0, absent_rate=0.0, settings_rate=0.0)
