"""Loader processes: random numbers that follow from the batch, and an end with their rank.

torch seeds a loader process once per pass, so the draws of an augmentation depend on the batches
that the process has made before. A pass that continues from its middle would draw other numbers.
Here each batch has a seed of its own, which travels with its list of indices.

torch's processes end with their parent. With a fork server the parent is that server, which they
keep open in turn: after the rank is killed, both would stay. So they watch the rank.

    dataset = SeededDataset(dataset)
    for indices in batches: yield SeededIndices(indices, seed=(seed, epoch, worker, number))
    options["worker_init_fn"] = ends_with_its_rank(options.get("worker_init_fn"))
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from psdist.workers.data.sharding import epoch_order, random_of

_EVERY_S: Final = 1.0
_ENDED: Final = frozenset("ZX")
"""States in /proc/PID/stat of a process that does not run any more."""


class SeededIndices(list[Any]):
    """The indices of a batch, with the seed of its random numbers."""

    def __init__(self, indices: Iterable[Any], seed: tuple[int, ...]) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededIndices, (list(self), self.seed)


def seeded_batches(
    parts: Iterable[range], *, num_samples: int, shuffle: bool, seed: int, epoch: int, worker: int
) -> Iterator[SeededIndices]:
    """Yield the samples at these positions of the epoch's order, batch by batch."""
    order = epoch_order(num_samples=num_samples, shuffle=shuffle, seed=seed, epoch=epoch)
    return (
        SeededIndices(map(int, order[part.start : part.stop]), (seed, epoch, worker, part.start))
        for part in parts
    )


class SeededDataset(Dataset[Any]):
    """A dataset whose batches seed the random numbers of their loader process."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        if isinstance(indices, SeededIndices) and get_worker_info() is not None:
            seed_all(*indices.seed)
        fetch_all = getattr(self.dataset, "__getitems__", None)
        if fetch_all is not None:
            found: list[Any] = fetch_all(list(indices))
            return found
        return [self.dataset[each] for each in indices]


def seed_all(seed: int, epoch: int, *more: int) -> None:
    """torch's, numpy's and Python's generators of this process follow from these numbers."""
    first, second, third = random_of(seed, epoch, *more).integers(2**32, size=3)
    torch.default_generator.manual_seed(int(first))
    random.seed(int(second))
    np.random.seed(int(third))


def told_of(worker_init_fn: Callable[[int], None] | None) -> Callable[[int], None]:
    """Return a ``worker_init_fn`` that sees the script's dataset in ``get_worker_info()``."""
    return partial(_show_dataset, worker_init_fn)


def _show_dataset(worker_init_fn: Callable[[int], None] | None, process: int) -> None:
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, SeededDataset):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch refuses a plain one
    if worker_init_fn is not None:
        worker_init_fn(process)


def ends_with_its_rank(worker_init_fn: Callable[[int], None] | None) -> Callable[[int], None]:
    """Return a ``worker_init_fn`` that also ends the loader process after this process."""
    rank = os.getpid()
    return partial(_begin_watch, rank, started_at(rank), worker_init_fn)


def _begin_watch(
    rank: int, since: str, worker_init_fn: Callable[[int], None] | None, process: int
) -> None:
    Thread(target=_watch, args=(rank, since), name="rank-watch", daemon=True).start()
    if worker_init_fn is not None:
        worker_init_fn(process)


def _watch(rank: int, since: str) -> None:
    while started_at(rank) == since:
        time.sleep(_EVERY_S)
    os._exit(1)


def started_at(process: int) -> str:
    """Return the start time, which differs for a later process of the same number; "" after the
    process has ended, or if the system does not tell."""
    try:
        told = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *fields = told.rpartition(")")[2].split()
    return "" if state in _ENDED else fields[18]
