"""Pieces -> buffers -> chunks -> shards and slices: everything once, aligned, and even by bytes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from random import Random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import ModelError, ProtocolError, UsageError
from psdist.protocol.partition import (
    ALIGN,
    AUTO_LEAST_BYTES,
    AUTO_MAX_BYTES,
    AUTO_MIN_BYTES,
    DTYPE_CODES,
    ITEM_BYTES,
    Partition,
    Piece,
    buckets_of,
    empty_servers,
    master_dtype,
    runs_of,
)


def piece(
    name: str,
    *shape: int,
    dtype: str = "float32",
    group: int = 0,
    stride: tuple[int, ...] = (),
    is_frozen: bool = False,
) -> Piece:
    steps: list[int] = []
    step = 1
    for extent in reversed(shape):
        steps.insert(0, step)
        step *= extent
    return Piece(
        name=name,
        shape=shape,
        stride=stride or tuple(steps),
        dtype=dtype,
        optimizer_group=group,
        is_frozen=is_frozen,
    )


SHAPES = st.lists(st.integers(0, 40), max_size=3)
PIECES = st.lists(
    st.tuples(SHAPES, st.sampled_from(sorted(ITEM_BYTES)), st.integers(0, 2), st.booleans()),
    min_size=1,
    max_size=12,
).map(
    lambda found: [
        piece(f"p{index}", *shape, dtype=dtype, group=group, is_frozen=is_frozen)
        for index, (shape, dtype, group, is_frozen) in enumerate(found)
    ]
)
CHUNK_BYTES = st.none() | st.integers(1, 100_000)
PARTITIONS = st.builds(
    lambda pieces, chunk_bytes, whole: Partition.cut(
        pieces, chunk_bytes=chunk_bytes, whole_tensors=whole
    ),
    PIECES,
    CHUNK_BYTES,
    st.booleans(),
)


@given(PARTITIONS)
def test_the_segments_hold_every_element_of_every_piece_once(partition: Partition) -> None:
    """And at the place that the buffer gives to the piece."""
    placed: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for chunk in partition.chunks:
        for segment in chunk.segments:
            assert segment.offset >= 0
            assert segment.offset + segment.length <= chunk.length
            start = chunk.start + segment.offset
            placed[segment.piece].append((start, start + segment.length))
            assert partition.pieces[segment.piece].dtype == chunk.dtype
            assert partition.pieces[segment.piece].optimizer_group == chunk.optimizer_group
    starts = {
        index: (buffer.index, start)
        for buffer in partition.buffers
        for index, start in buffer.piece_starts
    }
    assert starts.keys() == set(range(len(partition.pieces)))
    for index, each in enumerate(partition.pieces):
        at = starts[index][1]
        for first, last in sorted(placed[index]):
            assert first == at
            at = last
        assert at == starts[index][1] + each.num_elements


@given(PARTITIONS)
def test_the_chunks_cover_every_buffer_without_gap_or_overlap(partition: Partition) -> None:
    at = dict.fromkeys(range(len(partition.buffers)), 0)
    for index, chunk in enumerate(partition.chunks):
        assert chunk.index == index
        assert chunk.start == at[chunk.buffer]
        assert chunk.length > 0
        at[chunk.buffer] += chunk.length
        assert chunk.num_bytes == chunk.length * ITEM_BYTES[chunk.dtype]
    assert at == {buffer.index: buffer.num_elements for buffer in partition.buffers}
    assert partition.num_bytes == sum(chunk.num_bytes for chunk in partition.chunks)
    assert partition.max_chunk_bytes == max(chunk.num_bytes for chunk in partition.chunks)


@given(PARTITIONS)
def test_chunks_and_pieces_start_at_multiples_of_64_elements(partition: Partition) -> None:
    """A fused optimizer's last bit depends on where a tensor starts."""
    assert ALIGN == 64
    assert all(chunk.start % ALIGN == 0 for chunk in partition.chunks)
    for buffer in partition.buffers:
        assert all(start % ALIGN == 0 for _, start in buffer.piece_starts)
        assert buffer.num_elements % ALIGN == 0


