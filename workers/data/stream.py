"""A dataset without indices, shared out among workers and their loader processes.

    dataset = split_stream(dataset, worker=1, num_workers=4)

A dataset may ask torch for its loader process (``get_worker_info``) and yield the part of that
process. Here it gets all loader processes of all workers, so it splits itself among them. A
dataset that does not ask before its first sample yields all samples, and process i of n keeps every
n-th one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker


class _Info:
    """The result of ``get_worker_info()``: one loader process of the whole job."""

    def __init__(self, *, id: int, num_workers: int, seed: int, dataset: Any) -> None:
        self._id = id
        self._num_workers = num_workers
        self.seed = seed
        self.dataset = dataset
        self.was_asked = False

    @property
    def id(self) -> int:
        self.was_asked = True
        return self._id

    @property
    def num_workers(self) -> int:
        self.was_asked = True
        return self._num_workers


class _Split(IterableDataset[Any]):
    def __init__(self, dataset: Any, worker: int, num_workers: int) -> None:
        self.dataset = dataset
        self._worker = worker
        self._num_workers = num_workers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # not there yet while this is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[Any]:
        own = get_worker_info()
        process, num_processes = (own.id, own.num_workers) if own is not None else (0, 1)
        info = _Info(
            id=self._worker * num_processes + process,
            num_workers=self._num_workers * num_processes,
            seed=own.seed if own is not None else 0,
            dataset=self.dataset,
        )
        with _told(info):
            samples = iter(self.dataset)
            first = list(islice(samples, 1))  # a generator asks when it is first advanced
        every = chain(first, samples)
        return every if info.was_asked else islice(every, info.id, None, info.num_workers)


@contextmanager
def _told(info: _Info) -> Iterator[None]:
    before = torch_worker._worker_info
    torch_worker._worker_info = info  # type: ignore[assignment] # as get_worker_info returns it
    try:
        yield
    finally:
        torch_worker._worker_info = before


def split_stream(dataset: Any, worker: int, num_workers: int) -> IterableDataset[Any]:
    """The part of ``dataset`` that is ``worker``'s of ``num_workers``; nothing is read here."""
    return _Split(dataset, worker, num_workers)
