"""As psdist.workers.early.early_pushes, in a group of several: a chunk leaves when it is reduced.

Gradients go, bucket by bucket, to the worker whose slice a chunk is of; that pushes their sum.

    early = GroupPushes(parts, Buckets(...))
    early.push_ready()                        # buckets that are complete here; sums that have come
    early.given                               # chunks of buckets that this worker has begun
    early.sent                                # of its own chunks, those whose sum was pushed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from psdist.workers.blocking import Parts
from psdist.workers.early.early_pushes import EarlyPushes
from psdist.workers.group.buckets import Buckets, Opening
from psdist.workers.reduction import Terms


class GroupPushes(EarlyPushes):
    _is_shared: ClassVar = True

    def __init__(self, parts: Parts, buckets: Buckets) -> None:
        super().__init__(parts, parts.group.order.chunks)
        self.buckets = buckets
        self._num_complete = 0
        """Chunks of this iteration, the first of the order, that may leave here."""

    @property
    def has_begun(self) -> bool:
        return self.buckets.num_begun > 0

    @property
    def given(self) -> Mapping[int, bool]:
        return {chunk: self._is_frozen(chunk) for chunk in self.buckets.chunks_begun}

    @property
    def is_under_way(self) -> bool:
        return self.buckets.is_under_way

    def whole(self, num_chunks: int) -> int:
        return self.buckets.num_chunks_in(self.buckets.num_within(num_chunks))

    def push_ready(self) -> bool:
        buckets, terms = self.buckets, self.terms  # first, as in EarlyPushes
        while terms is not None and self._is_complete(self._num_complete, terms):
            self._num_complete += 1
        num_complete = buckets.num_within(self._num_complete)
        before = buckets.num_begun
        if not before:
            if self.is_stopped or terms is None or not num_complete:
                return False
            self.open(terms, num_buckets=buckets.num_within(len(self._sendable)))
        if self.is_stopped:
            num_complete = max(before - 1, 0)
        buckets.num_complete = num_complete
        sums = buckets.advance()
        if terms is not None and not self.is_stopped:
            for chunk in sums:
                self._push(replace(terms, weight=buckets.group_weight), chunk, buckets.absent)
        return bool(sums) or buckets.num_begun > before

    def open(self, terms: Terms, *, num_buckets: int) -> None:
        """Send the terms of this worker's gradients to the group; 0 buckets: none leave before
        ``step()``."""
        self.terms = terms
        self.buckets.open(
            Opening(
                set_index=self._loop.core.set_index,
                clock=terms.clock,
                hyper=terms.hyper,
                weight=terms.weight,
                num_buckets=num_buckets,
                frozen=self._frozen,
            )
        )

    def reset(self) -> None:
        super().reset()
        self.buckets.reset()
        self._num_complete = 0
        self._frozen = frozenset()
