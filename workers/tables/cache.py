"""Rows that a worker keeps and uses again: the cache of its tables.

    kept = RowCaches(specs, num_rows=10_000, staleness=16)
    kept.put(0, ids, rows, clock=7)                  # brought for iteration 7
    found = kept.find(0, ids, clock=20)              # ids are int64, ascending
    found.at, found.rows                             # positions in ``ids``, float32 [n, dim]
    kept.missing(0, ids, clock=21)                   # those that must be asked for

A row that was brought for iteration c serves iterations c to c + ``staleness``. The worker's own
pushes change nothing here (HET, Miao et al., VLDB 2022, writes to its cache): the server's next
answer has them. So a kept row lacks what was pushed to it since, at most ``staleness`` iterations
more than the mode allows, which psdist check proves. When a cache is full, the rows that were used
least recently make room.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from psdist.tables.kernels import row_kernels
from psdist.tables.kernels.reference import RowMemory, Slots, empty_index
from psdist.tables.specs import Ids, Rows, TableSpecs

_KEY_WORDS: Final = 2
_ENTRIES: Final = 1.5
"""Entries of the index, by row."""
_NEVER: Final = np.iinfo(np.int64).max
_SHARE: Final = 8
"""A full cache drops this part of its rows at once: the index is made again."""


class Found(NamedTuple):
    """Kept rows."""

    at: npt.NDArray[np.intp]
    """Positions of their ids among those that were asked for."""
    rows: Rows
    clocks: npt.NDArray[np.int64]
    """The iterations that they were brought for."""
    parts: npt.NDArray[np.int64]


class _Cache:
    """The rows of one table."""

    def __init__(self, dim: int, num_rows: int) -> None:
        self.kernels = row_kernels()
        self.memory = RowMemory(
            records=np.empty((num_rows, _KEY_WORDS + dim), np.float32),
            index=empty_index(int(num_rows * _ENTRIES) + 1),
            key_words=_KEY_WORDS,
            dim=dim,
            first=0,
            step=np.float32(0),
            fill=0.0,
        )
        self.clocks = np.zeros(num_rows, np.int64)
        self.used = np.zeros(num_rows, np.int64)
        """By slot: the last iteration that used it."""
        self.parts = np.zeros(num_rows, np.int64)
        self._free: Slots = np.arange(num_rows, dtype=np.int32)

    def take(self, num: int, *, beside: Slots) -> Slots:
        """Return free slots; rows at the slots ``beside`` stay."""
        if num > len(self._free):
            num_rows = len(self.used)
            self.used[self._free], self.used[beside] = -1, _NEVER
            gone = min(max(num, num_rows // _SHARE), num_rows - len(beside))
            self._free = np.argpartition(self.used, gone - 1)[:gone].astype(np.int32)
            is_live = np.ones(num_rows, np.bool_)
            is_live[self._free] = False
            self.memory.index["slot"] = -1
            self.kernels.reindex(self.memory, is_live)
        taken, self._free = self._free[:num], self._free[num:]
        return taken


class RowCaches:
    """``staleness``: see above; ``num_rows``: of each table, at most."""

    def __init__(self, specs: TableSpecs, *, num_rows: int, staleness: int) -> None:
        self.staleness = staleness
        self._specs = specs
        self._tables = [
            _Cache(each.dim, min(num_rows, each.num_rows or num_rows)) for each in specs.tables
        ]

    def _slots(self, table: int, ids: Ids, clock: int) -> Slots:
        """Return the slots of ids whose rows may be used in iteration ``clock``; others are
        negative."""
        cache = self._tables[table]
        slots = cache.kernels.find(cache.memory, ids)
        slots[cache.clocks[slots] < clock - self.staleness] = -1
        is_here = slots >= 0
        cache.used[slots[is_here]] = np.maximum(cache.used[slots[is_here]], clock)
        return slots

    def find(self, table: int, ids: Ids, *, clock: int) -> Found:
        """Return what there is of ``ids`` for iteration ``clock``."""
        cache, slots = self._tables[table], self._slots(table, ids, clock)
        at = np.flatnonzero(slots >= 0)
        slots = slots[at]
        rows = cache.memory.records[slots, _KEY_WORDS:]
        return Found(at, rows, cache.clocks[slots], cache.parts[slots])

    def missing(self, table: int, ids: Ids, *, clock: int) -> Ids:
        """Return these of ``ids`` that are not there for iteration ``clock``; the others stay."""
        return ids[self._slots(table, ids, clock) < 0]

    def put(self, table: int, ids: Ids, rows: Rows, *, clock: int) -> None:
        """Keep rows that were brought for iteration ``clock``, instead of older ones."""
        cache = self._tables[table]
        ids, rows = ids[: len(cache.used)], rows[: len(cache.used)]
        slots = cache.kernels.find(cache.memory, ids)
        new = slots < 0
        taken = cache.take(int(np.count_nonzero(new)), beside=slots[~new])
        cache.kernels.add(cache.memory, ids[new], taken)
        slots[new] = taken
        cache.memory.records[slots, _KEY_WORDS:] = rows
        cache.clocks[slots] = cache.used[slots] = clock
        cache.parts[slots] = self._specs.parts_of(table, ids)
