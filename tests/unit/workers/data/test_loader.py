"""Sharding: the arithmetic by hypothesis, the loader against what one process would see.

Longer than other modules: one loader, every option of torch's.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from psdist.errors import UsageError
from psdist.workers.data.loader import EpochLoader, Feed, shard_loader
from psdist.workers.data.sharding import BatchPlan, EpochCounter, epoch_order, require_joint_batches

SIZES = {
    "num_samples": st.integers(1, 400),
    "batch_size": st.integers(1, 17),
    "num_workers": st.integers(1, 9),
}


def plan_or_skip(num_samples: int, batch_size: int, num_workers: int, drop_last: bool) -> BatchPlan:
    assume(num_samples >= num_workers)
    assume(not drop_last or num_samples >= batch_size * num_workers)
    return BatchPlan(
        num_samples=num_samples,
        batch_size=batch_size,
        num_workers=num_workers,
        drop_last=drop_last,
    )


# --- the plan -----------------------------------------------------------------------------------


@given(**SIZES)
def test_every_position_is_taken_exactly_once(
    num_samples: int, batch_size: int, num_workers: int
) -> None:
    plan = plan_or_skip(num_samples, batch_size, num_workers, drop_last=False)
    taken = [
        position
        for index in range(plan.num_batches)
        for worker in range(num_workers)
        for position in plan.part(index, worker)
    ]
    assert taken == list(range(num_samples))


@given(**SIZES, drop_last=st.booleans())
def test_parts_of_a_batch_differ_by_at_most_one_sample_and_none_is_empty(
    num_samples: int, batch_size: int, num_workers: int, drop_last: bool
) -> None:
    plan = plan_or_skip(num_samples, batch_size, num_workers, drop_last)
    for index in range(plan.num_batches):
        sizes = [len(plan.part(index, worker)) for worker in range(num_workers)]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        if index < plan.num_batches - 1 or drop_last:
            assert set(sizes) == {batch_size}
        else:
            assert max(sizes) <= batch_size + 1


@given(**SIZES)
def test_drop_last_leaves_out_less_than_one_joint_batch(
    num_samples: int, batch_size: int, num_workers: int
) -> None:
    plan = plan_or_skip(num_samples, batch_size, num_workers, drop_last=True)
    taken = sum(len(plan.joint_batch(index)) for index in range(plan.num_batches))
    assert 0 <= num_samples - taken < batch_size * num_workers


@given(**SIZES)
def test_the_workers_together_take_the_batches_of_one_process_with_a_larger_batch(
    num_samples: int, batch_size: int, num_workers: int
) -> None:
    plan = plan_or_skip(num_samples, batch_size, num_workers, drop_last=False)
    alone = BatchPlan(num_samples=num_samples, batch_size=batch_size * num_workers, num_workers=1)
    rest = num_samples % (batch_size * num_workers)
    same = alone.num_batches if rest == 0 or rest >= num_workers else alone.num_batches - 2
    for index in range(same):
        assert plan.joint_batch(index) == alone.joint_batch(index)


@given(
    num_samples=st.integers(1, 300),
    global_batch=st.integers(1, 40),
    num_workers=st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_a_global_batch_is_the_same_samples_for_any_number_of_workers(
    num_samples: int, global_batch: int, num_workers: int, drop_last: bool
) -> None:
    def plan_of(workers: int) -> BatchPlan:
        return BatchPlan(
            num_samples=num_samples,
            batch_size=3,
            num_workers=workers,
            drop_last=drop_last,
            global_batch=global_batch,
        )

    rest = num_samples % global_batch
    assume(num_workers <= min(global_batch, num_samples))
    assume(num_samples >= global_batch if drop_last else not 0 < rest < num_workers)
    plan, alone = plan_of(num_workers), plan_of(1)
    require_joint_batches(
        num_samples, global_batch=global_batch, num_workers=num_workers, drop_last=drop_last
    )
    assert plan.num_batches == alone.num_batches
    for index in range(plan.num_batches):
        parts = [plan.part(index, worker) for worker in range(num_workers)]
        joint = [position for part in parts for position in part]
        assert joint == list(alone.part(index, 0))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        # Weights are samples per nominal ones: together as many as workers, in a full batch.
        weight = sum(Fraction(size * num_workers, global_batch) for size in sizes)
        assert weight == Fraction(len(joint) * num_workers, global_batch)
    assert plan.nominal == global_batch / num_workers
    assert plan.num_taken(plan.num_batches) == num_samples - drop_last * rest


def test_what_cannot_be_dealt_as_a_global_batch_is_refused() -> None:
    def require(**changes: Any) -> None:
        given = {"global_batch": 5, "num_workers": 3, "drop_last": False, "num_samples": 22}
        require_joint_batches(**(given | changes))

    with pytest.raises(
        UsageError,
        match=r"training.global_batch = 5: the dataset's 22 samples leave 2 for",
    ):
        require()
    for fine in ({"drop_last": True}, {"num_workers": 2}, {"num_samples": 20}, {"num_samples": 23}):
        require(**fine)
    require(global_batch=None)  # there the rest joins the batch before
    with pytest.raises(
        UsageError,
        match=r"^training.global_batch = 5: expected at least 6, one sample",
    ):
        BatchPlan(num_samples=22, batch_size=1, num_workers=6, global_batch=5)
    with pytest.raises(UsageError, match=r"one batch of all workers takes 5 \(global_batch\)"):
        BatchPlan(num_samples=4, batch_size=1, num_workers=3, drop_last=True, global_batch=5)


def test_samples_too_few_for_all_workers_join_the_batch_before() -> None:
    plan = BatchPlan(num_samples=2 * 12 + 2, batch_size=4, num_workers=3)
    assert plan.num_batches == 2
    assert [len(plan.part(1, worker)) for worker in range(3)] == [4, 5, 5]


def test_a_batch_beyond_the_last_is_an_index_error() -> None:
    plan = BatchPlan(num_samples=10, batch_size=2, num_workers=2)
    with pytest.raises(IndexError, match="batch 3 of 3"):
        plan.joint_batch(3)


def test_a_dataset_smaller_than_the_job_is_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"3 samples and the job 4 workers.*shard=False"):
        BatchPlan(num_samples=3, batch_size=2, num_workers=4)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="the dataset is empty"):
        BatchPlan(num_samples=0, batch_size=2, num_workers=1)


def test_drop_last_that_would_drop_everything_is_refused() -> None:
    with pytest.raises(UsageError, match=r"drop_last=True leaves no batch.*7 samples.*takes 8"):
        BatchPlan(num_samples=7, batch_size=4, num_workers=2, drop_last=True)


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, None, True])
def test_a_batch_size_that_is_no_positive_number_is_refused(batch_size: Any) -> None:
    with pytest.raises(UsageError, match="batch_size must be a whole number >= 1"):
        BatchPlan(num_samples=7, batch_size=batch_size, num_workers=2)


# --- the order ----------------------------------------------------------------------------------


@given(num_samples=st.integers(1, 200), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**33))
def test_the_order_is_a_permutation_that_seed_and_epoch_decide(
    num_samples: int, seed: int, epoch: int
) -> None:
    order = epoch_order(num_samples=num_samples, shuffle=True, seed=seed, epoch=epoch)
    again = epoch_order(num_samples=num_samples, shuffle=True, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(num_samples))
    assert list(order) == list(again)


def test_seeds_and_epochs_all_have_different_orders() -> None:
    orders = {
        tuple(epoch_order(num_samples=50, shuffle=True, seed=seed, epoch=epoch))
        for seed in (0, 1, 2, 2**32)
        for epoch in (0, 1, 2)
    }
    assert len(orders) == 12


def test_without_shuffle_the_order_is_the_datasets() -> None:
    assert list(epoch_order(num_samples=4, shuffle=False, seed=3, epoch=1)) == [0, 1, 2, 3]


# --- the count of passes ------------------------------------------------------------------------


class Squares(Dataset[int]):
    """Can be watched by weak reference; sample i is i * i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index * index