@given(PARTITIONS)
def test_a_buffer_holds_one_dtype_of_one_optimizer_group(partition: Partition) -> None:
    """And what is frozen, or what is not."""
    kinds = []
    for buffer in partition.buffers:
        (kind,) = {
            (each.is_frozen, each.dtype, each.optimizer_group)
            for each in (partition.pieces[index] for index, _ in buffer.piece_starts)
        }
        assert kind[1:] == (buffer.dtype, buffer.optimizer_group)
        kinds.append(kind)
    assert len(set(kinds)) == len(kinds)


@given(PIECES, st.integers(1, 100_000))
def test_no_chunk_is_larger_than_asked_for_unless_one_line_of_64_elements_is(
    pieces: list[Piece], chunk_bytes: int
) -> None:
    for chunk in Partition.cut(pieces, chunk_bytes=chunk_bytes).chunks:
        assert chunk.num_bytes <= max(chunk_bytes, ALIGN * ITEM_BYTES[chunk.dtype])


@given(PIECES, CHUNK_BYTES)
def test_a_whole_tensor_is_never_cut_and_only_small_ones_go_together(
    pieces: list[Piece], chunk_bytes: int | None
) -> None:
    partition = Partition.cut(pieces, chunk_bytes=chunk_bytes, whole_tensors=True)
    most = min(64 * 1024, partition.chunk_bytes)
    for chunk in partition.chunks:
        for segment in chunk.segments:
            assert segment.length == pieces[segment.piece].num_elements
        assert len(chunk.segments) <= 1 or chunk.num_bytes <= most
    for before, chunk in itertools.pairwise(partition.chunks):
        if before.buffer == chunk.buffer:  # its first piece did not fit in there
            first = next((each.offset for each in chunk.segments if each.offset), chunk.length)
            assert before.num_bytes + first * ITEM_BYTES[chunk.dtype] > most


@given(PARTITIONS)
def test_the_description_gives_the_same_partition_elsewhere(partition: Partition) -> None:
    assert Partition.decode(partition.encode()) == partition


def held_by(partition: Partition, weights: list[float]) -> list[int]:
    """Bytes of each server."""
    owners = partition.shard(weights)
    assert len(owners) == len(partition.chunks)
    held = [0] * len(weights)
    for chunk, owner in zip(partition.chunks, owners, strict=True):
        held[owner] += chunk.num_bytes
    return held


@given(PARTITIONS, st.integers(1, 6))
def test_with_equal_weights_a_shard_is_within_one_chunk_of_its_part(
    partition: Partition, num_servers: int
) -> None:
    ideal = partition.num_bytes / num_servers
    for load in held_by(partition, [1 / num_servers] * num_servers):
        assert load <= ideal + partition.max_chunk_bytes


@given(PARTITIONS, st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_no_server_would_be_done_earlier_if_another_had_one_of_its_chunks(
    partition: Partition, weights: list[float]
) -> None:
    held = held_by(partition, weights)
    slowest = max(load / weight for load, weight in zip(held, weights, strict=True))
    for load, weight in zip(held, weights, strict=True):
        assert slowest <= (load + partition.max_chunk_bytes) / weight * (1 + 1e-12)


@given(PARTITIONS, PARTITIONS, st.integers(1, 6))
def test_what_servers_hold_of_other_sets_counts(
    first: Partition, second: Partition, num_servers: int
) -> None:
    weights = [1.0] * num_servers
    held = first.bytes_by_server(first.shard(weights), num_servers)
    assert held == held_by(first, weights)
    more = second.bytes_by_server(second.shard(weights, held), num_servers)
    largest = max(first.max_chunk_bytes, second.max_chunk_bytes)
    for one, other in zip(held, more, strict=True):
        assert one + other <= (first.num_bytes + second.num_bytes) / num_servers + largest


@given(PARTITIONS)
def test_a_server_behind_a_link_too_slow_for_a_chunk_holds_nothing(partition: Partition) -> None:
    """Rounding leaves the planner's shards of no bytes with a little."""
    assert held_by(partition, [0.5, 1e-10, 0.5])[1] == 0


@given(PARTITIONS, st.integers(1, 8))
def test_a_server_without_weight_holds_nothing(partition: Partition, num_servers: int) -> None:
    weights = [0.0] * num_servers
    weights[-1] = 1.0
    assert set(partition.shard(weights)) == {num_servers - 1}


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.5, 1.0, 3.0]), min_size=1, max_size=7),
    st.integers(1, 40),
)
def test_which_servers_get_no_chunk_is_known_without_a_partition(
    weights: list[float], num_chunks: int
) -> None:
    if sum(weights) == 0:
        weights[-1] = 1.0
    piece = Piece(
        name="p",
        shape=(num_chunks * ALIGN,),
        stride=(1,),
        dtype="float32",
        optimizer_group=0,
    )
    partition = Partition.cut([piece], chunk_bytes=4 * ALIGN)
    assert len(partition.chunks) == num_chunks
    owners = set(partition.shard(weights))
    assert set(empty_servers(weights, num_chunks)) == set(range(len(weights))) - owners


