"""A worker counts the samples that its loaders had dealt to failed workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from psdist.workers.data.loaders import Loaders

SAMPLES = list(range(20))
"""Of three workers in batches of 2: parts of 2, 2, 2, then of 2, 3, 3."""
LOADERS: dict[str, Callable[[Loaders], Any]] = {
    "job.loader": lambda loaders: make(loaders, shard=True),
    "own sampler": lambda loaders: loaders.share_out(
        DataLoader(SAMPLES, batch_size=2, sampler=Backward(SAMPLES))
    ),
}


class Backward(SequentialSampler):
    def __iter__(self) -> Any:
        return iter(reversed(SAMPLES))


def make(loaders: Loaders, *, shard: bool) -> Any:
    return loaders.make(
        SAMPLES, batch_size=2, shuffle=True, drop_last=False, shard=shard, epoch=None, epochs=None,
        options={},
    )  # fmt: skip


def loaders_of(failed: set[int], *, is_training: bool = True) -> Loaders:
    return Loaders(
        seed=0,
        worker=0,
        num_workers=3,
        on_batch=lambda *_: None,
        on_end=lambda: None,
        collective=lambda *_: Alike(),
        is_training=lambda: is_training,
        dropped=lambda: failed,
    )


class Pairs(BatchSampler):
    """A batch sampler of the script's own."""


class Alike:
    payloads = (b"",)

    def unlike(self, _payload: bytes) -> list[int]:
        return []


@pytest.mark.parametrize("by", LOADERS)
def test_the_parts_of_failed_workers_count_from_the_next_batch_on(by: str) -> None:
    failed = set[int]()
    loaders = loaders_of(failed)
    counts = []
    for number, _ in enumerate(LOADERS[by](loaders)):
        counts.append(loaders.num_dropped)
        failed |= {0: {2}, 1: {1}}.get(number, set())
    assert counts == [0, 2, 2 + 3 + 3]


def test_each_pass_counts_all_of_a_failed_workers_part() -> None:
    loaders = loaders_of({1})
    loader = make(loaders, shard=True)
    for number in range(1, 3):
        assert sum(1 for _ in loader) == 3
        assert loaders.num_dropped == number * (2 + 2 + 3)


def test_samples_that_the_script_deals_or_evaluates_with_do_not_count() -> None:
    training, evaluating = loaders_of({1}), loaders_of({1}, is_training=False)
    pairs = Pairs(SequentialSampler(SAMPLES[:18]), 2, drop_last=False)
    for loaders, loader in (
        (training, make(training, shard=False)),
        (training, training.share_out(DataLoader(SAMPLES, batch_sampler=pairs))),
        (evaluating, make(evaluating, shard=True)),
    ):
        assert list(loader)
        assert loaders.num_dropped == 0
