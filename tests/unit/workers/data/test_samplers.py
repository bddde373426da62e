"""A user's own DataLoader, shared out; a sampler for one that stays the user's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from psdist.errors import UsageError
from psdist.protocol.collected import Brought
from psdist.workers.data.loader import EpochLoader
from psdist.workers.data.loaders import Loaders
from psdist.workers.data.position import Position


class Worker:
    """One worker's loaders, and what it has been told."""

    def __init__(
        self, worker: int = 0, num_workers: int = 1, global_batch: int | None = None
    ) -> None:
        self.sizes: list[tuple[int, float]] = []
        self.ends = 0
        self.digests: list[bytes] = []
        self.loaders = Loaders(
            seed=7,
            worker=worker,
            num_workers=num_workers,
            on_batch=self._on_batch,
            on_end=self._on_end,
            collective=self._collective,
            global_batch=global_batch,
        )

    def _on_batch(self, _position: Position, num_samples: int, nominal: float, _batch: Any) -> None:
        self.sizes.append((num_samples, nominal))

    def _collective(self, name: str, payload: bytes) -> Brought:
        assert name == "loader"
        self.digests.append(payload)
        return Brought((payload,), ((0, 1),), b"")

    def _on_end(self) -> None:
        self.ends += 1


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class Lengths(Sampler[list[int]]):
    """Batches of different sizes, in an order by Python's random numbers."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        numbers = list(range(sum(self._sizes)))
        random.shuffle(numbers)
        for size in self._sizes:
            yield [numbers.pop() for _ in range(size)]

    def __len__(self) -> int:
        return len(self._sizes)


def passes(
    make: Callable[[], DataLoader[Any]], *, num_workers: int, count: int = 1
) -> list[list[list[list[int]]]]:
    """By pass and worker: the batches."""
    workers = [Worker(worker, num_workers) for worker in range(num_workers)]
    loaders = [worker.loaders.share_out(make()) for worker in workers]
    found = [[[batch.tolist() for batch in loader] for loader in loaders] for _ in range(count)]
    for worker in workers[1:]:
        assert worker.digests == workers[0].digests
    return found


def joint(by_worker: list[list[list[int]]]) -> list[list[int]]:
    return [[n for part in parts for n in part] for parts in zip(*by_worker, strict=True)]


def test_a_plain_loader_is_shared_out_as_one_of_the_job() -> None:
    (found,) = passes(lambda: DataLoader(Numbers(10), batch_size=2), num_workers=2)
    assert joint(found) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_shuffled_loader_has_another_order_in_every_pass_and_every_sample_once() -> None:
    first, second = passes(
        lambda: DataLoader(Numbers(12), batch_size=2, shuffle=True), num_workers=3, count=2
    )
    for found in (first, second):
        assert sorted(n for batch in joint(found) for n in batch) == list(range(12))
    assert first != second


def test_drop_last_and_collate_fn_are_kept() -> None:
    worker = Worker()
    loader = worker.loaders.share_out(
        DataLoader(Numbers(5), batch_size=2, drop_last=True, collate_fn=tuple)
    )
    assert list(loader) == [(0, 1), (2, 3)]
    assert worker.sizes == [(2, 2), (2, 2)]


def weighted() -> DataLoader[Any]:
    weights = [1.0] * 6 + [0.0] * 6
    return DataLoader(Numbers(12), batch_size=2, sampler=WeightedRandomSampler(weights, 8))


def with_replacement() -> DataLoader[Any]:
    return DataLoader(
        Numbers(5), batch_size=2, sampler=RandomSampler(Numbers(5), replacement=True, num_samples=8)
    )


def with_own_generator() -> DataLoader[Any]:
    sampler = SubsetRandomSampler(range(8), generator=torch.Generator().manual_seed(0))
    return DataLoader(Numbers(12), batch_size=2, sampler=sampler)


@pytest.mark.parametrize("make", [weighted, with_replacement, with_own_generator])
def test_a_sampler_is_drawn_alike_by_all_workers_and_dealt(
    make: Callable[[], DataLoader[Any]],
) -> None:
    first, second = passes(make, num_workers=2, count=2)
    assert [len(batch) for batch in joint(first)] == [4, 4]
    assert first != second, "every pass draws again"
    alone, _ = passes(make, num_workers=1, count=2)
    drawn = [n for batch in alone[0] for n in batch]
    assert [n for batch in joint(first) for n in batch] == drawn
    worker = Worker()
    assert len(worker.loaders.share_out(make())) == 4


def test_drawing_leaves_all_global_random_numbers_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    list(Worker().loaders.share_out(DataLoader(Numbers(9), batch_sampler=Lengths([4, 5]))))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_whole_batches_go_round_and_the_last_ones_are_split() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(19), batch_sampler=Lengths([4, 2, 3, 3, 5, 2]))

    (alone,) = passes(make, num_workers=1)
    batches = alone[0]
    (found,) = passes(make, num_workers=4)
    rest = batches[4] + batches[5]
    assert found == [
        [batches[0], rest[0:1]],
        [batches[1], rest[1:3]],
        [batches[2], rest[3:5]],
        [batches[3], rest[5:7]],
    ]
    worker = Worker(1, 4)
    loader = worker.loaders.share_out(make())
    assert len(loader) == 2
    assert loader.batch_size is None
    list(loader)
    assert worker.sizes == [(2, 3.0), (2, 1.75)], "weights are shares of the round's samples"
    assert worker.ends == 0


def test_a_last_round_with_fewer_samples_than_workers_is_refused() -> None:
    loader = Worker(0, 3).loaders.share_out(
        DataLoader(Numbers(14), batch_sampler=Lengths([4, 4, 4, 2]))
    )
    with pytest.raises(UsageError, match="leaves 2 samples in its last 1 batches for 3 workers"):
        list(loader)


def test_torchs_own_batch_sampler_is_as_a_batch_size() -> None:
    sampler = BatchSampler(SequentialSampler(Numbers(8)), batch_size=2, drop_last=False)
    loader = DataLoader(Numbers(8), batch_sampler=sampler)
    worker = Worker(0, 2)
    shared = worker.loaders.share_out(loader)
    assert [batch.tolist() for batch in shared] == [[0, 1], [4, 5]]
    assert worker.sizes == [(2, 2), (2, 2)]


def test_a_stream_is_split_and_its_end_is_told() -> None:
    workers = [Worker(0, 2), Worker(1, 2)]
    found = [
        [batch.tolist() for batch in worker.loaders.share_out(DataLoader(Stream(), batch_size=2))]
        for worker in workers
    ]
    assert found == [[[0, 2], [4, 6]], [[1, 3], [5]]]
    assert [worker.sizes for worker in workers] == [[(2, 2), (2, 2)], [(2, 2), (1, 2)]]
    assert [worker.ends for worker in workers] == [1, 1]


def test_a_stream_that_makes_its_own_batches_counts_them() -> None:
    worker = Worker(1, 2)
    loader = worker.loaders.share_out(DataLoader(Stream(), batch_size=None))
    assert list(loader) == [1, 3, 5]
    assert worker.sizes == [(1, 1)] * 3


def test_alone_nobody_has_more_than_this_worker() -> None:
    worker = Worker()
    list(worker.loaders.share_out(DataLoader(Stream(), batch_size=4)))
    assert worker.ends == 0


def test_a_loader_of_the_job_is_shared_out_already() -> None:
    loaders = Worker().loaders
    loader = loaders.share_out(DataLoader(Numbers(4)))
    assert loaders.share_out(loader) is loader
    assert isinstance(loader, EpochLoader)


class Odd(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([1, 2])


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (Odd(Numbers(4)), "cannot share out a Odd, which has an __iter__ of its own"),
        (DataLoader(Numbers(4), in_order=False), "in_order=False"),
        (DataLoader(Numbers(4), batch_size=None), "batch_size=None over a dataset with indices"),
        (
            DataLoader(Numbers(4), sampler=DistributedSampler(Numbers(4), 2, 0)),
            "DistributedSampler, which would share the samples out a second time",
        ),
        (
            DataLoader(Numbers(4), num_workers=1, multiprocessing_context="fork"),
            "cannot start loader processes by fork",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(loader: DataLoader[Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Worker(0, 2).loaders.share_out(loader)


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (DataLoader(Numbers(8), batch_sampler=Lengths([2, 2])), "the batch sampler Lengths makes"),
        (DataLoader(Stream(), batch_size=None), "a DataLoader with batch_size=None makes"),
        (DataLoader(Stream(), batch_size=2), "expected a multiple of 2"),
        (DataLoader(Numbers(11)), "leave 1 for the last joint batch"),
    ],
)
def test_loaders_that_make_their_batches_themselves_take_no_global_batch(
    loader: DataLoader[Any], told: str
) -> None:
    with pytest.raises(UsageError, match=f"^training.global_batch = 5.*{told}"):
        Worker(0, 2, global_batch=5).loaders.share_out(loader)


def test_a_sampler_of_this_worker_takes_no_global_batch() -> None:
    with pytest.raises(
        UsageError,
        match=r"^training.global_batch = 5.*\(job.sampler\) makes its batches",
    ):
        Worker(0, 2, global_batch=5).loaders.sampler(
            Numbers(10), shuffle=False, drop_last=False, epoch=None
        )


@pytest.mark.parametrize("make", [weighted, with_own_generator])
def test_what_a_sampler_draws_is_dealt_as_a_global_batch(
    make: Callable[[], DataLoader[Any]],
) -> None:
    workers = [Worker(each, 3, global_batch=4) for each in range(3)]
    loaders = [worker.loaders.share_out(make()) for worker in workers]
    batches = [[batch.tolist() for batch in loader] for loader in loaders]
    alone = list(Worker(0, 1, global_batch=4).loaders.share_out(make()))
    assert joint(batches) == [batch.tolist() for batch in alone]
    assert [worker.sizes for worker in workers] == [[(1, 4 / 3)] * 2] * 2 + [[(2, 4 / 3)] * 2]
    assert loaders[0].batch_size == 2


def sampled(count: int, **options: bool) -> list[list[int]]:
    dataset = Numbers(count)
    found = [
        list(
            Worker(worker, 3).loaders.sampler(
                dataset, **{"shuffle": False, "drop_last": False, "epoch": None, **options}
            )
        )
        for worker in range(3)
    ]
    assert len({len(part) for part in found}) == 1
    return found


def test_a_workers_sampler_gives_all_workers_as_many_samples() -> None:
    assert sampled(7) == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    assert sampled(7, drop_last=True) == [[0, 3], [1, 4], [2, 5]]
    assert sampled(2) == [[0], [1], [0]]
    shuffled = sampled(9, shuffle=True)
    assert sorted(n for part in shuffled for n in part) == list(range(9))
    assert shuffled != sampled(9)


def test_a_workers_sampler_has_another_order_in_every_pass() -> None:
    sampler = Worker().loaders.sampler(Numbers(20), shuffle=True, drop_last=False, epoch=None)
    assert len(sampler) == 20
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_a_workers_sampler_refuses_a_dataset_that_leaves_it_nothing() -> None:
    with pytest.raises(UsageError, match="the dataset has 2 samples and the job 3 workers"):
        Worker(0, 3).loaders.sampler(Numbers(2), shuffle=True, drop_last=True, epoch=None)