def test_of_very_many_servers_those_without_a_chunk_are_found() -> None:
    weights = [1.0] * 20_000
    assert empty_servers(weights, 1) == tuple(range(1, 20_000))
    assert empty_servers(weights, 10**12) == ()


@given(PIECES, CHUNK_BYTES, st.integers(1, 7))
def test_where_chunks_end_does_not_depend_on_the_number_of_servers(
    pieces: list[Piece], chunk_bytes: int | None, num_servers: int
) -> None:
    """Else results would: sharding only says who has which chunk."""
    partition = Partition.cut(pieces, chunk_bytes=chunk_bytes)
    before = partition.chunks
    partition.shard([1.0] * num_servers)
    assert partition.chunks == before
    assert Partition.cut(pieces, chunk_bytes=chunk_bytes).chunks == before


@given(PARTITIONS, st.integers(1, 9))
def test_slices_are_neighbours_that_hold_every_chunk_once_and_are_even(
    partition: Partition, num_workers: int
) -> None:
    slices = partition.slices(num_workers)
    assert len(slices) == num_workers
    assert [chunk for part in slices for chunk in part] == list(range(len(partition.chunks)))
    ideal = partition.num_bytes / num_workers
    for part in slices:
        held = sum(partition.chunks[chunk].num_bytes for chunk in part)
        assert abs(held - ideal) <= partition.max_chunk_bytes


