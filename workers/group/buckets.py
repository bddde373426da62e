"""Reduction of a group's gradients bucket by bucket during the backward pass.

Each worker *opens* an iteration by an agreement at its first complete bucket. If all workers mean
the same iteration and are willing, buckets follow strictly in order, one at a time, each as soon as
it is complete on all workers. No function here waits. In ``step()`` the workers compare their
progress (``num_begun``), and all catch up with the furthest one (``catch_up``).

The local gradients do not change: copies, times the worker's share, are added.

    buckets = Buckets(channel, partition, order, gradients=flats, sums={3: tensor, ...})
    buckets.open(Opening(set_index=0, clock=7, hyper=b"...", weight=1.0, num_buckets=5))
    buckets.num_complete = 1
    while ...: for chunk in buckets.advance(): ...      # its sum is complete
    buckets.catch_up(most)
    buckets.reset()

The channel is used by these buckets only (:meth:`GroupChannel.duplicate`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from psdist.errors import InvariantError
from psdist.protocol.memory import as_tensor
from psdist.protocol.partition import Partition, Span, buckets_of
from psdist.workers.group.channel import GroupChannel, Pending, Slices

_DIGEST_BYTES = 6
"""A float64 carries 48 bits exactly."""
_WEIGHT_AT, _FROZEN_AT = 3, 5
"""Indices in an opening's row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A worker's part of the agreement that opens an iteration."""

    set_index: int
    clock: int
    hyper: bytes
    """Packed hyperparameters."""
    weight: float
    num_buckets: int
    """The first buckets of the order that may leave early; 0: this worker is not willing."""
    frozen: frozenset[int] = frozenset()
    """Pieces without a gradient on this worker."""

    def row(self) -> list[float]:
        digest = hashlib.blake2b(self.hyper, digest_size=_DIGEST_BYTES).digest()
        alike = [self.set_index, self.clock, int.from_bytes(digest, "little")]
        return [*alike, self.weight, self.num_buckets, *sorted(self.frozen)]


@dataclass(frozen=True, slots=True)
class _Bucket:
    chunks: Sequence[int]
    slices: Slices
    """Slices of the copies of its chunks."""
    own: Sequence[int]
    """Chunks of this worker: at most one. More if chunks leave in the order of memory, where a
    slice is a run of neighbours."""


class Buckets:
    def __init__(
        self,
        channel: GroupChannel,
        partition: Partition,
        order: Sequence[int],
        *,
        gradients: Sequence[torch.Tensor],
        sums: Mapping[int, torch.Tensor],
    ) -> None:
        """``order``: of the chunks, the same in all groups; ``gradients``: this worker's, by flat
        buffer; ``sums``: for each chunk of its slice the memory for the group's gradient."""
        self._channel = channel
        self._gradients = gradients
        self._sums = sums
        self._chunks = partition.chunks
        owner = {
            chunk: place
            for place, chunks in enumerate(partition.slices(channel.size, order))
            for chunk in chunks
        }
        self._buckets = [self._bucket(bucket, owner) for bucket in buckets_of(order, channel.size)]
        # The copies of an operation are free when the next one is done.
        num_bytes = partition.max_chunk_bytes
        self._copies = [
            [channel.allocate(num_bytes) for _ in range(channel.size)] for _ in range(2)
        ]
        self._opening: Opening | None = None
        self._agreeing: Pending[list[list[float]]] | None = None
        self._reducing: Pending[None] | None = None
        self.num_complete = 0
        """The first buckets of the order that are complete on this worker."""
        self.num_open = 0
        """Buckets that may leave early on all workers in this iteration; 0 before it is open."""
        self.is_agreed = False
        """True when the opening agreement is complete."""
        self.group_weight = 0.0
        self.absent: frozenset[int] = frozenset()
        """Pieces that are frozen on all workers, after the agreement."""
        self._share = 0.0
        self._num_reduced = 0

    def _bucket(self, chunks: Sequence[int], owner: Mapping[int, int]) -> _Bucket:
        slices: list[list[Span]] = [[] for _ in range(self._channel.size)]
        own: list[int] = []
        for index, chunk in enumerate(chunks):
            slices[owner[chunk]].append(Span(index, 0, self._chunks[chunk].length))
            if owner[chunk] == self._channel.place:
                own.append(chunk)
        return _Bucket(chunks, slices, own)

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def num_within(self, num_chunks: int) -> int:
        """Return the buckets within the first ``num_chunks`` chunks of the order."""
        if num_chunks == self.num_chunks_in(self.num_buckets):
            return self.num_buckets
        return num_chunks // self._channel.size

    def num_chunks_in(self, num_buckets: int) -> int:
        """Return the chunks of the first ``num_buckets`` buckets of the order."""
        return sum(len(bucket.chunks) for bucket in self._buckets[:num_buckets])

    @property
    def num_begun(self) -> int:
        """Operations of this iteration that this worker has begun, with its opening."""
        if self._opening is None:
            return 0
        return 1 + self._num_reduced + (self._reducing is not None)

    @property
    def is_under_way(self) -> bool:
        """True if an operation of this worker still waits for other workers."""
        return self._reducing is not None or (self._agreeing is not None and not self.is_agreed)

    @property
    def chunks_begun(self) -> list[int]:
        """Chunks of buckets that this worker has begun to reduce."""
        begun = self._buckets[: max(self.num_begun - 1, 0)]
        return [chunk for bucket in begun for chunk in bucket.chunks]

    def open(self, opening: Opening) -> None:
        """Open the iteration: the first bucket is complete here, or other workers have begun."""
        if self._opening is not None:
            raise InvariantError(f"iteration {opening.clock} was opened twice in a group")
        self._opening = opening
        self._agreeing = self._channel.agree("optimizer.step", opening.row())

    def advance(self) -> list[int]:
        """Advance as far as the other workers allow. Return this worker's newly summed chunks."""
        self._agree()
        found: list[int] = []
        while self._finish(found) and self._num_reduced < min(self.num_open, self.num_complete):
            self._begin()
        return found

    def catch_up(self, num_begun: int) -> list[int]:
        """As :meth:`advance`, up to ``num_begun`` operations, which other workers have begun. All
        gradients of the iteration must be complete."""
        if num_begun and self._opening is None:
            raise InvariantError("a group's iteration is caught up with that was not opened here")
        self.num_complete = max(num_begun - 1, 0)
        return self.advance()

    def has_caught_up(self, num_begun: int) -> bool:
        """True if ``num_begun`` operations are complete."""
        return not num_begun or (self.is_agreed and self._num_reduced >= num_begun - 1)

    def catching_up(self, num_begun: int) -> Pending[None]:
        """Return an operation that ends when :meth:`has_caught_up`."""
        return _CatchingUp(self, num_begun)

    def wait(self, at_most_s: float) -> None:
        """As :meth:`Pending.wait`, for the current operation."""
        pending = self._reducing or self._agreeing
        if pending is not None:
            pending.wait(at_most_s)

    def reset(self) -> None:
        """End the iteration."""
        if self.is_under_way:
            raise InvariantError("an iteration of a group ends while it is being reduced")
        self._opening = self._agreeing = None
        self.is_agreed = False
        self.num_complete = self.num_open = self._num_reduced = 0
        self.group_weight = self._share = 0.0
        self.absent = frozenset()

    def _agree(self) -> None:
        if self._agreeing is None or self.is_agreed or not self._agreeing.is_done():
            return
        assert self._opening is not None
        table = self._agreeing.result()
        self.is_agreed = True
        self.group_weight = sum(row[_WEIGHT_AT] for row in table)
        self.absent = frozenset.intersection(
            *(frozenset(map(int, row[_FROZEN_AT:])) for row in table)
        )
        if self.group_weight and all(row[:_WEIGHT_AT] == table[0][:_WEIGHT_AT] for row in table):
            self._share = self._opening.weight / self.group_weight
            self.num_open = int(min(row[_WEIGHT_AT + 1] for row in table))

    def _finish(self, found: list[int]) -> bool:
        """Whether no bucket is being reduced any more."""
        if self._reducing is None:
            return True
        if not self._reducing.is_done():
            return False
        self._reducing.result()
        self._reducing = None
        bucket = self._buckets[self._num_reduced]
        self._num_reduced += 1
        found += bucket.own
        return True

    def _begin(self) -> None:
        bucket = self._buckets[self._num_reduced]
        copies: list[torch.Tensor] = []
        for memory, index in zip(self._copies[self._num_reduced % 2], bucket.chunks, strict=False):
            chunk = self._chunks[index]
            copy = as_tensor(memory[: chunk.num_bytes], chunk.dtype, chunk.length)
            part = self._gradients[chunk.buffer][chunk.start : chunk.start + chunk.length]
            copies.append(torch.mul(part, self._share, out=copy))
        sums = [self._sums[chunk] for chunk in bucket.own]
        self._reducing = self._channel.reduce_scatter(copies, bucket.slices, sums)


class _CatchingUp:
    """A :class:`Pending` of several operations."""

    def __init__(self, buckets: Buckets, num_begun: int) -> None:
        self._buckets = buckets
        self._num_begun = num_begun

    def is_done(self) -> bool:
        self._buckets.catch_up(self._num_begun)
        return self._buckets.has_caught_up(self._num_begun)

    def wait(self, at_most_s: float) -> None:
        self._buckets.wait(at_most_s)

    def result(self) -> None:
        pass
