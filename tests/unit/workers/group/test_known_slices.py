"""What follows from slices is worked out once, and again where anything is other than it was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from psdist.errors import InvariantError
from psdist.protocol.partition import Span
from psdist.workers.group.channel import KnownSlices, Slices


class Counted:
    def __init__(self) -> None:
        self.num_made = 0
        self.known = KnownSlices(self._make)

    def _make(self, flats: Sequence[torch.Tensor], slices: Slices) -> tuple[int, int]:
        self.num_made += 1
        return len(flats[0]), sum(map(len, slices))


def slices_of(stop: int) -> list[list[Span]]:
    return [[Span(0, 0, 4)], [Span(0, 4, stop)]]


def test_the_same_slices_of_alike_memory_are_looked_at_once() -> None:
    counted, slices = Counted(), slices_of(8)
    made = [counted.known.of([torch.ones(8)], slices) for _ in range(3)]
    assert (made, counted.num_made) == ([(8, 2)] * 3, 1)


def test_other_memory_and_other_slices_are_looked_at_again() -> None:
    counted, slices = Counted(), slices_of(8)
    counted.known.of([torch.ones(8)], slices)
    assert counted.known.of([torch.ones(9)], slices) == (9, 2)
    assert counted.known.of([torch.ones(9, dtype=torch.float64)], slices) == (9, 2)
    assert counted.known.of([torch.ones(9, dtype=torch.float64)], slices_of(8)) == (9, 2)
    assert counted.num_made == 4


def test_slices_that_are_gone_are_never_taken_for_others_with_their_id() -> None:
    counted = Counted()
    for stop in range(5, 605):
        slices = slices_of(stop) if stop % 2 else [[Span(0, 0, 1)]]
        assert counted.known.of([torch.ones(700)], slices) == (700, 2 if stop % 2 else 1)
    assert counted.num_made == 600


def test_wrong_slices_are_refused_each_time() -> None:
    counted, slices = Counted(), slices_of(9)
    for _ in range(2):
        with pytest.raises(InvariantError, match="slices end at element 9 of 8"):
            counted.known.of([torch.ones(8)], slices)
    assert counted.num_made == 0