def test_passes_over_each_dataset_object_are_counted_apart() -> None:
    counter = EpochCounter()
    one, other = [1, 2], [1, 2]
    assert [counter.start_pass(one) for _ in range(3)] == [0, 1, 2]
    assert counter.start_pass(other) == 0
    assert counter.start_pass(one) == 3


def test_a_pass_over_everything_does_not_shift_the_epochs_of_sharded_passes() -> None:
    counter = EpochCounter()
    dataset = Squares(3)
    counter.start_pass(dataset)
    assert counter.start_pass(dataset, shard=False) == 0
    assert counter.start_pass(dataset) == 1
    assert counter.start_pass(dataset, shard=False) == 1


def test_passes_over_a_new_dataset_begin_with_the_number_that_is_given() -> None:
    counter = EpochCounter()
    dataset, other = Squares(3), Squares(3)
    assert [counter.start_pass(dataset, first=each) for each in (0, 5)] == [0, 1]
    assert [counter.start_pass(other, first=each) for each in (2, 7)] == [2, 3]


def test_the_count_goes_with_the_dataset() -> None:
    counter = EpochCounter()
    for _ in range(20):  # ids are used again at once in a loop like this one
        dataset = Squares(3)
        assert counter.start_pass(dataset) == 0
        assert counter.start_pass(dataset, shard=False) == 0
        del dataset


