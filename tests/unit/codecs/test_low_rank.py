"""lowrank: products of columns and rows, block by block of a piece."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from psdist.codecs import Matrix
from psdist.codecs.chunks import ChunkCodings
from psdist.codecs.feedback import PushEncoder, PushTerms
from psdist.codecs.layout import matrices_of
from psdist.codecs.schemes.low_rank import LowRank
from psdist.errors import ProtocolError
from psdist.protocol.memory import allocate
from psdist.protocol.partition import Partition, Piece

SPECIAL = (0.0, -0.0, 1.0, 1e38, -3.4028234663852886e38, 1e-45, -1e-39, 1.2e-38, 65504.0)


def piece_of(name: str, *shape: int, stride: tuple[int, ...] = ()) -> Piece:
    steps = [1]
    for extent in shape[:0:-1]:
        steps.insert(0, steps[0] * extent)
    given_stride = stride or tuple(steps)
    return Piece(name=name, shape=shape, stride=given_stride, dtype="float32", optimizer_group=0)


def random(num: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def low_rank(rank: int, rows: int, width: int, seed: int = 1) -> torch.Tensor:
    return (
        random(rows * rank, seed).view(rows, rank) @ random(rank * width, seed + 9).view(rank, -1)
    ).view(-1)


def seen_of(codec: LowRank, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    payload = codec.encode(values, seed=seed)
    assert len(payload) == codec.num_bytes(len(values))
    return codec.decode(payload, len(values))


@pytest.mark.parametrize(("before", "length"), [(0, 50 * 40), (7, 45 * 40), (39, 2), (3, 1900)])
def test_a_matrix_of_that_rank_arrives_as_it_is_and_is_cut_anywhere(
    before: int, length: int
) -> None:
    whole = low_rank(3, 50, 40)
    part = whole[before : before + length]
    rank = 3 if length == len(whole) else 5  # a row that is cut is a direction of its own
    codec = LowRank(rank).of([Matrix(40, before, length)])
    assert torch.allclose(seen_of(codec, part), part, atol=1e-4)
    rows = -(-(before + length) // 40)
    assert codec.num_bytes(length) == 4 * min(length, rank * (rows + 40))


@settings(max_examples=60)
@given(
    rank=st.integers(1, 5),
    shapes=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 900)), min_size=1, max_size=4),
    scale=st.sampled_from([1e-38, 1e-3, 1.0, 1e30]),
    special=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(SPECIAL)), max_size=5),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_the_error_is_never_larger_than_the_matrix(
    rank: int,
    shapes: Sequence[tuple[int, int]],
    scale: float,
    special: Sequence[tuple[int, float]],
    seed: int,
    data: st.DataObject,
) -> None:
    matrices = [
        Matrix(width, data.draw(st.integers(0, width - 1)) if width else 0, length)
        for width, length in shapes
    ]
    num = sum(matrix.length for matrix in matrices)
    values = random(num, seed % 1000) * scale
    for place, value in special:
        values[place % num] = value
    codec = LowRank(rank).of(matrices)
    payload = codec.encode(values, seed=seed)
    assert torch.equal(payload, codec.encode(values.clone(), seed=seed))
    seen = codec.decode(payload, num)
    assert torch.equal(seen, codec.decode(payload.clone(), num))
    assert seen.isfinite().all()
    at = 0
    for matrix in matrices:
        one, other = (each[at : at + matrix.length].double() for each in (values, seen))
        at += matrix.length
        largest = float(one.abs().max())
        assert (one - other).norm() <= one.norm() * (1 + 1e-5) + 2**-126 * matrix.length**0.5
        if matrix.width == 0 or rank * (matrix.rows + matrix.width) >= matrix.length:
            assert torch.equal(one, other), "a vector, or a matrix too small, is sent as it is"
        elif 1e-30 < largest < 1e37:
            assert (one - other).norm() < one.norm()


def test_the_largest_floats_are_finite_and_nearly_as_large() -> None:
    values = torch.full((64 * 64,), 3.4028234663852886e38)
    seen = seen_of(LowRank(2).of([Matrix(64, 0, 64 * 64)]), values)
    assert seen.isfinite().all()
    assert (seen > 3.4e38 / 9).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1.1e-38])
def test_a_matrix_of_zeros_or_denormals_becomes_zeros(value: float) -> None:
    codec = LowRank(2).of([Matrix(20, 0, 400), Matrix(0, 0, 3)])
    values = torch.full((403,), value)
    seen = seen_of(codec, values)
    assert not seen[:400].any()
    assert torch.equal(seen[400:], values[400:])


def test_each_matrix_begins_with_directions_of_its_own() -> None:
    codec = LowRank(2).of([Matrix(20, 0, 400)] * 2)
    one, other = seen_of(codec, random(400).repeat(2)).view(2, -1)
    assert not torch.equal(one, other)


def test_a_matrix_whose_columns_and_rows_are_as_many_values_is_sent_as_it_is() -> None:
    assert torch.equal(seen_of(LowRank(1).of([Matrix(2, 0, 4)]), random(4)), random(4))
    assert not torch.equal(seen_of(LowRank(1).of([Matrix(2, 0, 6)]), random(6)), random(6))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")], ids=str)
def test_a_matrix_that_is_not_finite_is_not_afterwards_and_others_are(wrong: float) -> None:
    values = random(3 * 900)
    values[1000] = wrong
    seen = seen_of(LowRank(2).of([Matrix(30, 0, 900)] * 3), values).view(3, -1)
    assert seen[1].isnan().all()
    assert seen[[0, 2]].isfinite().all()


def test_the_best_directions_are_found_by_going_on_from_the_last_encoding() -> None:
    """With Q of the last time the error comes down to that of the best approximation (its singular
    values but the first two); drawn again each time it does not."""
    spectrum = torch.diag(0.9 ** torch.arange(40.0))
    left, right = (torch.linalg.qr(random(1600, seed).view(40, 40))[0] for seed in (1, 2))
    values = (left @ spectrum @ right).reshape(-1)
    best = float((spectrum.diagonal()[2:] ** 2).sum() ** 0.5)
    codec = LowRank(2).of([Matrix(40, 0, 1600)])
    errors: dict[bool, list[float]] = {True: [], False: []}
    for is_warm, of_way in errors.items():
        starts: list[torch.Tensor | None] = [None]
        for clock in range(40):
            payload, after = codec.encode_from(values, seed=clock, starts=starts)
            of_way.append(float((values - codec.decode(payload, 1600)).norm()))
            starts = after if is_warm else [None]
    assert errors[True][0] == errors[False][0] > 1.05 * best
    assert errors[True][-1] < 1.005 * best
    assert min(errors[False]) > 1.01 * best


def test_a_start_without_directions_is_drawn_anew() -> None:
    codec, matrix = LowRank(2).of([Matrix(20, 0, 400)]), low_rank(2, 20, 20)
    for useless in (torch.zeros(2, 20), torch.full((2, 20), torch.inf), torch.ones(1, 20)):
        payload, _ = codec.encode_from(matrix, seed=1, starts=[useless])
        assert torch.equal(payload, codec.encode(matrix, seed=1))
    assert not torch.equal(codec.encode(matrix, seed=2), payload)


def test_what_is_decoded_is_added_up_in_order_whatever_the_blocks() -> None:
    rows, width, rank = 700, 300, 3
    codec = LowRank(rank).of([Matrix(width, 0, rows * width)])
    payload = codec.encode(random(rows * width), seed=0)
    floats = payload.view(torch.float32)
    columns, right = floats[: rank * rows].view(rank, -1), floats[rank * rows :].view(rank, -1)
    expected = columns[0, :, None] * right[0]
    for number in range(1, rank):
        expected = expected + columns[number, :, None] * right[number]
    assert torch.equal(codec.decode(payload, rows * width), expected.view(-1))


def test_pieces_are_matrices_of_what_lies_together_and_chunks_may_cut_them() -> None:
    pieces = [
        piece_of("conv", 6, 4, 5, 5),
        piece_of("turned", 30, 50, stride=(1, 30)),
        piece_of("row", 1, 70),
        piece_of("bias", 64),
        piece_of("long", 300, 20),
    ]
    partition = Partition.cut(pieces, chunk_bytes=4096)
    found: dict[str, list[Matrix]] = {piece.name: [] for piece in pieces}
    for chunk in partition.chunks:
        for segment, matrix in zip(chunk.segments, matrices_of(partition, chunk), strict=True):
            found[pieces[segment.piece].name].append(matrix)
    assert {name: {matrix.width for matrix in each} for name, each in found.items()} == {
        "conv": {100}, "turned": {30}, "row": {0}, "bias": {0}, "long": {20},
    }  # fmt: skip
    for piece in pieces:
        at = 0
        for matrix in found[piece.name]:
            assert matrix.before == (at % matrix.width if matrix.width else 0)
            at += matrix.length
        assert at == piece.num_elements
    assert len(found["long"]) > 1


# -- in a worker's pushes ----------------------------------------------------------------------

PIECES = [piece_of("a", 40, 30), piece_of("b", 50, 20), piece_of("c", 11)]
PARTITION = Partition.cut(PIECES, chunk_bytes=1 << 20)


def encoder() -> PushEncoder:
    codings = ChunkCodings(LowRank(1), PARTITION, patterns=())
    return PushEncoder(codings, mine=[0], seed=0, group=0, has_feedback=True)


def push(
    pushes: PushEncoder, values: torch.Tensor, clock: int, absent: Sequence[int] = ()
) -> torch.Tensor:
    coding = pushes.codings[0]
    into = allocate(coding.sizes[1])
    num = pushes.encode(0, values, into, clock=clock, terms=PushTerms(1.0, absent))
    assert num <= coding.usual_bytes or absent
    return coding.read(into[:num]).values()


def gradient(clock: int) -> torch.Tensor:
    values = torch.zeros(PARTITION.chunks[0].length)
    for segment in PARTITION.chunks[0].segments:
        place = slice(segment.offset, segment.offset + segment.length)
        values[place] = random(segment.length, 7) + 0.1 * random(segment.length, clock)
    return values


def test_sent_and_left_out_are_together_what_was_pushed() -> None:
    pushes = encoder()
    sent = sum(push(pushes, gradient(clock), clock) for clock in range(20))
    wanted = sum(gradient(clock) for clock in range(20))
    left = pushes.residuals()[0].values
    assert torch.allclose(sent + left, wanted, atol=1e-3)
    assert 0 < left.norm() < wanted.norm()


def test_a_resumed_worker_goes_on_from_the_same_directions_bit_by_bit() -> None:
    one, cold = encoder(), encoder()
    for clock in range(3):
        push(one, gradient(clock), clock)
    other, collected = encoder(), one.collect()
    assert other.restore(collected)
    assert cold.restore({"0": {key: collected["0"][key] for key in ("values", "rate")}})
    expected = push(one, gradient(3), 3)
    assert torch.equal(push(other, gradient(3), 3), expected)
    assert not torch.equal(push(cold, gradient(3), 3), expected)
    assert one.num_residual_bytes == 4 * (PARTITION.chunks[0].length + 30 + 20)


def test_a_piece_that_is_left_out_keeps_its_directions() -> None:
    pushes = encoder()
    push(pushes, gradient(0), 0)
    before = pushes.collect()["0"]["starts"]
    seen = push(pushes, gradient(1), 1, absent=[0])
    after = pushes.collect()["0"]["starts"]
    assert not seen[:1200].any()
    assert set(after) == {"0", "1"}
    assert torch.equal(after["0"], before["0"])
    assert not torch.equal(after["1"], before["1"])


def test_a_payload_that_was_decoded_to_something_else_is_found() -> None:
    pushes, coding = encoder(), ChunkCodings(LowRank(1), PARTITION, patterns=())[0]
    into = allocate(coding.sizes[1])
    for clock in (0, 1, 64):
        num = pushes.encode(0, gradient(0), into, clock=clock, terms=PushTerms(1.0, ()))
        content = coding.read(into[:num])
        assert (content.checksum is not None) == (clock % 64 == 0)
        assert content.is_as_sent
        content.decoded[5] += 1
        assert content.is_as_sent == (clock % 64 != 0)


def test_a_payload_of_other_matrices_is_refused() -> None:
    codec = LowRank(2).of([Matrix(30, 0, 900)])
    payload = codec.encode(random(900), seed=0)
    with pytest.raises(
        ProtocolError, match=r"codec lowrank:2: 480 bytes where 900 values have 488"
    ):
        LowRank(2).of([Matrix(36, 0, 900)]).decode(payload, 900)