@given(PARTITIONS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_where_chunks_have_an_order_each_worker_has_one_of_every_bucket(
    partition: Partition, num_workers: int, pick: Random
) -> None:
    order = [*range(len(partition.chunks))]
    pick.shuffle(order)
    slices = partition.slices(num_workers, order)
    assert sorted(chunk for part in slices for chunk in part) == sorted(order)
    assert all(list(part) == sorted(part) for part in slices)
    if order != sorted(order):
        for bucket in buckets_of(order, num_workers):
            assert all(len({*bucket} & {*part}) <= 1 for part in slices)
    held = [sum(partition.chunks[chunk].num_bytes for chunk in part) for part in slices]
    if order != sorted(order):
        assert max(held) - min(held) <= partition.max_chunk_bytes


@given(PARTITIONS, st.integers(1, 9))
def test_an_order_that_is_the_ascending_one_is_none(partition: Partition, workers: int) -> None:
    assert partition.slices(workers, range(len(partition.chunks))) == partition.slices(workers)


def test_buckets_are_neighbours_where_the_order_is_that_of_one_buffer() -> None:
    partition = Partition.cut([piece("a", 6 * 64)], chunk_bytes=256)
    slices = partition.slices(2, [5, 4, 3, 2, 1, 0])
    assert [list(part) for part in slices] == [[1, 3, 4], [0, 2, 5]]
    assert partition.slices(4, [5, 4, 3, 2, 1, 0]) == ([2], [0, 3], [1, 4], [5])


@pytest.mark.parametrize("workers", [2, 4])
def test_in_buckets_every_worker_has_chunks_of_every_server(workers: int) -> None:
    partition = Partition.cut([piece("a", 16 * 64)], chunk_bytes=256)
    owner = partition.shard([1.0] * 4)
    for part in partition.slices(workers, list(range(15, -1, -1))):
        assert sorted(owner[chunk] for chunk in part) == sorted([*range(4)] * (4 // workers))


@given(PARTITIONS, st.randoms(use_true_random=False))
def test_spans_are_where_the_chunks_lie_and_as_few_as_there_can_be(
    partition: Partition, pick: Random
) -> None:
    chosen = [chunk for chunk in partition.chunks if pick.random() < 0.6]
    spans = partition.spans(chunk.index for chunk in chosen)
    elements = {(span.buffer, at) for span in spans for at in range(span.start, span.stop)}
    wanted = {
        (chunk.buffer, at)
        for chunk in chosen
        for at in range(chunk.start, chunk.start + chunk.length)
    }
    assert elements == wanted
    for one, other in itertools.pairwise(spans):
        assert (one.buffer, one.stop) < (other.buffer, other.start)


def test_runs_are_as_few_ranges_as_there_can_be() -> None:
    assert runs_of([0, 1, 4, 6, 7, 8]) == [range(2), range(4, 5), range(6, 9)]
    assert runs_of([]) == []


def test_pieces_keep_the_order_of_the_model_within_their_buffer() -> None:
    pieces = [piece("a", 3), piece("b", 3, dtype="float64"), piece("c", 100), piece("d", 1)]
    partition = Partition.cut(pieces, chunk_bytes=None)
    assert [buffer.dtype for buffer in partition.buffers] == ["float32", "float64"]
    assert partition.buffers[0].piece_starts == ((0, 0), (2, 64), (3, 192))
    assert partition.buffers[0].num_elements == 256


def test_optimizer_groups_get_buffers_of_their_own() -> None:
    pieces = [piece("a", 3), piece("b", 3, group=1), piece("c", 3)]
    partition = Partition.cut(pieces, chunk_bytes=None)
    assert [buffer.piece_starts for buffer in partition.buffers] == [((0, 0), (2, 64)), ((1, 0),)]
    assert [chunk.optimizer_group for chunk in partition.chunks] == [0, 1]


def test_what_is_frozen_has_buffers_of_its_own_behind_the_others() -> None:
    frozen = piece("a", 3, is_frozen=True), piece("d", 3, group=1, is_frozen=True)
    pieces = [frozen[0], piece("b", 3), piece("c", 3, group=1), frozen[1], piece("e", 70)]
    partition = Partition.cut(pieces, chunk_bytes=None)
    assert [buffer.piece_starts for buffer in partition.buffers] == [
        ((1, 0), (4, 64)),
        ((2, 0),),
        ((0, 0),),
        ((3, 0),),
    ]
    assert [chunk.optimizer_group for chunk in partition.chunks] == [0, 1, 0, 1]
    assert partition.shard([1.0, 1.0]) == (0, 1, 1, 1)


def test_a_piece_larger_than_a_chunk_goes_on_in_the_next() -> None:
    partition = Partition.cut([piece("a", 10), piece("b", 130)], chunk_bytes=128 * 4)
    first, second = partition.chunks
    assert [(s.piece, s.offset, s.length) for s in first.segments] == [(0, 0, 10), (1, 64, 64)]
    assert [(s.piece, s.offset, s.length) for s in second.segments] == [(1, 0, 66)]


def test_an_automatic_chunk_is_neither_tiny_nor_huge() -> None:
    small = Partition.cut([piece("a", 100)], chunk_bytes=None)
    assert small.chunk_bytes == AUTO_LEAST_BYTES
    large = Partition.cut([piece("a", 2**26)], chunk_bytes=None)
    assert large.chunk_bytes == AUTO_MAX_BYTES
    middle = Partition.cut([piece("a", 2**20)], chunk_bytes=None)
    assert AUTO_MIN_BYTES <= middle.chunk_bytes <= AUTO_MAX_BYTES
    assert len(middle.chunks) > 1


@pytest.mark.parametrize(
    ("mib", "mbit", "kib"),
    [(16, 256, 256), (16, 128, 256), (16, 1_000, 1024), (64, 1_000, 1024), (64, 10_000, 2048)],
)
def test_on_a_slow_link_chunks_are_smaller(mib: int, mbit: int, kib: int) -> None:
    whole = [piece("a", mib * 2**18)]
    cut = Partition.cut(whole, chunk_bytes=None, link_bytes_per_s=mbit * 125e3)
    assert cut.chunk_bytes == kib * 1024
    assert Partition.decode(cut.encode()) == cut


@pytest.mark.parametrize(
    ("num_elements", "sizes"),
    [
        (2**14, [64]),
        (2**15, [64, 64]),
        (2**16, [64] * 4),
        (2**18, [256] * 4),
        (2**20, [1024] * 4),
        (5 * 2**20, [1024] * 20),
    ],
)
def test_a_small_model_is_cut_for_a_few_servers(num_elements: int, sizes: list[int]) -> None:
    partition = Partition.cut([piece("a", num_elements)], chunk_bytes=None)
    assert [chunk.num_bytes / 1024 for chunk in partition.chunks] == sizes


def test_a_rest_of_the_division_is_no_fifth_chunk() -> None:
    pieces = [piece("a", 99_999), *(piece(f"bias{index}", 10) for index in range(40))]
    assert len(Partition.cut(pieces, chunk_bytes=None).chunks) == 4


def test_a_parameter_without_dimensions_and_one_without_elements_have_their_place() -> None:
    partition = Partition.cut([piece("scale"), piece("none", 0), piece("w", 2)], chunk_bytes=None)
    assert partition.buffers[0].piece_starts == ((0, 0), (1, 64), (2, 128))
    assert [segment.piece for segment in partition.chunks[0].segments if segment.length] == [0, 2]


def test_the_partition_of_a_large_model_is_linear_in_it() -> None:
    """10,000 pieces, half of them across chunk boundaries: nothing here may be quadratic."""
    pieces = [piece(f"p{index}", 1000) for index in range(10_000)]
    partition = Partition.cut(pieces, chunk_bytes=8192)
    assert len(partition.chunks) == 5000
    assert sum(len(chunk.segments) for chunk in partition.chunks) < 16_000
    assert len(partition.shard([1.0] * 64)) == 5000


def test_every_trainable_dtype_has_a_size_and_a_code() -> None:
    assert ITEM_BYTES.keys() == DTYPE_CODES.keys()
    assert len(set(DTYPE_CODES.values())) == len(DTYPE_CODES)


def test_a_model_without_parameters_and_a_dtype_that_is_not_trained_are_refused() -> None:
    with pytest.raises(ModelError) as nothing:
        Partition.cut([], chunk_bytes=None)
    assert str(nothing.value) == (
        "the model has no parameters to train: the optimizer holds no parameter that requires a "
        "gradient"
    )
    with pytest.raises(ModelError) as complex_:
        Partition.cut([piece("a.weight", 2, dtype="complex64")], chunk_bytes=None)
    assert str(complex_.value) == (
        "parameter a.weight has dtype complex64; psdist trains float32, float64, float16, bfloat16"
    )


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0]])
def test_shards_without_a_positive_weight_are_refused(weights: list[float]) -> None:
    partition = Partition.cut([piece("a", 3)], chunk_bytes=None)
    with pytest.raises(UsageError, match="at least one must be positive"):
        partition.shard(weights)


