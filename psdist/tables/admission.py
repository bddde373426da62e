"""Admission of ids: a table with ``admit=N`` gives a row to an id that N iterations have touched.

    admission = Admission(2, buckets=range(0, 2048))        # of one part
    is_admitted = admission.count(hashes, buckets)           # of ids without a row
    admission.cells                                          # for a checkpoint

An id without a row reads its first value, and its gradient is dropped. Occurrences are estimated by
a count-min sketch with conservative updates (Cormode and Muthukrishnan, J. Algorithms 2005; Estan
and Varghese, SIGCOMM 2002). An estimate exceeds the truth only where all four cells of an id are
shared. A table has 4 x 2^20 cells of one byte, 4 x 256 for each bucket. When half of a bucket's
cells are in use, its counts are halved, which forgets rare ids. Cells belong to buckets, so every
division of a table into parts admits the same ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from psdist.errors import UsageError
from psdist.tables.kernels.reference import SKETCH, Cells, Kernels


def check_admit(admit: object) -> int:
    """Return the argument ``admit`` of a table, iterations from 0 to 255; 0 and 1: an id gets its
    row at once. Raises :class:`UsageError`."""
    if type(admit) is not int or not 0 <= admit <= 255:
        raise UsageError(
            f"admit is {admit!r:.80}; expected a whole number from 0 to 255: the iterations that "
            "touch an id until it gets a row"
        )
    return admit


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

    @property
    def num_bytes(self) -> int:
        """Memory of all counts; it never changes."""
        return self.cells.nbytes

    def count(
        self, hashes: npt.NDArray[np.uint64], buckets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Count an occurrence of each id; return True for those that get a row. ``hashes``: of
        distinct ids; ``buckets``: of the same ids."""
        counts = self._kernels.count(self.cells, hashes, buckets - self._first)
        is_admitted = counts >= self._admit
        self.num_dropped += len(counts) - int(np.count_nonzero(is_admitted))
        return is_admitted
