"""The order in which all groups send the chunks of a set."""

from __future__ import annotations

import pytest

from psdist.protocol.partition import Partition, Piece
from psdist.protocol.send_order import SendOrder, backward_order, forward_ranks, round_order


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


# -- the order of a backward pass ------------------------------------------------------------------


def piece(index: int, length: int, *, group: int = 0, is_frozen: bool = False) -> Piece:
    return Piece(
        name=f"p{index}",
        shape=(length,),
        stride=(1,),
        dtype="float32",
        optimizer_group=group,
        is_frozen=is_frozen,
    )


def cut(*pieces: Piece) -> Partition:
    """Into chunks of 128 elements."""
    return Partition.cut(pieces, chunk_bytes=512)


def test_of_one_buffer_the_backward_order_is_the_descending_one() -> None:
    partition = cut(*(piece(index, length) for index, length in enumerate([64, 300, 10, 128])))
    assert len(partition.chunks) == 5
    assert backward_order(partition) == [4, 3, 2, 1, 0]


def test_buffers_take_turns_as_their_chunks_are_complete() -> None:
    """Pieces 0 and 2 are one optimizer group, 1 and 3 another, each a chunk: 0, 1 and 2, 3."""
    pieces = [piece(index, 128, group=index % 2) for index in range(4)]
    partition = cut(*pieces)
    assert [chunk.segments[0].piece for chunk in partition.chunks] == [0, 2, 1, 3]
    assert backward_order(partition) == [3, 1, 2, 0]


def test_a_chunk_is_as_late_as_its_first_piece() -> None:
    """Chunk 0 has pieces 0 and 2, chunk 1 has piece 1 alone."""
    partition = cut(piece(0, 64), piece(1, 64, group=1), piece(2, 64))
    assert [[each.piece for each in chunk.segments] for chunk in partition.chunks] == [[0, 2], [1]]
    assert backward_order(partition) == [1, 0]


def test_what_is_frozen_has_its_place_as_well() -> None:
    partition = cut(piece(0, 128), piece(1, 128, is_frozen=True), piece(2, 128))
    assert [chunk.segments[0].piece for chunk in partition.chunks] == [0, 2, 1]
    assert backward_order(partition) == [1, 2, 0]


def test_in_a_round_three_quarters_of_the_bytes_go_from_the_back_and_the_rest_from_the_front() -> (
    None
):
    even = cut(*(piece(index, 128) for index in range(8)))
    assert round_order(even) == [7, 6, 5, 4, 3, 2, 0, 1]
    assert round_order(cut(piece(0, 128))) == [0]


def test_it_is_bytes_that_are_counted_and_not_chunks() -> None:
    partition = cut(*(piece(index, 128 if index < 2 else 32, group=index) for index in range(6)))
    assert sum(chunk.num_bytes for chunk in partition.chunks[2:]) < 0.75 * partition.num_bytes
    assert round_order(partition) == [5, 4, 3, 2, 1, 0]


def test_a_forward_pass_reads_chunks_from_the_front() -> None:
    pieces = [piece(index, 128, group=index % 2) for index in range(4)]
    assert forward_ranks(cut(*pieces)) == [0, 2, 1, 3]
