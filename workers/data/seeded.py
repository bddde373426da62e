"""Random numbers in loader processes that follow from the batch, not from the process.

torch seeds a loader process once in a pass, so what an augmentation draws depends on the batches
that the process has made before: a pass that goes on in its middle would draw others. Here every
batch has a seed of its own, which travels with its list of indices.

    dataset = SeededDataset(dataset)
    for indices in batches: yield SeededIndices(indices, seed=(seed, epoch, worker, number))
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from psdist.workers.data.sharding import random_of


class SeededIndices(list[Any]):
    """The indices of a batch, and what its random numbers follow from."""

    def __init__(self, indices: Iterable[Any], seed: tuple[int, ...]) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededIndices, (list(self), self.seed)


class SeededDataset(Dataset[Any]):
    """``dataset``, for loader processes."""

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
    """``worker_init_fn`` of a loader, to which ``get_worker_info().dataset`` is the script's."""
    return partial(_begin, worker_init_fn)


def _begin(worker_init_fn: Callable[[int], None] | None, process: int) -> None:
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, SeededDataset):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch refuses a plain one
    if worker_init_fn is not None:
        worker_init_fn(process)