def test_a_dataset_that_cannot_be_watched_keeps_its_count() -> None:
    counter = EpochCounter()
    for _ in range(20):
        dataset = [1, 2, 3]
        assert counter.start_pass(dataset) == 0
        del dataset


# --- the loader ---------------------------------------------------------------------------------


def make_loader(dataset: Any, **changes: Any) -> EpochLoader:
    epoch = changes.pop("epoch", 0)
    feed = {"seed": 5, "worker": 0, "num_workers": 1, "on_batch": lambda *_: None}
    feed["next_pass"] = epoch if callable(epoch) else lambda: epoch
    feed |= {key: changes.pop(key) for key in [*changes] if key in (*feed, "on_end", "watch")}
    options = {"batch_size": 4, "shuffle": True, "drop_last": False} | changes
    return shard_loader(dataset, Feed(**feed), **options)


def rows(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(num_samples), -torch.arange(num_samples))


def test_the_workers_batches_joined_are_the_batches_of_one_process() -> None:
    dataset = rows(101)
    parts = [make_loader(dataset, worker=worker, num_workers=3) for worker in range(3)]
    alone = make_loader(dataset, batch_size=12)
    assert {len(part) for part in parts} == {len(alone)} == {9}
    for joined, (*batches,) in zip(alone, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat([x for x, _ in batches]), joined[0])
        assert torch.equal(torch.cat([y for _, y in batches]), joined[1])


def test_a_loader_deals_a_global_batch_in_place_of_its_batch_size() -> None:
    told: list[tuple[int, float]] = []
    loader = make_loader(
        rows(30),
        worker=2,
        num_workers=4,
        global_batch=10,
        on_batch=lambda *each: told.append(each[:2]),
    )
    assert [len(x) for x, _ in loader] == [2, 2, 2]  # 2, 3, 2 and 3 of 10
    assert told == [(2, 2.5)] * 3
    assert loader.batch_size == 3
    everything = make_loader(rows(30), worker=2, num_workers=4, global_batch=10, shard=False)
    assert [len(x) for x, _ in everything] == [4] * 7 + [2]


def test_a_loader_of_which_no_global_batch_can_be_dealt_is_refused_when_it_is_made() -> None:
    with pytest.raises(UsageError, match="leave 1 for the last joint batch"):
        make_loader(rows(31), num_workers=4, global_batch=10)
    grown = [0] * 30
    loader = make_loader(grown, num_workers=4, global_batch=10)
    grown.append(0)
    with pytest.raises(UsageError, match="leave 1 for the last joint batch"):
        iter(loader)


def test_a_stream_is_dealt_as_a_global_batch_where_all_workers_get_as_many() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(24))

    loader = make_loader(Stream(), num_workers=3, global_batch=12, shuffle=False)
    assert [x.tolist() for x in loader] == [[0, 3, 6, 9], [12, 15, 18, 21]]
    with pytest.raises(
        UsageError, match=r"training.global_batch = 10: expected a multiple of 3, the number"
    ):
        make_loader(Stream(), num_workers=3, global_batch=10, shuffle=False)


def test_on_batch_is_called_just_before_each_batch_with_its_size_and_the_nominal_one() -> None:
    seen: list[Any] = []
    loader = make_loader(
        rows(2 * 12 + 2),
        worker=2,
        num_workers=3,
        on_batch=lambda num_samples, batch_size, _batch: seen.append((num_samples, batch_size)),
    )
    for x, _ in loader:
        seen.append(len(x))
    assert seen == [(4, 4), 4, (5, 4), 5]


def test_each_iteration_of_a_loader_is_the_next_epoch() -> None:
    counter = EpochCounter()
    dataset = rows(32)
    loader = make_loader(dataset, epoch=lambda: counter.start_pass(dataset))
    passes = [torch.cat([x for x, _ in loader]).tolist() for _ in range(2)]
    assert passes[0] != passes[1]
    for epoch, order in enumerate(passes):
        again = make_loader(dataset, epoch=epoch)
        assert torch.cat([x for x, _ in again]).tolist() == order


def test_a_pass_starts_with_iter_and_two_may_be_open_at_once() -> None:
    counter = EpochCounter()
    dataset = rows(8)
    loader = make_loader(dataset, batch_size=8, epoch=lambda: counter.start_pass(dataset))
    first, second = iter(loader), iter(loader)
    assert counter.start_pass(dataset) == 2
    assert next(second)[0].tolist() == list(
        epoch_order(num_samples=8, shuffle=True, seed=5, epoch=1)
    )
    assert next(first)[0].tolist() == list(
        epoch_order(num_samples=8, shuffle=True, seed=5, epoch=0)
    )


