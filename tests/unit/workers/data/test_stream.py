"""Datasets without indices: what each worker and loader process gets of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from psdist.workers.data.stream import split_stream


class Numbers(IterableDataset[int]):
    """Yields all, whoever asks."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Split(Numbers):
    """Heeds what torch tells of loader processes, as its documentation shows."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        yield from range(first, self.count, step)


def parts(dataset: Numbers, *, num_workers: int, processes: int = 0) -> list[list[int]]:
    """What each worker, or each loader process of each worker, gets."""
    found = []
    for worker in range(num_workers):
        for process in range(max(1, processes)):
            stream = split_stream(dataset, worker, num_workers)
            info = SimpleNamespace(id=process, num_workers=processes, seed=0, dataset=stream)
            told = info if processes else None
            with mock.patch("torch.utils.data._utils.worker._worker_info", told):
                found.append(list(stream))
                assert get_worker_info() is told, "as before"
    return found


@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize("kind", [Numbers, Split])
def test_every_sample_goes_to_one_process_of_one_worker(
    kind: type[Numbers], processes: int
) -> None:
    found = parts(kind(11), num_workers=3, processes=processes)
    assert sorted(number for part in found for number in part) == list(range(11))
    assert all(found)


def test_in_real_loader_processes_too() -> None:
    loader = DataLoader(
        split_stream(Split(11), 1, 2),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="forkserver",
    )
    assert sorted(loader) == [2, 3, 6, 7, 10]


def test_without_loader_processes_samples_are_dealt_in_turn() -> None:
    assert parts(Numbers(7), num_workers=3) == [[0, 3, 6], [1, 4], [2, 5]]
    assert parts(Split(7), num_workers=3) == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize("kind", [Numbers, Split])
def test_a_worker_may_get_nothing(kind: type[Numbers]) -> None:
    assert parts(kind(2), num_workers=3) == [[0], [1], []]


def test_the_datasets_own_attributes_are_there() -> None:
    stream = split_stream(Numbers(5), 0, 2)
    assert stream.count == 5  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="colour"):
        _ = stream.colour  # type: ignore[attr-defined]
