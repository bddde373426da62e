"""Codecs of users: what they are held to, and what is said of those that are none."""

from __future__ import annotations

import pytest
import torch

from psdist.codecs.chunks import ChunkCodings
from psdist.codecs.schemes.own import own_codec
from psdist.errors import CodecError, ProtocolError
from psdist.protocol.memory import allocate
from psdist.protocol.partition import Partition, Piece

ROOM = "tests.support.own_codecs"


@pytest.mark.parametrize("name", ["Halves", "Squeezed"])
@pytest.mark.parametrize("length", [1, 255, 4096])
def test_a_users_codec_is_one_of_ours(name: str, length: int) -> None:
    codec = own_codec(f"{ROOM}:{name}")
    values = torch.randn(length, generator=torch.Generator().manual_seed(1))
    values[0] = 1e6  # theirs clamps it in place
    before = values.clone()
    payload = codec.encode(values, seed=3)
    assert torch.equal(values, before), "theirs was given the values themselves"
    assert torch.equal(codec.decode(payload, length), values.clamp(max=65504).half().float())
    assert codec.name == f"{ROOM}:{name}"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_room:Halves", r"is none of psdist's, and cannot be imported \(ModuleNotFoundErr"),
        (f"{ROOM}:NoSuch", r"cannot be imported \(AttributeError: .*on every rank, servers too"),
        (f"{ROOM}:NOT_CALLABLE", r"NOT_CALLABLE\(\) raised TypeError"),
        (f"{ROOM}:WithArguments", r"WithArguments\(\) raised TypeError.* must give a codec"),
        (f"{ROOM}:WithoutBound", r"which has no method bound; a codec has encode\(values"),
        (f"{ROOM}:Raising", r"encode of 1 values raised ArithmeticError: no seed like 1$"),
        (f"{ROOM}:TooLong", r"encode of 1 values gave 2 bytes where bound\(1\) is 1"),
        (f"{ROOM}:Unbounded", r"bound of 1 values gave 0.5, not a number of bytes"),
        (f"{ROOM}:Short", r"decode of 1 values gave 0 values"),
        (
            f"{ROOM}:Doubles",
            r"decode of 1 values gave torch.float64 of shape \(1,\) on cpu; torch.f",
        ),
        (f"{ROOM}:Listed", r"encode of 1 values gave a list, not a tensor"),
        (f"{ROOM}:Infinite", r"decode of 1 values gave values that are not finite"),
        (f"{ROOM}:Chancy", r"encode of 1 values gave something else for the same arguments again"),
        (f"{ROOM}:Fickle", r"decode of 1 values gave something else for the same arguments again"),
    ],
)
def test_what_is_no_codec_is_one_clear_line(target: str, said: str) -> None:
    with pytest.raises(CodecError, match=said) as seen:
        own_codec(target)
    assert str(seen.value).startswith(f"codec {target}: ")
    assert "\n" not in str(seen.value)


def test_payloads_of_any_size_stand_behind_their_length() -> None:
    piece = Piece(name="a", shape=(9, 30), stride=(30, 1), dtype="float32", optimizer_group=0)
    bias = Piece(name="b", shape=(7,), stride=(1,), dtype="float32", optimizer_group=0)
    partition = Partition.cut([piece, bias], chunk_bytes=1 << 20)
    coding = ChunkCodings(own_codec(f"{ROOM}:Halves"), partition, patterns=("b",))[0]
    into = allocate(coding.sizes[1])
    for length in (1, 2, 100, 270):
        values = torch.zeros(coding.chunk.length)
        values[:length] = 0.5
        values[320:327] = 1 / 3
        num = coding.encode(values, into, whole=values, seed=0)
        assert num == 8 + 8 + (4 + 2 * length + 7) // 8 * 8 + 32
        assert torch.equal(coding.read(into[:num]).values(), values)
        for wrong in (0, 4 + 2 * 270 + 1, 2**40):
            into[8:16] = wrong.to_bytes(8, "little")
            with pytest.raises(
                ProtocolError, match=f"a length of {wrong} bytes where 544 are most"
            ):
                coding.read(into[:num])
        into[8:16] = (4 + 2 * length + 8).to_bytes(8, "little")
        with pytest.raises(ProtocolError, match=r"bytes where|a length of"):
            coding.read(into[:num])
        with pytest.raises(ProtocolError, match="12 bytes have no room for a length"):
            coding.read(into[:12])


def test_what_no_encoder_makes_is_refused() -> None:
    codec = own_codec(f"{ROOM}:Halves")
    payload = codec.encode(torch.ones(4), seed=0)
    for wrong in (payload[:4], payload[:0], torch.cat([payload, payload]), 2 * payload):
        with pytest.raises(ProtocolError, match="are no payload of 4 values"):
            codec.decode(wrong, 4)
