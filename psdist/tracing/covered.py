"""Sets of times: the union of intervals, and how long it is within windows.

busy = Covered.of(trace.of(Span.STEP))
busy.within(begins, ends)                    # nanoseconds of it in each window
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from psdist.tracing.files import Spans

Times = npt.NDArray[np.int64]


class Covered:
    """The union of intervals, and how much of it lies before a time."""

    def __init__(self, begins: Times, ends: Times) -> None:
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order].astype(np.int64), ends[order].astype(np.int64)
        reached = np.maximum.accumulate(ends) if len(ends) else ends
        is_first = np.ones(len(begins), bool)
        is_first[1:] = begins[1:] > reached[:-1]
        is_last = np.ones(len(begins), bool)
        is_last[:-1] = is_first[1:]
        self.begins, self.ends = begins[is_first], reached[is_last]
        lengths = self.ends - self.begins
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    @classmethod
    def of(cls, spans: Spans) -> Covered:
        return cls(spans["begin_ns"], spans["end_ns"])

    @classmethod
    def union(cls, parts: Iterable[Covered]) -> Covered:
        found = list(parts)
        begins = [np.zeros(0, np.int64), *(each.begins for each in found)]
        ends = [np.zeros(0, np.int64), *(each.ends for each in found)]
        return cls(np.concatenate(begins), np.concatenate(ends))

    def with_all(self, *others: Covered) -> Covered:
        return Covered.union((self, *others))

    def split_by(self, other: Covered) -> tuple[Covered, Covered]:
        """Return what lies in ``other`` as well, and the rest."""
        edges = np.unique(np.concatenate([self.begins, self.ends, other.begins, other.ends]))
        begins, ends = edges[:-1], edges[1:]
        is_own = self.within(begins, ends) > 0
        is_both = is_own & (other.within(begins, ends) > 0)
        is_rest = is_own & ~is_both
        return Covered(begins[is_both], ends[is_both]), Covered(begins[is_rest], ends[is_rest])

    def until(self, times: Times) -> Times:
        """Return the covered nanoseconds before each of ``times``."""
        index = np.searchsorted(self.begins, times, side="right")
        inside = np.zeros(len(times), np.int64)
        has_one = index > 0
        last = index[has_one] - 1
        inside[has_one] = np.minimum(times[has_one], self.ends[last]) - self.ends[last]
        return self._before[index] + inside

    def within(self, begins: Times, ends: Times) -> Times:
        """Return the covered nanoseconds in each of these windows."""
        return self.until(ends) - self.until(begins)
