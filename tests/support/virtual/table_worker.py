"""Jobs whose last parameter set is tables: real loops on both sides, scripted rows.

    job = play_with_tables(TableSchedule.drawn(7))
    prove_rows(job)

Each worker draws ids and gradients, asks for the next rows with its push or apart from it, and
keeps what came. The oracle applies the same updates, in the order of the servers' logs, to one
store of each part: what every reply brought must be those rows, bit by bit.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from psdist.codecs.wire import Wire
from psdist.commands.check import check
from psdist.history.run_record import CodecsSince
from psdist.protocol.control import Setup
from psdist.protocol.events import Arrived
from psdist.protocol.header import CodecCode, Header, Kind
from psdist.protocol.optimizers import pack_hyperparameters, unpack_hyperparameters
from psdist.protocol.partition import Partition
from psdist.servers.protocol.actions import Step
from psdist.servers.set_store import ChooseContents, Contents
from psdist.servers.shard.executor import MakeExecutor, ShardSpec
from psdist.servers.shard.regions import Region
from psdist.servers.tables.checkpoints import region_of
from psdist.servers.tables.contents import TableContents
from psdist.servers.tables.shard import TableShard
from psdist.tables.kernels.reference import Contribution
from psdist.tables.payloads import pack_ids, reply_bytes
from psdist.tables.specs import Ids, Rows, TableSpecs
from psdist.tables.store import RowStore
from psdist.workers.protocol.actions import Action
from psdist.workers.tables.loop import TableLoop
from tests.support.tables import drawn_ids, drawn_rows, of_part, specs_of
from tests.support.virtual.job import VirtualJob, play
from tests.support.virtual.schedule import AnotherSet, Schedule, with_modes
from tests.support.virtual.surviving import with_several_groups
from tests.support.virtual.virtual_worker import VirtualWorker


@dataclass(frozen=True, kw_only=True)
class TableSchedule(Schedule):
    """A schedule whose last set is of tables; groups of one worker."""

    parts_per_server: int = 1
    optimizers: tuple[str, ...] = ("RowSGD",)
    num_rows: int | None = 60
    max_rows: int = 1 << 12
    wanted_rate: float = 0.7
    """How often a push asks for the rows of the next batch."""

    @classmethod
    def drawn(cls, seed: int, *, has_deaths: bool = False) -> TableSchedule:
        pick = random.Random(f"{seed} tables")
        base = with_modes(seed) if pick.random() < 0.25 else Schedule.from_seed(seed)
        base = replace(
            base,
            death=None,
            mistake="",
            has_model=True,
            push_rate=0.0,
            group_sizes=(1,) * len(base.group_sizes),
            duplicate_rate=0.0,
            repeat_rate=0.0,
        )
        if has_deaths:
            base = with_several_groups(base)
        names = ["RowSGD", "RowWiseAdagrad", "LazyAdam", *["FTRL"] * (base.modes == ("sync",))]
        more = AnotherSet(1, *pick.choice([(1, 1), (1, 1), (2, 1), (1, 3)]))
        given = {each.name: getattr(base, each.name) for each in fields(Schedule)}
        return cls(
            **given | {"more_sets": (*base.more_sets[:1], more)},
            parts_per_server=pick.choice([1, 1, 2, 8]),
            optimizers=tuple(pick.choice(names) for _ in range(pick.choice([1, 2, 3]))),
            num_rows=pick.choice([60, 60, 5000, None]),
            max_rows=pick.choice([7, 40, 1 << 12]),
            wanted_rate=pick.choice([0.0, 0.7, 1.0]),
        )

    @property
    def specs(self) -> TableSpecs:
        num_parts = self.servers * self.parts_per_server
        return specs_of(num_parts, *self.optimizers, num_rows=self.num_rows, max_rows=self.max_rows)

    def _is_of_tables(self, set_index: int) -> bool:
        return set_index == self.num_sets - 1

    def partition(self, set_index: int = 0) -> Partition:
        if self._is_of_tables(set_index):
            return self.specs.partition()
        return super().partition(set_index)

    def max_norm(self, set_index: int = 0) -> float:
        return 0.0 if self._is_of_tables(set_index) else super().max_norm(set_index)

    def order(self, set_index: int = 0) -> list[int]:
        if self._is_of_tables(set_index):
            return [*range(self.specs.num_parts)]
        return super().order(set_index)


class RecordedShard(TableShard):
    """Notes its steps and snapshots."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.steps: defaultdict[int, list[Step]] = defaultdict(list)
        self.kept: defaultdict[int, list[tuple[int, Region]]] = defaultdict(list)
        """By part: how many steps a snapshot contains, and the snapshot."""
        self.num_early = 0

    def step(self, action: Step) -> None:
        super().step(action)
        self.steps[action.chunk].append(action)

    def take_early(self, *given: Any, **more: Any) -> str:
        self.num_early += 1
        return super().take_early(*given, **more)

    def snapshot(self, chunk: int, *given: Any, **more: Any) -> list[Region]:
        regions = super().snapshot(chunk, *given, **more)
        self.kept[chunk] += [(len(self.steps[chunk]), each) for each in regions]
        return regions


