"""A device that is none: its memory is the CPU's, and what is copied is copied late.

    with on_a_device(seed=3):
        run_virtually(...)                     # every model has mirrors, as on a GPU

Nobody's wait is there for show: who reads what a copy should have brought, without having waited,
finds what was there before; who writes to what a copy has still to read is told.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from psdist.protocol.memory import allocate, torch_dtype
from psdist.transfers import Copy, Mark, Pairs, Transfers
from psdist.workers.model.samples import same_bits


class LateTransfers(Transfers):
    """Copies are made in their order; each when it is waited for, or some time after it was asked
    for again."""

    has_mirrors = True
    device = torch.device("cpu")

    def __init__(self, seed: int, *, rate: float = 0.5) -> None:
        """``rate``: probability that a copy is complete when it is polled."""
        self._random = random.Random(seed)
        self._rate = rate
        self.under_way: deque[LateCopy] = deque()
        self.most_under_way = 0
        self.num_late = 0
        """How often a copy was asked for that was not done."""

    def device_memory(self, dtype: str, num_elements: int) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=torch_dtype(dtype))

    def allocate(self, num_bytes: int) -> memoryview:
        return allocate(num_bytes)

    def mark(self) -> Mark:
        return object()

    def begin(self, pairs: Pairs, *, after: Iterable[Mark]) -> LateCopy:
        return self.begin_computed(lambda: pairs, after=after)

    def begin_computed(self, compute: Callable[[], Pairs], *, after: Iterable[Mark]) -> LateCopy:
        assert all(mark is not None for mark in after)
        copy = LateCopy(self, compute)
        self.under_way.append(copy)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return copy

    def pass_time(self) -> None:
        """Perhaps one more copy is done."""
        if self.under_way and self._random.random() < self._rate:
            self.under_way.popleft().end()


class LateCopy(Copy):
    def __init__(self, transfers: LateTransfers, compute: Callable[[], Pairs]) -> None:
        """``compute`` is called late, too: it sees what the device's memory holds then."""
        self._transfers = transfers
        self._compute = compute
        self._pairs: Pairs = ()
        self._read: list[torch.Tensor] | None = None
        """Reads where the device has waited for the copy, but the host has not."""
        self._is_made = self._has_ended = False

    def is_done(self) -> bool:
        self._transfers.pass_time()
        self._transfers.num_late += not self._has_ended
        return self._has_ended

    def wait(self) -> None:
        while not self._has_ended:
            self._transfers.under_way.popleft().end()

    def join(self) -> None:
        for each in self._transfers.under_way:
            each.make()
            if each is self:
                self._read = [source.clone() for source, _ in self._pairs]
                break

    def make(self) -> None:
        if not self._is_made:
            self._is_made = True
            with torch.no_grad():
                self._pairs = self._compute()
            for source, target in self._pairs:
                target.copy_(source)

    def end(self) -> None:
        self.make()
        self._has_ended = True
        if self._read is not None:
            sources = (source for source, _ in self._pairs)
            is_same = map(same_bits, self._read, sources)
            assert all(is_same), "memory has changed that a copy was still reading"


@contextmanager
def _made_in(where: str, seed: int, rate: float) -> Iterator[list[LateTransfers]]:
    made: list[LateTransfers] = []

    def make(_device: Any) -> LateTransfers:
        made.append(LateTransfers(seed + len(made), rate=rate))
        return made[-1]

    with mock.patch(where, make):
        yield made


def on_a_device(*, seed: int = 0, rate: float = 0.5) -> AbstractContextManager[list[LateTransfers]]:
    """Every model that is prepared inside lies on such a device; the devices."""
    return _made_in("psdist.workers.model.flat.transfers_for", seed, rate)


def shards_on_a_device(
    *, seed: int = 0, rate: float = 0.5
) -> AbstractContextManager[list[LateTransfers]]:
    """Every server that is started inside has its shard on such a device; the devices."""
    return _made_in("psdist.ranks.server.transfers_for", seed, rate)
