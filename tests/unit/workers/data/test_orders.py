"""Each pass has its own order, whatever its dataset object is, and the same on all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset

from psdist.workers.data.loader import PlannedBatches
from psdist.workers.data.orders import Kind, Order, PassOrders
from psdist.workers.data.processes import SeededIndices
from psdist.workers.data.seen import SeenPasses
from tests.support.script_runs import Worker

NUM_SAMPLES, NUM_PASSES = 24, 5


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


DATASETS: dict[str, Callable[[], Any]] = {
    "a class of the script's": Numbers,
    "a list": lambda: list(range(NUM_SAMPLES)),
    "a Subset": lambda: Subset(Numbers(), range(NUM_SAMPLES)),
    "tensors": lambda: TensorDataset(torch.arange(NUM_SAMPLES)),
}
LOADERS: dict[str, Callable[[Worker, Any], Any]] = {
    "job.loader": lambda job, dataset: job.loader(dataset),
    "all samples": lambda job, dataset: job.loader(dataset, shard=False),
    "prepared": lambda job, dataset: job.loaders.share_out(DataLoader(dataset, shuffle=True)),
    "own sampler": lambda job, dataset: job.loaders.share_out(
        DataLoader(dataset, sampler=RandomSampler(dataset, num_samples=NUM_SAMPLES - 2))
    ),
    "job.sampler": lambda job, dataset: job.loaders.sampler(
        dataset, shuffle=True, drop_last=False, epoch=None
    ),
}


def samples(loader: Any) -> tuple[int, ...]:
    return tuple(
        int(each) for batch in loader for each in torch.as_tensor(_first(batch)).reshape(-1)
    )


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, list) else batch


def orders(job: Worker, make: Callable[[], Any], load: Callable[[Worker, Any], Any]) -> list[Any]:
    return [samples(load(job, make())) for _ in range(NUM_PASSES)]


def are_different(passes: list[Any]) -> bool:
    return len(set(passes)) == len(passes)


@pytest.mark.parametrize("of", DATASETS)
@pytest.mark.parametrize("by", LOADERS)
@pytest.mark.parametrize("has_epochs", [False, True])
def test_a_new_dataset_in_every_epoch_has_another_order_in_every_epoch(
    of: str, by: str, has_epochs: bool
) -> None:
    job = Worker()
    found = []
    for _ in job.epochs(NUM_PASSES) if has_epochs else range(NUM_PASSES):
        found.append(samples(LOADERS[by](job, DATASETS[of]())))
    assert are_different(found)


def test_two_loaders_side_by_side_have_different_orders() -> None:
    job = Worker()
    pairs = [job.loader(Numbers()) for _ in range(2)]
    assert are_different([samples(each) for each in pairs])


def test_one_dataset_has_the_orders_of_its_epochs_with_and_without_a_loop_of_psdists() -> None:
    job, other = Worker(), Worker()
    loader, other_loader = job.loader(Numbers()), other.loader(Numbers())
    by_count = [samples(loader) for _ in range(3)]
    assert [samples(other_loader) for _ in other.epochs(3)] == by_count
    given = Worker()
    assert [samples(given.loader(Numbers(), epoch=each)) for each in range(3)] == by_count


def test_a_second_loop_and_passes_outside_have_other_orders() -> None:
    job = Worker()
    loader = job.loader(Numbers())
    found = [samples(loader)]
    for _ in range(2):
        found += [samples(loader) for _ in job.epochs(2)]
    assert are_different([*found, samples(loader)])


@torch.no_grad()
def evaluated(loader: Any) -> tuple[int, ...]:
    return samples(loader)


@pytest.mark.parametrize("has_epochs", [False, True])
def test_an_evaluation_on_the_chief_alone_does_not_shift_the_passes_that_train(
    has_epochs: bool,
) -> None:
    def script(job: Worker) -> list[Any]:
        found = []
        for _ in job.epochs(3) if has_epochs else range(3):
            if job.worker == 0:
                evaluated(job.loader(Numbers()))
            found.append(samples(job.loader(Numbers(), batch_size=NUM_SAMPLES)))
            if job.worker == 0:
                evaluated(job.loader(Numbers(), shard=False))
        return found

    parts = zip(*(script(Worker(worker=each, num_workers=2)) for each in range(2)), strict=True)
    for one, other in parts:
        assert sorted(one + other) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("num_workers", [2, 3])
def test_any_number_of_workers_sees_the_same_joint_batches(num_workers: int) -> None:
    def script(job: Worker) -> list[Any]:
        found = []
        for _ in job.epochs(3):
            loader = job.loader(Numbers(), batch_size=12 // job.num_workers)
            found.append([samples([batch]) for batch in loader])
            evaluated(job.loader(Numbers()))
        return found

    (whole,) = (script(Worker(worker=0, num_workers=1)) for _ in range(1))
    parts = [script(Worker(worker=each, num_workers=num_workers)) for each in range(num_workers)]
    for epoch, joint in enumerate(whole):
        together = [sum(batch, ()) for batch in zip(*(p[epoch] for p in parts), strict=True)]
        assert together == joint


def test_loader_processes_draw_other_numbers_in_every_pass() -> None:
    seen = SeenPasses()
    seeds = []
    for number in range(6):
        if number == 3:
            seen.start_epoch(is_resumed=False)
        a_pass = seen.start(
            dataset := Numbers(), is_shared=True, within=None if number < 3 else (0, number)
        )
        batches = PlannedBatches(
            dataset=dataset,
            batch_size=NUM_SAMPLES,
            global_batch=None,
            drop_last=False,
            shuffle=False,
            seed=3,
            worker=0,
            num_workers=1,
        )
        batches.start_pass(a_pass)
        (indices,) = batches
        assert isinstance(indices, SeededIndices)
        seeds.append(indices.seed)
    assert are_different(seeds)


def test_every_pass_of_a_loop_has_a_seed_of_its_own() -> None:
    numbers = PassOrders()
    found = []
    for loop in range(2):
        for epoch in range(3):
            numbers.start_epoch()
            for kind in Kind:
                for _ in range(2):
                    order = numbers.next_in_epoch(kind, loop=loop, epoch=epoch)
                    found.append((order.epoch, order.seed_of(7)))
    assert are_different(found)
    assert found[0] == (0, 7)
    assert Order(2, (0, 1, 0)).seed_of(7) != Order(2, (0, 1, 0)).seed_of(8)
