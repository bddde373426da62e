"""The order in which all groups send the chunks of a set."""

from __future__ import annotations

import pytest

from psdist.protocol.send_order import SendOrder


def test_an_order_ranks_chunks_and_sorts_some_of_them() -> None:
    order = SendOrder([2, 0, 3, 1], num_chunks=4)
    assert order.chunks == (2, 0, 3, 1)
    assert order.rank == [1, 3, 0, 2]
    assert order.sorted({0, 1, 2}) == [2, 0, 1]
    assert order.told() == [2, 0, 3, 1]


@pytest.mark.parametrize("chunks", [[], [0, 1, 2]])
def test_no_order_is_the_ascending_one_and_that_is_not_told(chunks: list[int]) -> None:
    order = SendOrder(chunks, num_chunks=3)
    assert order.chunks == (0, 1, 2)
    assert order.sorted([2, 0]) == [0, 2]
    assert order.told() == []


def test_a_set_without_chunks_has_an_order_too() -> None:
    assert SendOrder([], num_chunks=0).chunks == ()


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([0, 1], "leaves chunk 2 out"),
        ([2, 0, 2], "names chunk 2 twice"),
        ([0, 1, 3], "names chunk 3; the set has 3 chunks"),
        ([0, -1, 2], "names chunk -1; the set has 3 chunks"),
        ([0, 1, 2, 0], "names chunk 0 twice"),
    ],
)
def test_what_is_no_permutation_is_said(chunks: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        SendOrder(chunks, num_chunks=3)
