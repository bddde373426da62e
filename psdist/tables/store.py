"""The rows of one part of one table: values, optimizer state, and where they are in memory.

    store = RowStore(spec, buckets=specs.buckets_of_part(0))
    store.gather(ids)                                        # float32 [n, dim]
    ids, gradients = store.merge([Contribution(ids, rows, 0.5), ...])
    store.apply(ids, gradients, lr=0.1, clock=7)             # once an iteration, also without ids
    rows = store.stored(store.in_order())                    # for a checkpoint
    again.restore(rows, first_bucket=0)
    store.statistics().num_rows

Ids are int64, strictly ascending. A row is stored from the first push on that touches it; until
then it is read as its first value, which depends on the seed, the table and the id alone. Results
do not depend on how a table is divided into parts, except which rows lru and lfu evict.

Memory: a record for each row in one mapping that grows in place, and 5 bytes for each entry of a
hash index, 64 to 80 % of them in use. A direct index (one int32 for each possible id) would be
smaller only if one server had nearly all rows: a part sees 1 / num_parts of the ids.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from psdist.errors import InvariantError, UserError
from psdist.tables.kernels import row_kernels
from psdist.tables.kernels.reference import (
    SKETCH,
    Cells,
    Contribution,
    RowMemory,
    Slots,
    empty_index,
)
from psdist.tables.optimizers import row_optimizer
from psdist.tables.retention import Admission, Eviction, parse_eviction
from psdist.tables.specs import NUM_BUCKETS, Ids, Rows, TableSpec, TableSpecs, mixed

_FEWEST: Final = 256
"""Entries of an index, and records, at least."""
_MOST: Final = 2**31 - 1
"""Rows; a slot is an int32."""
_FULL: Final = 0.8
_GROWTH: Final = 1.25
_DTYPES: Final = (np.dtype(np.int64), np.dtype(np.float32))
_MORE: Final = 16
"""Records grow by one in so many."""
_HUGE: Final = 64 << 20
"""Bytes of records that use large pages if there are more: random reads miss the TLB less."""


class StoredRows(NamedTuple):
    """Rows, in any order; copies."""

    ids: Ids
    values: Rows
    """float32 [n, dim]."""
    state: Rows
    """[n, words]: the optimizer's state, then an int32 for eviction, as 4-byte words."""
    counts: Cells
    """[buckets, 4, 256], of psdist.tables.retention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStatistics:
    num_rows: int
    value_bytes: int
    """Values of the rows that are stored."""
    state_bytes: int
    reserved_bytes: int
    """Memory for records, index and sketch."""
    num_dropped: int
    """Gradient rows of ids that were not admitted."""
    num_evicted: int


def state_words(spec: TableSpec) -> int:
    """Return the 4-byte words of a row's state: the optimizer's, and one for eviction."""
    optimizer = row_optimizer(spec.optimizer, spec.arguments)
    return optimizer.state_words(spec.dim) + bool(spec.evict)


class RowStore:
    """The rows of ``spec`` that belong to ``buckets``."""

    def __init__(self, spec: TableSpec, buckets: range = range(NUM_BUCKETS)) -> None:
        self.spec = spec
        self._buckets = buckets
        self._optimizer = row_optimizer(spec.optimizer, spec.arguments)
        self._kernels = row_kernels()
        self._eviction: Eviction | None = None
        if spec.evict:
            self._eviction = parse_eviction(spec.evict).share(len(buckets) / NUM_BUCKETS)
        self._admission: Admission | None = None
        if spec.admit > 1:
            self._admission = Admission(spec.admit, buckets, self._kernels)
        key_words = 2 if spec.num_rows is None or spec.num_rows > 2**31 else 1
        self._stride = key_words + spec.dim + state_words(spec)
        self._mapping = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        seed = np.array([spec.seed], np.int64).view(np.uint64) + np.uint64(1)
        self._memory = RowMemory(
            records=self._mapped(),
            index=empty_index(_FEWEST),
            key_words=key_words,
            dim=spec.dim,
            first=int(mixed(mixed(seed) ^ spec.key)[0]),
            step=np.float32(spec.scale * 2.0**-24),
            fill=self._optimizer.fill,
        )
        self._num_slots = 0
        self._free: Slots = np.empty(0, np.int32)
        """Slots below ``num_slots`` that are free again."""
        self._num_evicted = 0

    def __len__(self) -> int:
        return self._num_slots - len(self._free)

    def gather(self, ids: Ids) -> Rows:
        """Return the values of ``ids``, float32 [n, dim]."""
        found = np.empty((len(ids), self.spec.dim), np.float32)
        self._require(ids, found)
        self._kernels.gather(self._memory, ids, self._kernels.find(self._memory, ids), found)
        return found

    def gather_stored(self, ids: Ids) -> tuple[npt.NDArray[np.bool_], Rows]:
        """Return which of ``ids`` have a row, and the values of these."""
        slots = self._kernels.find(self._memory, ids)
        is_stored = slots >= 0
        if not is_stored.all():
            ids, slots = ids[is_stored], slots[is_stored]
        found = np.empty((len(ids), self.spec.dim), np.float32)
        self._kernels.gather(self._memory, ids, slots, found)
        return is_stored, found

    def merge(self, contributions: Sequence[Contribution]) -> tuple[Ids, Rows]:
        """Return the distinct ids and the sums of their weighted rows, added in this order."""
        for each in contributions:
            self._require(each.ids, each.rows)
        return self._kernels.merge(contributions, self.spec.dim)

    def apply(self, ids: Ids, gradients: Rows, *, lr: float, clock: int) -> None:
        """Step the rows of ``ids`` by ``gradients`` (float32 [n, dim]), then evict rows. Call it
        for each clock, also without ids. Raises :class:`UserError` if there is no memory."""
        self._require(ids, gradients)
        slots = self._kernels.find(self._memory, ids)
        if (slots < 0).any():
            is_stored = self._stored(ids, slots)
            if not is_stored.all():
                slots, gradients = slots[is_stored], gradients[is_stored]
        optimizer = self._optimizer
        if lr or optimizer.rule != "ftrl":  # which divides by it
            numbers, sizes = optimizer.numbers(lr), optimizer.sizes()
            self._kernels.update(self._memory, optimizer.rule, slots, gradients, numbers, sizes)
        if self._eviction is not None:
            self._eviction.note(self._marks(), slots, clock)
            if self._eviction.is_due(len(self), clock):
                self._evict(self._eviction, clock)

    def in_order(self) -> Slots:
        """Return the slots of all rows by :meth:`TableSpec.hashes`, so also by bucket; valid until
        the next :meth:`apply`."""
        live = self._live()
        hashes = self.spec.hashes(self._memory.keys(slice(self._num_slots)))
        found: Slots = live[np.argsort(hashes[live])]
        return found

    def stored(self, slots: Slots) -> StoredRows:
        """Return the rows of these slots: copies."""
        records = np.take(self._memory.records, slots, axis=0, mode="clip")  # no buffer
        words = records[:, self._memory.key_words :]
        values, state = words[:, : self.spec.dim], words[:, self.spec.dim :]
        ids = replace(self._memory, records=records).keys(slice(None))
        return StoredRows(ids, values, state, self.counts[:0])

    @property
    def counts(self) -> Cells:
        """The counts of each bucket, not a copy; no buckets without admission."""
        if self._admission is None:
            return np.empty((0, *SKETCH), np.uint8)
        return self._admission.cells

    def restore(self, rows: StoredRows, *, first_bucket: int) -> None:
        """Store rows of any buckets that are not here yet, and counts from
        ``first_bucket`` on."""
        slots = self._reserved(len(rows.ids))
        self._kernels.add(self._memory, rows.ids, slots)
        begin, end = self._memory.key_words, self._memory.key_words + self.spec.dim
        self._memory.records[slots, begin:end] = rows.values
        self._memory.records[slots, end:] = rows.state
        first = first_bucket - self._buckets.start
        self.counts[first : first + len(rows.counts)] = rows.counts

    def statistics(self) -> StoreStatistics:
        num, admission = len(self), self._admission
        return StoreStatistics(
            num_rows=num,
            value_bytes=4 * num * self.spec.dim,
            state_bytes=4 * num * self._optimizer.state_words(self.spec.dim),
            reserved_bytes=len(self._mapping) + self._memory.index.nbytes + self.counts.nbytes,
            num_dropped=0 if admission is None else admission.num_dropped,
            num_evicted=self._num_evicted,
        )

    def _require(self, ids: Ids, rows: Rows) -> None:
        """The kernels trust sizes and types: others would be read from foreign memory."""
        if rows.shape != (len(ids), self.spec.dim) or (ids.dtype, rows.dtype) != _DTYPES:
            raise InvariantError(
                f"table {self.spec.name}: {rows.dtype} rows {rows.shape} for {len(ids)} "
                f"{ids.dtype} ids; dim is {self.spec.dim}"
            )

    def _stored(self, ids: Ids, slots: Slots) -> npt.NDArray[np.bool_]:
        """Add the ids that have no slot, if they are admitted. Return which ids have one now."""
        missing = np.flatnonzero(slots < 0)
        if self._admission is not None:
            new, hashes = ids[missing], self._memory.hashes(ids[missing])
            missing = missing[self._admission.count(hashes, self.spec.buckets_of(new))]
        slots[missing] = self._reserved(len(missing))
        self._kernels.add(self._memory, ids[missing], slots[missing])
        if self._eviction is not None:
            self._marks()[slots[missing]] = 0
        return slots >= 0

    def _reserved(self, num: int) -> Slots:
        """Take free slots, with memory for their records and entries."""
        again = self._free[:num]
        end = self._num_slots + num - len(again)
        try:
            if end > _MOST:
                raise OverflowError
            self._grow(end)
            if len(self) + num > _FULL * len(self._memory.index):
                self._reindex(round((len(self) + num) * _GROWTH / _FULL))
        except (MemoryError, OSError, OverflowError) as error:
            raise UserError(
                f"table {self.spec.name}: no memory for {end} rows on this server "
                f"({4 * end * self._stride} bytes, {type(error).__name__}); use more servers, a "
                "smaller dim, admit= or evict="
            ) from None
        fresh = np.arange(self._num_slots, end, dtype=np.int32)
        self._free, self._num_slots = self._free[num:], end
        return np.concatenate([again, fresh])

    def _grow(self, num_rows: int) -> None:
        """Make place for the records of ``num_rows`` slots; the kernel moves pages, not bytes."""
        if num_rows <= len(self._memory.records):
            return
        num_rows = max(num_rows, _FEWEST, num_rows + num_rows // _MORE)
        num_bytes = -(-4 * self._stride * num_rows // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory.records = np.empty((0, self._stride), np.float32)  # a view forbids a resize
        try:
            self._mapping.resize(num_bytes)
        finally:
            self._memory.records = self._mapped()
        if num_bytes >= _HUGE:
            with suppress(OSError):  # a system without large pages
                self._mapping.madvise(mmap.MADV_HUGEPAGE)

    def _mapped(self) -> Rows:
        words = np.frombuffer(self._mapping, np.float32)
        num = len(words) // self._stride
        return words[: num * self._stride].reshape(num, self._stride)

    def _reindex(self, num_entries: int) -> None:
        self._memory.index = np.empty(0, self._memory.index.dtype)  # not both in memory
        self._memory.index = empty_index(num_entries)
        is_live = np.ones(self._num_slots, np.bool_)
        is_live[self._free] = False
        self._kernels.reindex(self._memory, is_live)

    def _live(self) -> Slots:
        """Return the slots of all rows."""
        return np.delete(np.arange(self._num_slots, dtype=np.int32), self._free)

    def _marks(self) -> npt.NDArray[np.int32]:
        """Return, by slot, the number that eviction keeps: a view."""
        return self._memory.records[:, -1].view(np.int32)

    def _evict(self, rule: Eviction, clock: int) -> None:
        live = self._live()
        gone = live[rule.victims(self._marks()[live], self._memory.keys(live), clock)]
        if len(gone):
            self._free = np.sort(np.concatenate([self._free, gone]))
            self._num_evicted += len(gone)
            self._reindex(len(self._memory.index))


def first_rows(specs: TableSpecs) -> list[RowStore]:
    """Return a store without rows for each table: it has the first values."""
    return [RowStore(replace(each, admit=0, evict="")) for each in specs.tables]
