"""The executor of a set of tables: rows of this server's parts, and the updates of a round.

    shard = TableShard(specs, chunks=(0, 1), largest_push=1 << 20)
    shard.start_sum(StartSum(...)); shard.fold(Fold(...)); shard.step(Step(...))
    shard.encode(reply, into=payload)         # the rows that the answered push wanted
    shard.take_early(part, group, clock, 1, push)     # a push that comes in several messages

A part (chunk) has rows of every table. Pushes of a round are kept as they came, in the order of
groups, until the step: then an id's gradients are added in this order, so a row gets the same bits
with any number of servers. Nothing is changed before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from psdist.errors import InvariantError, ProtocolError, UserError
from psdist.protocol.events import Frame
from psdist.protocol.memory import allocate
from psdist.protocol.optimizer_state import PART_ELEMENTS, PieceState
from psdist.protocol.optimizers import unpack_hyperparameters
from psdist.servers.protocol.actions import (
    Contribution,
    Fold,
    Hold,
    Load,
    LoadState,
    Reply,
    SlotContent,
    StartSum,
    Step,
)
from psdist.servers.shard.executor import ShardStatistics
from psdist.servers.shard.regions import Region
from psdist.servers.shard.snapshots import SnapshotMemory
from psdist.servers.tables.checkpoints import region_of
from psdist.tables.kernels.reference import Contribution as RowsOf
from psdist.tables.kernels.reference import Slots
from psdist.tables.payloads import RowPush, largest_rows, pack_rows, read_push
from psdist.tables.row_files import Block, blocks_of
from psdist.tables.specs import Ids, TableSpecs
from psdist.tables.store import RowStore

MOST_EARLY: Final = 64
"""Messages that may precede a push."""
_MOST_WANTED: Final = 4
"""Pushes of a group whose replies may be owed, and one more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableStatistics(ShardStatistics):
    rows: int
    """Rows that this server stores."""
    dropped_rows: int
    """Gradient rows of ids that were not admitted."""
    evicted_rows: int


class _Part:
    def __init__(self, specs: TableSpecs, part: int) -> None:
        buckets = specs.buckets_of_part(part)
        self.stores = [RowStore(each, buckets) for each in specs.tables]
        self.summed: list[tuple[RowPush | ProtocolError, float]] = []
        """The pushes of the round that is summed, in the order of groups, with weights."""
        self.wanted: dict[int, dict[int, list[Ids]]] = {}
        """By group and clock of its push."""
        self.early: dict[int, dict[int, list[RowPush]]] = {}
        """By group and clock of a push that is to come: the messages before it."""


