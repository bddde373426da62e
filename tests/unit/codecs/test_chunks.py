"""The payload of a chunk: what stands where, what is exact or left out, and what is refused."""

from __future__ import annotations

import struct

import pytest
import torch

from psdist.codecs import Codec
from psdist.codecs.chunks import ChunkCoding, ChunkCodings, Form
from psdist.codecs.layout import exact_pieces, num_values
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.errors import ProtocolError
from psdist.protocol.memory import allocate
from psdist.protocol.partition import Partition, Piece

SHAPES = {"emb.weight": (10, 10), "a.weight": (20, 10), "a.bias": (20,), "b.weight": (7, 9)}


def partition(dtype: str = "float32") -> Partition:
    pieces = [
        Piece(name=name, shape=shape, stride=(1,), dtype=dtype, optimizer_group=0)
        for name, shape in SHAPES.items()
    ]
    return Partition.cut(pieces, chunk_bytes=1 << 20)


def coding(
    codec: Codec, patterns: tuple[str, ...] = ("vectors", "emb*"), dtype: str = "float32"
) -> ChunkCoding:
    (found,) = ChunkCodings(codec, partition(dtype), patterns=patterns)
    return found


def values_of(chunk: ChunkCoding, seed: int = 1) -> torch.Tensor:
    """Padding is zero."""
    values = torch.zeros(chunk.chunk.length)
    generator = torch.Generator().manual_seed(seed)
    for segment in chunk.chunk.segments:
        place = slice(segment.offset, segment.offset + segment.length)
        values[place] = torch.randn(segment.length, generator=generator)
    return values


def place_of(chunk: ChunkCoding, piece: int) -> slice:
    (segment,) = (each for each in chunk.chunk.segments if each.piece == piece)
    return slice(segment.offset, segment.offset + segment.length)


def test_pieces_are_exact_by_name_or_shape() -> None:
    assert exact_pieces(partition(), ()) == set()
    assert exact_pieces(partition(), ("vectors",)) == {2}
    assert exact_pieces(partition(), ("a.*", "emb.weigh?")) == {0, 1, 2}
    assert exact_pieces(partition(), ("weight",)) == set(), "the whole name must be like it"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_pieces_arrive_as_they_are_and_padding_is_zero(dtype: str) -> None:
    each = coding(Sign(), dtype=dtype)
    values = values_of(each).to(getattr(torch, dtype))
    into = allocate(each.sizes[1])
    num_bytes = each.encode(values.float(), into, whole=values, seed=0)
    assert num_bytes == each.usual_bytes
    seen = each.read(into[:num_bytes]).values()
    assert seen.dtype == torch.float32
    for piece, name in enumerate(SHAPES):
        place = place_of(each, piece)
        is_exact = name in ("emb.weight", "a.bias")
        assert torch.equal(seen[place], values[place].float()) == is_exact
    covered = torch.zeros(each.chunk.length, dtype=torch.bool)
    for piece in range(len(SHAPES)):
        covered[place_of(each, piece)] = True
    assert not covered.all()
    assert not seen[~covered].any(), "signs in the padding would train it"


def test_pieces_that_are_left_out_are_zero_and_cost_nothing() -> None:
    each = coding(Sign())
    values, into = values_of(each), allocate(each.sizes[1])
    whole = each.encode(values, into, whole=values, seed=0)
    for absent in ({1}, {0, 3}, {2, 1}):
        num_bytes = each.encode(values, into, whole=values, seed=0, absent=absent)
        assert num_bytes < whole + 8
        content = each.read(into[:num_bytes])
        seen = content.values()
        for piece in range(len(SHAPES)):
            assert bool(seen[place_of(each, piece)].any()) == (piece not in absent)


