"""The ids of the next batch, from where the last ones lay: batches of other lengths and kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from psdist.workers.tables.foresight import Foresight

Take = Callable[[Any], torch.Tensor]


def wanted_of(batches: Sequence[Any], take: Take) -> list[list[int]]:
    """Return, by batch, the ids that are expected of the next one. ``take``: what a script looks
    up of a batch."""
    coming = list(batches)
    foresight = Foresight(1, peek=lambda n: coming[n - 1] if n <= len(coming) else None)
    found = []
    while coming:
        batch = coming.pop(0)
        foresight.batch(batch)
        foresight.used(0, take(batch))
        found.append(foresight.wanted(1)[0].tolist())
    return found


def counted(*lengths: int) -> list[torch.Tensor]:
    """Return batches of ids, all different."""
    return list(torch.arange(sum(lengths)).split(lengths))


@pytest.mark.parametrize(
    ("take", "last"),
    [
        (lambda ids: ids, [24, 25, 26, 27]),
        (lambda ids: ids[4:], []),
        (lambda ids: ids.chunk(2)[1], []),
        (lambda ids: ids.chunk(2)[0], [24, 25, 26, 27]),
        (lambda ids: ids[3::2], []),
        (lambda ids: ids.view(2, -1).t(), []),
    ],
)
def test_a_last_batch_that_is_shorter_is_read_within_its_bounds(
    take: Take, last: list[int]
) -> None:
    batches = [each.clone() for each in counted(8, 8, 8, 4)]
    assert wanted_of(batches, take)[1:3] == [sorted(take(batches[2]).flatten().tolist()), last]


def test_a_view_is_found_in_the_tensor_that_contains_it() -> None:
    """Tensors of a batch may share their memory."""
    batches = [(each[:4], each[4:]) for each in counted(8, 8, 8)]
    assert wanted_of(batches, lambda batch: batch[1][:2])[1] == [20, 21]
    assert wanted_of([(right, left) for left, right in batches], lambda batch: batch[1])[1] == [
        *(16, 17, 18, 19)
    ]


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.eye(3, dtype=torch.long).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.arange(2), torch.arange(3)]),
        lambda: torch.tensor(3),
        lambda: torch.zeros(0, dtype=torch.long),
        lambda: "a text",
    ],
    ids=["sparse", "nested", "a number", "empty", "text"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_things_in_a_batch_are_passed_over(other: Callable[[], Any]) -> None:
    batches = [{"other": other(), "ids": each} for each in counted(4, 4, 4)]
    assert wanted_of(batches, lambda batch: batch["ids"] + 0)[1] == [8, 9, 10, 11]