class TableShard:
    """See :class:`psdist.servers.shard.executor.Executor`."""

    def __init__(self, specs: TableSpecs, *, chunks: Sequence[int], largest_push: int) -> None:
        self.specs = specs
        self.parts = {chunk: _Part(specs, chunk) for chunk in chunks}
        self.group_of: Callable[[int], int | None] = lambda _peer: None
        """Return the group of a worker of the run."""
        self._in_order: tuple[tuple[int, int], Slots] | None = None
        self._blocks: dict[int, list[Block]] = {}
        """While rows are sent for ``job.save``: slots of a part and table, and blocks by part."""
        self._largest_push = largest_push
        self._nothing = [
            (np.empty(0, np.bool_), np.empty((0, each.dim), np.float32)) for each in specs.tables
        ]

    # -- slots ---------------------------------------------------------------------------------

    def make_slots(self, count: int) -> list[Frame]:
        """The system gives a page of a slot when it is first written."""
        try:
            return [Frame(allocate(self._largest_push)) for _ in range(count)]
        except MemoryError:
            raise UserError(
                f"no memory for {count} receive slots of {self._largest_push} bytes on this "
                f"server: tables.max_rows is {self.specs.max_rows}; lower it"
            ) from None

    def settle(self, slot: Frame) -> None:
        """Nothing but this thread reads a slot."""

    # -- steps ---------------------------------------------------------------------------------

    def load(self, action: Load) -> None:
        """First values of rows follow from their ids."""

    def load_state(self, action: LoadState) -> None:
        raise ProtocolError(f"part {action.chunk}: optimizer state for tables, which take none")

    def state(self, chunk: int, start: int) -> tuple[dict[int, PieceState], bytes]:
        """Return no state, and for ``job.save``: the number of rows of each table (int64), then the
        ids and values of block ``start / PART_ELEMENTS - 1`` of psdist.tables.row_files, if there
        is one."""
        stores = self.parts[chunk].stores
        num_rows = list(map(len, stores))
        if chunk not in self._blocks:
            self._blocks[chunk] = blocks_of(num_rows, [each.dim for each in self.specs.tables])
        blocks = self._blocks[chunk]
        head = np.array(num_rows, np.int64).tobytes()
        if not 0 < start // PART_ELEMENTS <= len(blocks):
            return {}, head
        table, first, num = blocks[start // PART_ELEMENTS - 1]
        if self._in_order is None or self._in_order[0] != (chunk, table):
            self._in_order = (chunk, table), stores[table].in_order()
        rows = stores[table].stored(self._in_order[1][first : first + num])
        return {}, b"".join([head, rows.ids.tobytes(), rows.values.tobytes()])

    def start_sum(self, action: StartSum) -> None:
        push = self._read(action.slot, action.chunk)
        self.parts[action.chunk].summed = [(push, action.weight)]

    def fold(self, action: Fold) -> None:
        with self._memory_for("a push", action.chunk):
            push = self._read(action.slot, action.chunk, is_copied=True)
        self.parts[action.chunk].summed.append((push, action.weight))

    def _read(self, slot: Frame, part: int, *, is_copied: bool = False) -> RowPush | ProtocolError:
        """Return the push in the slot, or its error, for the step: this is where its sender is
        known."""
        assert slot.payload is not None
        payload = slot.payload[: slot.num_received]
        if is_copied:
            payload = memoryview(bytearray(payload))
        try:
            return read_push(self.specs, payload, part=part)
        except ProtocolError as error:
            return error

    def hold(self, action: Hold) -> tuple[float, ...]:
        raise ProtocolError(f"part {action.chunk}: rows are not clipped on servers")

    def step(self, action: Step) -> None:
        self._in_order = None
        self._blocks.clear()
        with self._memory_for("the gradients", action.chunk):
            self._step(action)

    def _step(self, action: Step) -> None:
        part = self.parts[action.chunk]
        if action.content is SlotContent.SUM:
            summed, part.summed = part.summed, []
        else:
            assert action.gradient is not None
            summed = [(self._read(action.gradient, action.chunk), 1.0)]
        brought = [each for each in action.contributions if not each.is_empty]
        pushes = [
            (each, weight, contribution.group)
            for contribution, (push, weight) in zip(brought, summed, strict=True)
            for each in self._whole(part, contribution, push)
        ]
        groups = unpack_hyperparameters(action.hyper)
        clock = action.contributions[0].clock
        for table, (store, hyper) in enumerate(zip(part.stores, groups, strict=True)):
            ids, rows = store.merge(
                [RowsOf(push.ids[table], push.rows[table], weight) for push, weight, _ in pushes]
            )
            if action.gradient_scale != 1.0:
                rows *= np.float32(action.gradient_scale)
            if not np.isfinite(rows).all():
                raise self._not_finite(table, pushes)
            lr = hyper["lr"]
            assert isinstance(lr, float | int)
            store.apply(ids, rows, lr=lr * action.lr_scale, clock=clock)

    def _whole(
        self, part: _Part, contribution: Contribution, push: RowPush | ProtocolError
    ) -> list[RowPush]:
        """Return the messages of a group's push, and note what its reply is to carry."""
        group, clock = contribution.group, contribution.clock
        if isinstance(push, ProtocolError):
            raise ProtocolError(f"group {group}, iteration {clock}: {push}") from push
        early = part.early.get(group, {}).pop(clock, [])
        if len(early) != push.num_before:
            raise ProtocolError(
                f"group {group}, iteration {clock}: a push of rows after {push.num_before} other "
                f"messages; {len(early)} are here"
            )
        if any(map(len, push.wanted)):
            wanted = part.wanted.setdefault(group, {})
            wanted[clock] = [each.copy() for each in push.wanted]
            if len(wanted) > _MOST_WANTED:
                del wanted[min(wanted)]
        return [*early, push]

    def _not_finite(
        self, table: int, pushes: Iterable[tuple[RowPush, float, int]]
    ) -> ProtocolError:
        guilty = {
            str(group) for push, _, group in pushes if not np.isfinite(push.rows[table]).all()
        }
        who = f"group {', '.join(sorted(guilty))}" if guilty else "the sum of all groups"
        return ProtocolError(
            f"table {self.specs.tables[table].name}: gradients of rows with NaN or infinity, of "
            f"{who}; training.on_nonfinite = skip leaves such steps out"
        )

    # -- pushes in several messages ------------------------------------------------------------

    def take_early(self, chunk: int, group: int, clock: int, number: int, push: RowPush) -> str:
        """Keep the ``number``-th message, from 1, before the group's push of ``clock``. Number 1
        begins again. Return what is wrong with it; "" for nothing."""
        early = self.parts[chunk].early.setdefault(group, {})
        kept = [] if number == 1 else early.get(clock, [])
        if number != len(kept) + 1:
            return f"message {number} of iteration {clock} after {len(kept)}"
        if number > MOST_EARLY:
            return f"more than {MOST_EARLY} messages for one push; raise tables.max_rows"
        early[clock] = [*kept, push]
        return ""

    def forget(self, chunk: int, group: int, *, newest: int) -> None:
        """After the group's push of clock ``newest`` none comes: drop what was to precede it."""
        early = self.parts[chunk].early
        early[group] = {at: each for at, each in early.get(group, {}).items() if at <= newest}

    # -- replies -------------------------------------------------------------------------------

    def payload(self, chunk: int, buffer: int) -> memoryview:
        del chunk, buffer
        return allocate(largest_rows(self.specs))

    def begin_reply(self, reply: Reply) -> None:
        """Rows are gathered when they are encoded."""

    def encode(self, reply: Reply, *, into: memoryview | None) -> int:
        assert into is not None
        part = self.parts[reply.token.chunk]
        group = self.group_of(reply.token.peer)
        wanted = None
        if group is not None and not reply.pull_number:
            wanted = part.wanted.get(group, {}).pop(reply.clock, None)
        if wanted is None:
            return pack_rows(self.specs, self._nothing, into)
        return self._pack(reply.token.chunk, wanted, into)

    def rows_of(self, chunk: int, ids: Sequence[Ids]) -> memoryview:
        """Return the payload with the newest rows of ``ids``, by table."""
        memory = allocate(largest_rows(self.specs))
        return memory[: self._pack(chunk, ids, memory)]

    def _pack(self, chunk: int, ids: Sequence[Ids], into: memoryview) -> int:
        with self._memory_for("a reply with rows", chunk):
            stores = self.parts[chunk].stores
            rows = [store.gather_stored(each) for store, each in zip(stores, ids, strict=True)]
            return pack_rows(self.specs, rows, into)

    @contextmanager
    def _memory_for(self, what: str, chunk: int) -> Iterator[None]:
        """Raise :class:`UserError` where the system gives no more memory."""
        try:
            yield
        except MemoryError as error:
            store = max(self.parts[chunk].stores, key=len)
            raise UserError(
                f"no memory for {what} of tables on this server ({str(error) or 'MemoryError'}); "
                f"it stores {self.statistics().rows} rows, {len(store)} of them of table "
                f"{store.spec.name}; use more servers, a smaller batch, a smaller dim, admit= or "
                "evict="
            ) from None

    def checksum(self, *_: object, **__: object) -> None:
        """A worker computes on some rows alone."""

    def value_checksum(self, chunk: int) -> None:
        del chunk

    # -- checkpoints ---------------------------------------------------------------------------

    def snapshot(
        self, chunk: int, into: SnapshotMemory, *, set_index: int, is_later: bool = False
    ) -> list[Region]:
        """New memory, at once: how many rows there are changes."""
        del into, set_index, is_later
        with self._memory_for("the copies of a checkpoint", chunk):
            return [region_of(chunk, self.parts[chunk].stores, self.specs)]

    def reserve_snapshot(self, chunk: int, memory: SnapshotMemory, *, set_index: int) -> bool:
        del chunk, memory, set_index
        return True

    def restore(self, chunk: int, regions: Sequence[Region]) -> None:
        raise InvariantError(
            f"part {chunk}: its rows come by buckets, not in {len(regions)} regions"
        )

    # -- figures -------------------------------------------------------------------------------

    def take_cost_s(self) -> float:
        return 0.0

    def statistics(self) -> TableStatistics:
        found = [store.statistics() for part in self.parts.values() for store in part.stores]
        return TableStatistics(
            num_chunks=len(self.parts),
            parameter_bytes=sum(each.value_bytes for each in found),
            second_buffer_bytes=0,
            optimizer_state_bytes=sum(each.state_bytes for each in found),
            held_bytes=0,
            rows=sum(each.num_rows for each in found),
            dropped_rows=sum(each.num_dropped for each in found),
            evicted_rows=sum(each.num_evicted for each in found),
        )
