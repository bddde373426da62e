"""Hooks copy gradients when autograd has finished them, and copies of the model tell nobody."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from psdist.protocol.partition import Partition, Piece
from psdist.workers.model.flat import FlatModel
from psdist.workers.model.gradient_hooks import GradientHooks

Seen = list[tuple[int, int]]


class Hooked:
    def __init__(self) -> None:
        self.model = nn.Linear(5, 3)
        pieces = [
            Piece(
                name=name,
                shape=tuple(parameter.shape),
                stride=tuple(parameter.stride()),
                dtype="float32",
                optimizer_group=0,
            )
            for name, parameter in self.model.named_parameters()
        ]
        self.flat = FlatModel(
            Partition.cut(pieces, chunk_bytes=4096), list(self.model.parameters())
        )
        self.seen: Seen = []
        self.hooks = GradientHooks(
            self.flat,
            on_gradient=lambda piece, count: self.seen.append((piece, count)),
            is_training=lambda: self.model.training,
        )
        self.hooks.attach()

    def backward(self, model: nn.Module | None = None, *, times: float = 1.0) -> None:
        (times * (model or self.model)(torch.ones(2, 5)).sum()).backward()


@pytest.fixture
def hooked() -> Hooked:
    return Hooked()


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def test_each_gradient_is_told_counted_and_copied(hooked: Hooked) -> None:
    hooked.backward()
    assert sorted(hooked.seen) == [(0, 1), (1, 1)]
    for piece in range(2):
        assert hooked.hooks.is_as_noted(piece)
        assert hooked.flat.holds_gradient(piece)
    hooked.hooks.begin()
    assert hooked.hooks.counts == [0, 0]
    assert not hooked.hooks.is_as_noted(0)


@pytest.mark.parametrize(("copies", "is_newest"), [("all", True), ("first", False)])
def test_a_second_gradient_is_copied_only_where_the_first_is_not_under_way(
    copies: str, is_newest: bool, hooked: Hooked
) -> None:
    hooked.hooks.copies = copies  # type: ignore[assignment] # one of its values
    hooked.backward()
    hooked.backward(times=3.0)
    assert sorted(hooked.seen) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert hooked.flat.holds_gradient(0) == is_newest
    assert hooked.hooks.is_as_noted(0) == is_newest


def test_a_gradient_that_nobody_copies_is_counted_all_the_same(hooked: Hooked) -> None:
    hooked.hooks.copies = "none"
    hooked.backward()
    assert sorted(hooked.seen) == [(0, 1), (1, 1)]
    assert not hooked.flat.holds_gradient(0)


def test_writes_are_seen_by_version_or_by_bits(hooked: Hooked) -> None:
    hooked.backward()
    weight, bias = hooked.model.weight.grad, hooked.model.bias.grad
    assert weight is not None
    assert bias is not None
    weight.mul_(1.0)  # another version of the same bits
    bias.data.add_(1.0)  # other bits of the same version
    assert [hooked.hooks.is_as_noted(piece) for piece in (0, 1)] == [False, True]
    assert [hooked.flat.holds_gradient(piece) for piece in (0, 1)] == [True, False]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("of", [copy.deepcopy, saved])
def test_a_copy_of_the_model_tells_nobody(
    of: Callable[[nn.Module], nn.Module], hooked: Hooked
) -> None:
    hooked.backward(of(hooked.model))
    assert hooked.seen == []
    hooked.backward()
    assert len(hooked.seen) == 2


def test_a_parameter_that_is_thawed_is_attached_to_later(hooked: Hooked) -> None:
    hooked.hooks.remove()
    hooked.model.weight.requires_grad_(False)
    hooked.hooks.attach()
    hooked.backward()
    assert hooked.seen == [(1, 1)]
    hooked.model.weight.requires_grad_(True)
    hooked.hooks.attach()
    hooked.hooks.attach()
    hooked.backward()
    assert sorted(hooked.seen) == [(0, 1), (1, 1), (1, 2)]


def test_what_comes_while_the_model_is_evaluated_is_neither_told_nor_counted(
    hooked: Hooked,
) -> None:
    hooked.model.eval()
    hooked.backward()
    assert not hooked.seen
    assert hooked.hooks.counts == [0, 0]
    assert not hooked.flat.holds_gradient(0)
    hooked.model.train()
    hooked.backward()  # adds to what is there
    assert sorted(hooked.seen) == [(0, 1), (1, 1)]
    assert hooked.flat.holds_gradient(0)
