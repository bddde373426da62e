"""Storages of a batch's tensors, and the nodes with which the backward of a pass begins."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from psdist.workers.model.forward_hooks import OutputHook, UseHook, storages_in, tensors_in


@dataclass
class Nested:
    parts: dict[str, Any]


def test_views_have_the_storage_of_a_batch_and_copies_another() -> None:
    batch = Nested({"x": [torch.zeros(4, 3)], "y": (torch.zeros(4), "name")})
    x, y = storages_in(batch)
    assert storages_in(batch.parts["x"][0][2:].T) == [x]
    assert storages_in(batch.parts["y"][0].clone())[0] not in (x, y)


def test_a_storage_that_was_freed_is_no_later_one() -> None:
    kept = []
    for _ in range(100):  # the memory is used again at once in a loop like this one
        (storage,) = storages_in(torch.zeros(1000))
        assert storage.expired()
        assert storage not in kept
        kept.append(storage)


def test_a_tensor_without_a_storage_has_none() -> None:
    assert storages_in([torch.eye(2).to_sparse(), "text", None]) == []


class Numbers(Mapping[str, Any]):
    """As a data set or a vocabulary: many values, made when they are read."""

    def __init__(self) -> None:
        self.num_read = 0

    def __getitem__(self, key: str) -> list[int]:
        self.num_read += 1
        return [int(key)]

    def __iter__(self) -> Iterator[str]:
        return map(str, range(len(self)))

    def __len__(self) -> int:
        return 100_000


def test_a_search_for_tensors_ends_after_a_thousand_nodes() -> None:
    numbers = Numbers()
    assert storages_in([numbers, {"deeper": [torch.zeros(2)]}]) == []
    assert numbers.num_read <= 1000


@pytest.mark.parametrize(
    "beside",
    [
        [[1] * 512 for _ in range(64)],
        ["word"] * 100_000,
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(600))),
        [nn.Linear(2, 2)] * 64,
    ],
    ids=["lists of ids", "words", "a module", "modules"],
)
def test_a_tensor_is_found_beside_much_that_holds_none_of_the_batch(beside: Any) -> None:
    x = torch.zeros(4, 3)
    assert storages_in([beside, {"deeper": {"still": [x]}}]) == storages_in(x)


def test_tensors_are_found_in_the_order_of_the_tree() -> None:
    first, second = torch.zeros(2), torch.zeros(3)
    found = tensors_in([{"a": [[first]]}, second])
    assert [id(each) for each in found] == [id(first), id(second)]
    loop: list[Any] = [first]
    loop.append(loop)
    assert tensors_in(loop)[0] is first


def hooked(model: nn.Module) -> list[Any]:
    seen: list[Any] = []
    use = UseHook(lambda num_samples, _storages: seen.append(num_samples))
    model.register_forward_pre_hook(use, with_kwargs=True)
    model.register_forward_hook(OutputHook(seen.append), always_call=True)
    return seen


def test_a_pass_with_gradients_tells_its_samples_and_where_its_backward_begins() -> None:
    seen = hooked(model := nn.Linear(3, 2))
    output = model(torch.zeros(4, 3))
    assert seen == [4, [output.grad_fn]]
    with torch.no_grad():
        model(torch.zeros(4, 3))
    copy.deepcopy(model)(torch.zeros(4, 3))
    assert len(seen) == 2


def test_a_pass_that_fails_tells_so() -> None:
    seen = hooked(model := nn.Linear(3, 2))
    with pytest.raises(RuntimeError):
        model(torch.zeros(4, 5))
    assert seen == [4, None]