class RecordedContents(TableContents):
    watched: Callable[[MakeExecutor], MakeExecutor]

    def make_executor(self, spec: ShardSpec) -> Any:
        return self.watched(self._make)(spec)

    make_shard: type[RecordedShard] = RecordedShard

    def _make(self, spec: ShardSpec) -> RecordedShard:
        return self.make_shard(self._specs, chunks=spec.chunks, largest_push=spec.slot_bytes)


def recorded(
    job: VirtualJob, server: int, make_shard: type[RecordedShard] = RecordedShard
) -> ChooseContents:
    """``make_shard``: for tests that break it on purpose."""

    def choose(setup: Setup, wire: Wire, make_executor: MakeExecutor) -> Contents:
        if not setup.tables:
            return Contents(setup, wire, make_executor)
        found = RecordedContents(setup, wire)
        found.make_shard = make_shard
        found.watched = lambda make: make if job.watch is None else job.watch.executor(server, make)
        return found

    return choose


class Drawn(NamedTuple):
    """A worker's contribution to an iteration."""

    rows: list[tuple[Ids, Rows]] | None
    weight: float


class Seen(NamedTuple):
    """Rows that a reply has brought."""

    part: int
    version: int
    ids: list[Ids]
    rows: list[Rows]


class TableWorker(VirtualWorker):
    """In all sets but the last a VirtualWorker."""

    def __init__(self, job: Any, worker: int, group: int, first: Any = None) -> None:
        schedule = job.schedule
        self.specs: TableSpecs | None = None
        if first is not None and job.set_index == schedule.num_sets - 1:
            self.specs = schedule.specs
            job.owners = self.specs.owners([1.0] * schedule.servers)
            first.loop.next_set = partial(TableLoop.after, first.loop)
        self.row_draws: list[Drawn] = []
        self.seen: list[Seen] = []
        self.replied: dict[int, Header] = {}
        self.pick_rows = np.random.default_rng([schedule.seed, worker])
        self._staleness_seen: set[int] = set()
        super().__init__(job, worker, group, first)

    @property
    def rows_loop(self) -> TableLoop:
        assert isinstance(self.loop, TableLoop)
        return self.loop

    def take_slice(self, **more: Any) -> None:
        if self.specs is None:
            super().take_slice(**more)
            return
        job, core = self.job, self.core
        self.rows_loop.take_tables(
            self.specs,
            job.wire,
            owners=job.owners,
            credits=job.schedule.credits,
            first_clock=0,
        )
        handle = core.handlers[Arrived]

        def note(event: Arrived) -> list[Action]:
            if event.header.kind == Kind.REPLY:
                self.replied[event.header.chunk] = event.header
            found: list[Action] = handle(event)
            return found

        core.handlers[Arrived] = note

    def fill_parameters(self) -> None:
        if self.specs is None:
            super().fill_parameters()

    def _send_setup(self) -> None:
        if self.specs is None:
            super()._send_setup()
            return
        self.loop.begin_setup(
            Setup(
                partition=self.specs.partition().encode(),
                optimizer="torch.optim.SGD",
                hyper=self.hyper(self.job.schedule.lr),
                tables=self.specs.encode(),
            )
        )

    def hyper(self, lr: float) -> bytes:
        if self.specs is None:
            return super().hyper(lr)
        return pack_hyperparameters([{"lr": lr / 8} for _ in self.specs.tables])

    @property
    def staleness_seen(self) -> Collection[int]:
        return self._staleness_seen if self.specs is not None else super().staleness_seen

    def bring(self) -> Iterator[float | None]:
        """Rows of ids that were not known when the worker pushed, or newest ones to evaluate."""
        if self.specs is None:
            yield from super().bring()
            return
        for is_fresh in (False, self.pick_rows.random() < 0.3):
            ids = self._ids()
            self.rows_loop.begin_pull_of_rows(ids, is_fresh=is_fresh)
            yield from self._until(lambda: self.core.is_idle)
            self._note(self.rows_loop.take_rows())
            if not is_fresh:
                break

    def enter(self) -> Iterator[float | None]:
        yield from super().enter()
        if self.specs is None:
            return
        nothing = [np.empty(0, np.int64) for _ in self.specs.tables]
        for part in self.mine:
            self.rows_loop.outgoing[part] = pack_ids(self.specs, nothing)
            self.rows_loop.replies.expect(part, reply_bytes(self.specs, [0] * len(nothing)))
        self.loop.begin_pull(clock=0, chunks=self.mine, is_fresh=False)
        yield from self._until(lambda: self.core.is_idle)

    def _ids(self) -> list[Ids]:
        assert self.specs is not None
        most = min(30, self.specs.max_rows // len(self.specs.tables))
        return [drawn_ids(each, self.pick_rows, most=most) for each in self.specs.tables]

    def _note(self, brought: Sequence[tuple[Ids, Rows]]) -> None:
        assert self.specs is not None
        for part, header in self.replied.items():
            mine = of_part(self.specs, brought, part)
            if any(len(ids) for ids, _ in mine):
                ids, rows = zip(*((ids.copy(), its.copy()) for ids, its in mine), strict=True)
                self.seen.append(Seen(part, header.chunk_version, [*ids], [*rows]))

    def record_use(self) -> None:
        if self.specs is None:
            super().record_use()
            return
        versions = [self.core.versions[chunk] for chunk in self.mine]
        self._staleness_seen |= {max(0, self.clock - each.min_done) for each in versions}
        positions = np.array([each.position for each in versions], np.int64)
        replies = np.array([each.clock for each in versions], np.int64)
        mine = np.array(self.mine, np.int64)
        self.history.uses(self.clock, mine, self.job.owners, positions, replies)

    def iterate(self) -> Iterator[float | None]:
        if self.specs is None:
            yield from super().iterate()
            return
        if self.pick_rows.random() > self.job.schedule.wanted_rate:
            yield from self.bring()
        is_skipped = self.pick_rows.random() < self.job.schedule.empty_rate
        rows = None if is_skipped else drawn_rows(self.specs, self.pick_rows)
        weight = 0.0 if is_skipped else float(self.pick_rows.choice([1.0, 0.5]))
        wants = self.pick_rows.random() < self.job.schedule.wanted_rate
        wanted = self._ids() if wants else [each[:0] for each in self._ids()]
        hyper = self.hyper(self.draw_lr())
        self.row_draws.append(Drawn(rows, weight))
        self.history.push(
            self.clock, weight, weight, self.mine if is_skipped else (), len(self.mine)
        )
        for wait in self.rows_loop.push_rows(
            clock=self.clock, hyper=hyper, weight=weight, rows=rows, wanted=wanted
        ):
            yield from self._until(wait.is_done)
        yield from self._until(lambda: self.core.is_idle)
        self._note(self.rows_loop.take_rows())

    def next_clock(self) -> int:
        return self.clock + 1 if self.specs is not None else super().next_clock()

    def _copy(self) -> Iterator[float | None]:
        if self.specs is None:
            yield from super()._copy()


def play_with_tables(schedule: TableSchedule, **more: Any) -> VirtualJob:
    return play(schedule, **{"make_worker": TableWorker, "choose": recorded, **more})


def shards_of(job: VirtualJob) -> list[RecordedShard]:
    """Servers that have received the tables."""
    (*_, rows_of) = job.sets
    found = [rows_of.executor(server) for server in range(len(job.servers))]
    return [each for each in found if isinstance(each, RecordedShard)]


def check_sets(job: VirtualJob) -> None:
    """Each set kept the rules of its mode. Replies with rows have no checksums."""
    *others, rows_of = (each.history() for each in job.sets)
    codecs = (CodecsSince(round=0, push="rows", pull="rows", push_code=CodecCode.ROWS),)
    run = rows_of.run.model_copy(update={"checksum_every": 0, "codecs": codecs})
    for history in (*others, replace(rows_of, run=run)):
        report = check(history)
        assert not report.violations, report.violations[:5]


def prove_rows(job: VirtualJob) -> int:
    """Every reply brought the rows that the updates before it make, and so does the end. Return
    how many rows were compared."""
    (*_, rows_of) = job.sets
    workers = {each.group: each for each in rows_of.workers}
    seen: defaultdict[int, list[Seen]] = defaultdict(list)
    for worker in workers.values():
        assert isinstance(worker, TableWorker)
        for each in worker.seen:
            seen[each.part].append(each)
    num = 0
    for part, server in enumerate(rows_of.owners):
        shard = rows_of.executor(server)
        if shard is None:
            continue
        assert isinstance(shard, RecordedShard)
        num += _prove_part(part, shard, workers, seen[part])
    return num


def _prove_part(
    part: int, shard: RecordedShard, workers: dict[int, Any], seen: Sequence[Seen]
) -> int:
    specs = shard.specs
    stores = [RowStore(each, specs.buckets_of_part(part)) for each in specs.tables]
    waiting, num = sorted(seen, key=lambda each: each.version, reverse=True), 0

    def compare(version: int) -> int:
        count = 0
        while waiting and waiting[-1].version <= version:
            each = waiting.pop()
            assert each.version == version
            for store, ids, rows in zip(stores, each.ids, each.rows, strict=True):
                assert rows.tobytes() == store.gather(ids).tobytes(), f"part {part}, {each}"
                count += len(ids)
        return count

    def compare_kept(num_steps: int) -> None:
        for _, region in (each for each in shard.kept[part] if each[0] == num_steps):
            expected = region_of(part, stores, specs)
            assert region.state == expected.state
            assert all(region.elements[key].equal(its) for key, its in expected.elements.items())

    num += compare(1)
    compare_kept(0)
    for num_steps, step in enumerate(shard.steps[part], start=1):
        _apply(specs, part, stores, step, workers)
        num += compare(num_steps + 1)
        compare_kept(num_steps)
    assert not waiting
    for store, its in zip(stores, shard.parts[part].stores, strict=True):
        one, other = (each.stored(each.in_order()) for each in (store, its))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
    return num


def _apply(
    specs: TableSpecs, part: int, stores: Sequence[RowStore], step: Step, workers: dict[int, Any]
) -> None:
    """As one server with whole pushes would."""
    brought = [each for each in step.contributions if not each.is_empty]
    is_joint = len(brought) > 1 or step.gradient_scale != 1.0 or step.peer is None
    pushes = []
    for group, clock, weight, *_ in brought:
        draw = workers[group].row_draws[clock]
        assert draw.weight == weight
        pushes.append((of_part(specs, draw.rows, part), weight if is_joint else 1.0))
    for table, (store, hyper) in enumerate(
        zip(stores, unpack_hyperparameters(step.hyper), strict=True)
    ):
        ids, rows = store.merge([Contribution(*each[table], weight) for each, weight in pushes])
        rows = rows * np.float32(step.gradient_scale)
        lr: Any = hyper["lr"]
        store.apply(ids, rows, lr=lr * step.lr_scale, clock=step.contributions[0].clock)