@given(st.binary(max_size=100))
def test_bytes_that_describe_no_partition_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="a partition that cannot be read"):
        Partition.decode(data)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"pieces": [], "chunk_bytes": 64},
        {"pieces": [["a", [1]]], "chunk_bytes": 64, "whole_tensors": False},
        {"pieces": 3, "chunk_bytes": 64, "whole_tensors": False},
        {"pieces": [["a", 1, 1, "float32", 0, False]], "chunk_bytes": 64, "whole_tensors": False},
        {"pieces": [["a", [1], [1], "float32", 0]], "chunk_bytes": 64, "whole_tensors": False},
    ],
)
def test_a_description_with_missing_parts_is_refused(body: object) -> None:
    with pytest.raises(ProtocolError, match="a partition that cannot be read"):
        Partition.decode(msgpack.packb(body))


def test_servers_compute_in_float32_but_for_float64() -> None:
    dtypes = ("float32", "float64", "float16", "bfloat16")
    assert [master_dtype(dtype) for dtype in dtypes] == ["float32", "float64", "float32", "float32"]
    for dtype, num_bytes in zip(dtypes, (256, 512, 256, 256), strict=True):
        (chunk,) = Partition.cut([piece("p", 64, dtype=dtype)], chunk_bytes=None).chunks
        assert chunk.num_master_bytes == num_bytes
