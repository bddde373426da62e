"""The line that names servers without a chunk: who, why, and what to set."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from psdist.protocol.partition import Partition, Piece
from psdist.ranks.reporting.lines import empty_servers_line


def piece(num_elements: int) -> Piece:
    return Piece(name="p", shape=(num_elements,), stride=(1,), dtype="float32", optimizer_group=0)


def line(partition: Partition, weights: list[float]) -> str:
    owners = partition.shard(weights)
    return empty_servers_line(partition, weights, sorted(set(range(len(weights))) - set(owners)))


def test_a_model_of_one_chunk_names_the_size_that_spreads_it() -> None:
    partition = Partition.cut([piece(1 << 14)], chunk_bytes=None)
    assert line(partition, [0.25] * 4) == (
        "servers 1, 2, 3 hold nothing and only wait: the model of 65,536 bytes is cut into 1 chunk "
        "of at most 65,536 bytes; set servers = 1, or transfer.chunk_bytes = 16384 so that each "
        "holds some"
    )


def test_a_share_that_is_smaller_than_a_chunk_is_told_apart() -> None:
    partition = Partition.cut([piece(1 << 20)], chunk_bytes=None)
    assert line(partition, [0.49, 0.02, 0.49]) == (
        "server 1 holds nothing and only waits: the share that the plan gives them is smaller than "
        "a chunk, 4 chunks of at most 1,048,576 bytes; set servers = 2, or transfer.chunk_bytes = "
        "82944 so that each holds some"
    )


def test_whole_tensors_cannot_be_cut_finer() -> None:
    partition = Partition.cut([piece(1 << 20)], chunk_bytes=None, whole_tensors=True)
    assert line(partition, [0.5, 0.5]) == (
        "server 1 holds nothing and only waits: this optimizer needs whole tensors; small ones "
        "share a chunk: 1 chunk of at most 4,194,304 bytes; set servers = 1"
    )


def test_a_model_that_is_too_small_for_all_only_asks_for_fewer_servers() -> None:
    partition = Partition.cut([piece(1000)], chunk_bytes=None)
    assert line(partition, [0.5, 0.5]).endswith("; set servers = 1")


@given(
    st.lists(st.integers(1, 1 << 20), min_size=1, max_size=5),
    st.lists(st.floats(0.01, 1), min_size=2, max_size=6),
)
def test_with_the_size_that_is_named_every_server_holds_some(
    lengths: list[int], weights: list[float]
) -> None:
    pieces = [piece(length) for length in lengths]
    partition = Partition.cut(pieces, chunk_bytes=None)
    if set(partition.shard(weights)) == set(range(len(weights))):
        return
    found = re.search(r"transfer.chunk_bytes = ([0-9]+)", line(partition, weights))
    if found is not None:
        finer = Partition.cut(pieces, chunk_bytes=int(found[1]))
        assert set(finer.shard(weights)) == set(range(len(weights)))