def test_a_change_is_added_to_what_is_held_but_exact_pieces_have_their_values() -> None:
    each = coding(Quantized("int8"))
    held, values, into = values_of(each, 1), values_of(each, 2), allocate(each.sizes[1])
    num_bytes = each.encode(values - held, into, whole=values, seed=0, form=Form.CHANGE)
    mine, theirs = held.clone(), held.clone()
    assert each.read(into[:num_bytes]).change(theirs)
    each.add_checksum(into[:num_bytes], theirs)
    assert each.read(into[:num_bytes]).change(mine)
    assert torch.equal(mine, theirs)
    assert (mine - values).abs().max() < 0.05
    for piece in (0, 2):
        assert torch.equal(mine[place_of(each, piece)], values[place_of(each, piece)])
    other = held.clone()
    other[place_of(each, 1).start] += 1
    assert not each.read(into[:num_bytes]).change(other)


def test_what_is_held_in_16_bits_is_rounded_once_and_follows_all_the_same() -> None:
    each = coding(Quantized("int4"), dtype="bfloat16")
    values, held = values_of(each), torch.zeros(each.chunk.length, dtype=torch.bfloat16)
    into = allocate(each.sizes[1])
    for _ in range(6):
        num_bytes = each.encode(values - held.float(), into, whole=values, seed=0, form=Form.CHANGE)
        content = each.read(into[:num_bytes])
        place = place_of(each, 1)
        assert content.change(held)
    wrong = (held[place].float() - values[place]).abs()
    assert (wrong <= 2.0**-8 * values[place].abs() + 1e-3).all(), "a last bit at most"


def test_raw_values_are_of_the_workers_dtype() -> None:
    each = coding(Sign(), dtype="bfloat16")
    values, into = values_of(each), allocate(each.sizes[1])
    num_bytes = each.encode_raw(values, into)
    assert num_bytes == 8 + 2 * each.chunk.length
    assert torch.equal(each.read(into[:num_bytes]).values(), values.bfloat16().float())


def test_sizes_hold_what_is_encoded() -> None:
    for codec in (Sign(), Quantized("int8")):
        for patterns in ((), ("vectors", "emb*"), ("*",)):
            each = coding(codec, patterns)
            smallest, largest = each.sizes
            into = allocate(largest)
            for absent in (set(), {0}, {1, 3}, {0, 1, 2, 3}):
                values = values_of(each)
                num = each.encode(values, into, whole=values, seed=0, absent=absent)
                assert smallest <= num <= largest
            assert smallest <= each.encode_raw(values, into) <= largest
    nothing_coded = coding(Sign(), ("*",))
    assert num_values(nothing_coded.all[0]) == 0
    assert nothing_coded.usual_bytes == 8 + 4 * sum((100, 200, 20, 64))


@pytest.mark.parametrize(
    ("head", "cut", "refused"),
    [
        (None, 7, "7 bytes are less than a head"),
        ((3, 0, 0, 0), None, "form 3 and flag 0 are not known"),
        ((1, 2, 0, 0), None, "form 1 and flag 2 are not known"),
        ((1, 0, 0, 0), -1, r"\d+ bytes where \d+ belong"),
        ((0, 0, 0, 0), None, r"\d+ bytes where \d+ belong"),
        ((1, 0, 2, 0), None, r"segments \(\d+, \d+\) ... are not to be left out"),
        ((1, 0, 60000, 0), None, r"60000 segments are left out in \d+ bytes"),
    ],
    ids=["short", "form", "flag", "cut", "raw", "segments", "many"],
)
def test_a_payload_that_no_sender_makes_is_refused(
    head: tuple[int, int, int, int] | None, cut: int | None, refused: str
) -> None:
    each = coding(Sign())
    values, into = values_of(each), allocate(each.sizes[1])
    num_bytes = each.encode(values, into, whole=values, seed=0)
    if head is not None:
        struct.pack_into("<BBHI", into, 0, *head)
    with pytest.raises(ProtocolError, match=f"chunk 0, codec sign: .*{refused}"):
        each.read(into[:num_bytes][:cut])