def test_without_shard_every_worker_gets_everything_in_order() -> None:
    for worker in range(3):
        loader = make_loader(rows(10), shard=False, shuffle=False, worker=worker, num_workers=3)
        assert [x.tolist() for x, _ in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_without_shard_a_dataset_may_be_smaller_than_the_job() -> None:
    loader = make_loader(rows(2), shard=False, shuffle=False, worker=7, num_workers=8)
    assert [x.tolist() for x, _ in loader] == [[0, 1]]


def test_a_plain_list_is_a_dataset() -> None:
    loader = make_loader([10, 11, 12, 13], batch_size=2, shuffle=False, worker=1, num_workers=2)
    assert [x.tolist() for x in loader] == [[12, 13]]


def test_dataloader_options_pass_through() -> None:
    loader = make_loader(Squares(4), shuffle=False, loader_options={"collate_fn": tuple})
    assert list(loader) == [(0, 1, 4, 9)]


def test_iterating_leaves_torchs_global_random_numbers_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(make_loader(rows(8)))
    assert torch.equal(before, torch.get_rng_state())


class Draws(Dataset[tuple[int, float, str]]):
    """A sample says its index, a random number, and how its process was started."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, float, str]:
        assert get_worker_info() is not None
        method = type(multiprocessing.current_process()).__name__
        return index, float(torch.rand(())), method


def draw(**changes: Any) -> list[tuple[list[int], list[float], list[str]]]:
    loader = make_loader(
        Draws(), loader_options={"num_workers": 1, "collate_fn": columns}, **changes
    )
    return list(loader)


def columns(samples: list[tuple[int, float, str]]) -> tuple[list[Any], ...]:
    return tuple(list(column) for column in zip(*samples, strict=True))


def test_loader_processes_start_by_forkserver_with_seeds_of_the_epoch_and_the_worker() -> None:
    first = draw(worker=0, num_workers=2)
    assert first == draw(worker=0, num_workers=2)
    assert {name for _, _, names in first for name in names} == {"ForkServerProcess"}
    other_worker = draw(worker=1, num_workers=2)
    assert other_worker[0][1] != first[0][1]
    other_epoch = draw(worker=0, num_workers=2, epoch=1)
    assert other_epoch[0][1] != first[0][1]


@pytest.mark.parametrize("context", ["fork", multiprocessing.get_context("fork")])
def test_loader_processes_by_fork_are_refused(context: Any) -> None:
    with pytest.raises(UsageError, match="cannot start loader processes by fork, because MPI"):
        make_loader(rows(8), loader_options={"num_workers": 1, "multiprocessing_context": context})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("sampler", [0, 1]),
        ("batch_sampler", [[0, 1]]),
        ("generator", torch.Generator()),
        ("in_order", False),
    ],
)
def test_options_that_would_undo_the_sharding_are_refused(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"job.loader does not take {option}: "):
        make_loader(rows(8), loader_options={option: value})


def test_defaults_of_refused_options_are_fine() -> None:
    options = {"sampler": None, "batch_sampler": None, "generator": None, "in_order": True}
    assert len(make_loader(rows(8), loader_options=options)) == 2


def test_a_dataset_smaller_than_the_job_is_refused_when_the_loader_is_made() -> None:
    with pytest.raises(UsageError, match="3 samples and the job 4 workers"):
        make_loader(rows(3), num_workers=4)


def test_a_generator_is_no_dataset() -> None:
    with pytest.raises(UsageError, match=r"cannot share out a generator: it needs len\(dataset\)"):
        make_loader(x for x in range(3))


@pytest.mark.parametrize("epoch", [-1, 1.0, "2"])
def test_an_epoch_that_is_no_count_is_refused(epoch: Any) -> None:
    with pytest.raises(UsageError, match="epoch must be a whole number >= 0"):
        iter(make_loader(rows(8), epoch=epoch))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_an_iterable_dataset_that_splits_itself_is_passed_on_with_its_sizes() -> None:
    sizes: list[tuple[int, int]] = []
    loader = make_loader(
        Stream(),
        shard=False,
        shuffle=False,
        on_batch=lambda num_samples, batch_size, _batch: sizes.append((num_samples, batch_size)),
    )
    assert [x.tolist() for x in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sizes == [(4, 4), (4, 4), (2, 4)]
    with pytest.raises(TypeError):
        len(loader)


def test_an_iterable_dataset_cannot_be_shuffled_by_us() -> None:
    with pytest.raises(UsageError, match="cannot shuffle an IterableDataset"):
        make_loader(Stream(), shard=False)
    with pytest.raises(UsageError, match="batch_size must be"):
        make_loader(Stream(), shard=False, shuffle=False, batch_size=0)
