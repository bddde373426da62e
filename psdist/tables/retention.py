"""Which ids of a table get a row (``admit``), and which rows it gives up (``evict``).

    admission = Admission(2, buckets=range(0, 2048))        # of one part
    is_admitted = admission.count(hashes, buckets)           # of ids without a row
    admission.cells                                          # for a checkpoint
    rule = parse_eviction("lru:50_000_000")                  # UsageError for anything else
    rule.note(marks, slots, clock)                           # rows that a push has touched
    rule.victims(marks, ids, clock)                          # positions of rows to evict

A table with ``admit=N`` gives a row to an id that N iterations have touched. Until then the id
reads its first value, and its gradient is dropped. Occurrences are estimated by a count-min sketch
with conservative updates (Cormode and Muthukrishnan, J. Algorithms 2005; Estan and Varghese,
SIGCOMM 2002). An estimate exceeds the truth only where all four cells of an id are shared. A table
has 4 x 2^20 cells of one byte, 4 x 256 for each bucket. When half of a bucket's cells are in use,
its counts are halved, which forgets rare ids. Cells belong to buckets, so every division of a table
into parts admits the same ids.

Evictions take place between iterations:

    lru:CAP   at most CAP rows; those that were touched the longest time ago go first
    lfu:CAP   at most CAP rows; those that were touched in the fewest iterations go first
    age:N     rows that were not touched for N iterations

A row keeps one number: the last clock at which a push touched it, or how many have touched it. A
table above CAP is brought down to 15/16 of CAP, and ages are looked at N/16 iterations apart, so
that a pass over all rows is paid by many new ones. Equal rows go in the order of their ids. A
table's CAP is divided among its parts by their buckets: with another number of servers, lru and lfu
may evict other rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from psdist.errors import UsageError
from psdist.tables.kernels.reference import SKETCH, Cells, Kernels, Slots
from psdist.tables.specs import Ids

_FORM: Final = re.compile(r"(lru|lfu|age):([0-9][0-9_]{0,18})", re.ASCII)
_SPARE: Final = 16
Marks = npt.NDArray[np.int32]


class Admission:
    """The counts of one part's ids, and the decision. ``admit``: 2 to 255; ``buckets``: the part's
    own."""

    def __init__(self, admit: int, buckets: range, kernels: Kernels) -> None:
        self._admit = admit
        self._first = buckets.start
        self._kernels = kernels
        self.cells: Cells = np.zeros((len(buckets), *SKETCH), np.uint8)
        """[buckets, 4, 256]: the whole state, by bucket."""
        self.num_dropped = 0
        """Occurrences of ids that were not admitted."""

    def count(
        self, hashes: npt.NDArray[np.uint64], buckets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Count an occurrence of each id; return True for those that get a row. ``hashes``: of
        distinct ids; ``buckets``: of the same ids."""
        counts = self._kernels.count(self.cells, hashes, buckets - self._first)
        is_admitted = counts >= self._admit
        self.num_dropped += len(counts) - int(np.count_nonzero(is_admitted))
        return is_admitted


@dataclass(frozen=True)
class Eviction:
    kind: str
    number: int
    """CAP, or N."""

    def share(self, fraction: float) -> Eviction:
        """Return the rule of a part that has this fraction of the table's ids."""
        if self.kind == "age":
            return self
        return Eviction(self.kind, max(1, round(self.number * fraction)))

    def note(self, marks: Marks, slots: Slots, clock: int) -> None:
        """Mark the rows that were touched at ``clock``. ``marks``: by slot, 0 for a new row."""
        if self.kind == "lfu":
            marks[slots] += 1
        else:
            marks[slots] = clock

    def is_due(self, num_rows: int, clock: int) -> bool:
        if self.kind == "age":
            return clock % max(1, self.number // _SPARE) == 0
        return num_rows > self.number

    def victims(self, marks: Marks, ids: Ids, clock: int) -> npt.NDArray[np.intp]:
        """Return the positions of the rows to evict. ``marks``, ``ids``: of all rows."""
        if self.kind == "age":
            return np.flatnonzero(marks < clock - self.number)
        num = len(ids) - (self.number - self.number // _SPARE)
        bound = np.partition(marks, num - 1)[num - 1]
        sure, equal = np.flatnonzero(marks < bound), np.flatnonzero(marks == bound)
        num -= len(sure)
        return np.concatenate([sure, equal[np.argpartition(ids[equal], num - 1)[:num]]])


def parse_eviction(text: str) -> Eviction:
    """Return the rule. Raises :class:`UsageError`."""
    match = _FORM.fullmatch(text)
    number = int(match[2]) if match else 0
    if match is None or not 0 < number < 2**31:
        raise UsageError(
            f"evict is {text!r:.80}; expected 'lru:CAP' or 'lfu:CAP' (rows of the table), or "
            "'age:N' (iterations), with a number from 1 to 2147483647"
        )
    return Eviction(match[1], number)
