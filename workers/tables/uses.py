"""Which versions of rows the iterations of a worker have used, for statistics and the history.

    uses = RowUses(owners, history)
    uses.bring(7, {0: version}, [120])         # replies have brought 120 rows of part 0 for 7
    uses.use(7)                                # a look-up of this iteration found some of them
    uses.use_kept(clocks, parts)               # and these rows of earlier iterations
    uses.commit(7, reduced, pushed=[0])

A record has, by part, the number of rows and the version of the oldest. Rows that were brought for
the same iteration count as old as the oldest of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from psdist.history.writers import WorkerHistory
from psdist.protocol.header import Header
from psdist.workers.reduction import Reduced

Ints = npt.NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max


class _Versions:
    """Rows by part, and the version of the oldest."""

    def __init__(self, num_parts: int) -> None:
        self.rows = np.zeros(num_parts, np.int64)
        self.oldest = np.full((3, num_parts), _NEVER)
        """Positions, clocks of replies, and updates that all groups have in them."""

    def add(self, rows: Ints, versions: Ints) -> None:
        """Add ``rows`` by part, of these ``versions``."""
        is_older = (rows > 0) & (versions[0] < self.oldest[0])
        self.oldest[:, is_older] = versions[:, is_older]
        self.rows += rows


class RowUses:
    def __init__(self, owners: Sequence[int], history: WorkerHistory | None, *, kept: int) -> None:
        """``owners``: the server of each part; ``kept``: iterations for which rows are used after
        the one that they were brought for."""
        self.staleness = Counter[int]()
        """Uses of parts in finished iterations, by staleness."""
        self._owners = np.asarray(owners, np.int64)
        self._history = history
        self._kept = kept
        self._brought: dict[int, _Versions] = {}
        """By iteration."""
        self._used: dict[int, Ints] = {}
        """By the iteration that they were brought for: the rows of each part that were used."""

    def bring(self, clock: int, versions: Mapping[int, Header], rows: Sequence[int]) -> None:
        """Replies have brought ``rows``, by part, for iteration ``clock``; ``versions``: by part,
        of the newest reply."""
        num_parts = len(self._owners)
        found = np.full((3, num_parts), _NEVER)
        for part, each in versions.items():
            found[:, part] = each.position, each.clock, each.min_done
        into = self._brought.setdefault(clock, _Versions(num_parts))
        into.add(np.asarray(rows, np.int64), found)

    def use(self, clock: int) -> None:
        """The iteration uses rows that were brought for ``clock``."""
        self._used[clock] = self._brought[clock].rows

    def use_kept(self, clocks: Ints, parts: Ints) -> None:
        """The iteration uses kept rows: the iteration that each was brought for, and its part."""
        num_parts, first = len(self._owners), int(clocks.min())
        counts = np.bincount((clocks - first) * num_parts + parts)
        counts.resize(-(-len(counts) // num_parts), num_parts)
        for clock in np.flatnonzero(counts.any(axis=1)).tolist():
            before = self._used.get(first + clock, 0)
            self._used[first + clock] = before + counts[clock]

    def commit(self, clock: int, reduced: Reduced, *, pushed: Sequence[int]) -> None:
        """Iteration ``clock`` pushes the parts ``pushed``."""
        used = _Versions(len(self._owners))
        for brought, rows in self._used.items():
            used.add(rows, self._brought[brought].oldest)
        self._used.clear()
        over = clock - self._kept
        self._brought = {each: rows for each, rows in self._brought.items() if each > over}
        is_used = used.rows > 0
        positions, replies, min_done = np.where(is_used, used.oldest, 0)
        self.staleness.update(np.maximum(0, clock - min_done[is_used]).tolist())
        if self._history is not None:
            parts = np.arange(len(self._owners))
            self._history.uses(clock, parts, self._owners, positions, replies, crcs=used.rows)
            empty = pushed if reduced.is_skipped else ()
            self._history.push(clock, reduced.weight, reduced.group_weight, empty, len(pushed))

    def close(self) -> None:
        """The worker has finished: end its history."""
        if self._history is not None:
            self._history.close()
