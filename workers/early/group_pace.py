"""Whether a group's gradients are worth reducing bucket by bucket, while backward goes on; pure.

Each bucket is agreed upon, handed to whoever drives the loop, and copied. That pays where a
backward pass hides it. How long passes take, the workers tell one another while overlap watches
(psdist.workers.step_table), so that all of them judge by the same figures.

    pace = GroupPace(num_buckets=8, num_watched=3)
    pace.watch([0.021, 0.019])                # seconds of each worker, in one iteration
    pace.why_not()                            # "" where it pays
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

BUCKET_S: Final = 3e-3
"""Of a backward pass, for each bucket, from which on it pays. Where cores are short, a bucket costs
1 to 1.5 ms (docs/performance.md), on each worker and beside what the backward pass computes."""


class GroupPace:
    def __init__(self, *, num_buckets: int, num_watched: int) -> None:
        """``num_watched``: iterations that are judged by."""
        self._least_s = BUCKET_S * num_buckets
        self._num_watched = num_watched
        self._shortest_s: list[float] = []
        """By iteration, of the worker whose backward pass was shortest."""

    def watch(self, backward_s: Sequence[float]) -> None:
        """Seconds from each worker's first gradient to ``step()``; 0: it does not watch. The first
        iterations count that every worker has watched."""
        if all(backward_s) and len(self._shortest_s) < self._num_watched:
            self._shortest_s.append(min(backward_s))

    def why_not(self) -> str:
        """Why gradients should wait for ``step()``, for people; "" where they need not."""
        if not self._shortest_s or (usual_s := median(self._shortest_s)) >= self._least_s:
            return ""
        return (
            f"gradients are complete {usual_s * 1e3:.1f} ms after the first one, and reducing them "
            f"bucket by bucket pays from {self._least_s * 1e3:.0f} ms on"
        )
