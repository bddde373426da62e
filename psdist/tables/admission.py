"""Admission of ids: a table with ``admit=N`` gives a row to an id that N iterations have touched.

    sketch = Sketch(buckets=range(0, 2048))        # of one part
    counts = sketch.count(hashes, buckets)         # of ids without a row: with this occurrence

An id without a row reads its first value, and its gradient is dropped. Occurrences are estimated by
a count-min sketch with conservative updates (Cormode and Muthukrishnan, J. Algorithms 2005; Estan
and Varghese, SIGCOMM 2002). An estimate exceeds the truth only where all four cells of an id are
shared. A table has 4 x 2^20 cells of one byte, 4 x 256 for each bucket. When half of a bucket's
cells are in use, its counts are halved, which forgets rare ids. Cells belong to buckets, so every
division of a table into parts admits the same ids.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from psdist.tables.specs import mixed

_DEPTH: Final = 4
_WIDTH: Final = 256
_MOST: Final = 255


class Sketch:
    """The counts of one part's ids."""

    def __init__(self, buckets: range) -> None:
        self._first = buckets.start
        self.cells: npt.NDArray[np.uint8] = np.zeros((len(buckets), _DEPTH, _WIDTH), np.uint8)
        """[buckets, 4, 256]: the whole state, by bucket."""

    def count(
        self, hashes: npt.NDArray[np.uint64], buckets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint8]:
        """Count an occurrence of each id; return the estimates, at most 255. ``hashes``: of
        distinct ids; ``buckets``: of the same ids."""
        own = buckets - self._first
        depths = np.arange(_DEPTH)
        columns = (mixed(hashes)[:, None] >> (8 * depths).astype(np.uint64)) & np.uint64(_WIDTH - 1)
        at = (own[:, None] * _DEPTH + depths) * _WIDTH + columns.astype(np.int64)
        flat = self.cells.reshape(-1)
        before = flat[at].min(axis=1)
        counts: npt.NDArray[np.uint8] = before + (before < _MOST)
        np.maximum.at(flat, at, counts[:, None])
        touched = np.unique(own)
        is_full = 2 * np.count_nonzero(self.cells[touched, 0], axis=1) > _WIDTH
        self.cells[touched[is_full]] >>= 1
        return counts
