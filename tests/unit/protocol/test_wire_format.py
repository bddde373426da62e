"""What is on the wire, byte by byte: two builds of psdist that differ in it must not meet unseen.

Whoever changes one of these numbers changes PROTOCOL_VERSION with it.
"""

from __future__ import annotations

import struct
import zlib

import msgpack
import pytest

from psdist.errors import ProtocolError
from psdist.protocol import header as layout
from psdist.protocol.control import (
    CONTROL_LIMIT_BYTES,
    Progress,
    Suspend,
    decode_control,
    encode_control,
)
from psdist.protocol.header import (
    HEADER_BYTES,
    KIND_BYTE,
    LENGTH_BYTES,
    MAGIC,
    NEVER,
    PROTOCOL_VERSION,
    CodecCode,
    Dtype,
    Flag,
    Header,
    Kind,
)
from psdist.protocol.payloads import PayloadRule

EACH = Header(
    kind=Kind.REPLY, sender=0x01020304, chunk=5, clock=-6, length=7, group=8, settings=9,
    weight=0.75, position=10, min_done=-11, flags=Flag.CHECKSUMMED, dtype=Dtype.BFLOAT16, codec=12,
    generation=13, map_version=14, checksum=15, pull_number=16, set_index=0x1718,
    chunk_version=19,
)  # fmt: skip


def packed(header: Header) -> bytes:
    buffer = bytearray(b"\xff" * HEADER_BYTES)
    header.pack_into(buffer)
    return bytes(buffer)


def test_a_header_is_these_bytes() -> None:
    used = (
        b"PDS1" + struct.pack("<H", 11)
        + bytes([2, 4, 12, 2, 0x18, 0x17])  # kind, dtype, codec, flags, set
        + struct.pack("<6I", 13, 0x01020304, 8, 5, 14, 9)
        + struct.pack("<qQq", -6, 10, -11)
        + struct.pack("<d", 0.75)
        + struct.pack("<QIIQ", 7, 15, 16, 19)
    )  # fmt: skip
    assert len(used) == 92
    rest = b"\xff" * (HEADER_BYTES - 96)  # is not written, and not looked at
    assert packed(EACH) == used + struct.pack("<I", zlib.crc32(used)) + rest
    assert Header.unpack(packed(EACH)) == EACH


def test_where_a_transport_looks_without_unpacking() -> None:
    assert packed(EACH)[KIND_BYTE] == Kind.REPLY
    assert packed(EACH)[LENGTH_BYTES] == (7).to_bytes(8, "little")


def test_the_numbers_of_the_wire() -> None:
    assert (PROTOCOL_VERSION, MAGIC, HEADER_BYTES, NEVER) == (11, 0x31534450, 128, 2**62)
    assert {each.name: each.value for each in Kind} == {
        "PUSH": 1, "REPLY": 2, "PULL": 3, "INIT": 4, "CONTROL": 5, "RECEIPT": 6,
        "RECORD": 7, "RECORDED": 8, "MISSED": 9, "PULL_ROWS": 10, "PUSH_ROWS": 11,
    }  # fmt: skip
    assert {each.name: each.value for each in Dtype} == {
        "NONE": 0, "FLOAT32": 1, "FLOAT64": 2, "FLOAT16": 3, "BFLOAT16": 4,
    }  # fmt: skip
    assert [each.name for each in sorted(CodecCode)] == [
        "RAW", "FP16", "BF16", "INT8", "INT4", "INT2", "SIGN", "TOPK", "RANDK", "LOW_RANK", "OWN",
        "PLAIN", "PACKED", "ROWS",
    ]  # fmt: skip
    assert sorted(CodecCode) == list(range(14))
    flags = {name: value for name, value in vars(Flag).items() if name.isupper()}
    assert flags == {
        "NONE": 0, "FRESH": 1, "CHECKSUMMED": 2, "FOR_PULL": 4, "RECORDED": 8, "UNCHANGED": 16,
        "RETRANSMIT": 32, "RECEIPT": 64,
    }  # fmt: skip


def test_what_a_header_does_not_say_is_nothing() -> None:
    assert Header(kind=3, sender=4) == (3, 4, 0, 0, 0, 0, 0, 0.0, *(11 * [0]))


@pytest.mark.parametrize(
    ("field", "known"), [("kind", range(1, 12)), ("dtype", range(5)), ("flags", range(64, 128))]
)
def test_every_known_value_of_a_field_is_taken_and_the_next_is_not(
    field: str, known: range
) -> None:
    for value in known:
        header = EACH._replace(**{field: value})
        assert Header.unpack(packed(header)) == header
    with pytest.raises(ProtocolError, match="are not all known to this version"):
        Header.unpack(packed(EACH._replace(**{field: known.stop})))


def test_a_header_needs_all_its_bytes_and_no_more_are_looked_at() -> None:
    assert Header.unpack(packed(EACH) + b"more") == EACH
    with pytest.raises(ProtocolError, match="127 bytes where 128 belong"):
        Header.unpack(packed(EACH)[:-1])


@pytest.mark.parametrize("where", [0, layout._USED_BYTES - 1, layout._USED_BYTES])
def test_the_checksum_covers_every_byte_in_use(where: int) -> None:
    buffer = bytearray(packed(EACH))
    buffer[where] ^= 0xFF
    with pytest.raises(ProtocolError, match="broken header"):
        Header.unpack(buffer)


def test_a_control_message_is_one_map_with_its_type() -> None:
    message = Suspend(group=1, clock=2, seq=3)
    body = {"type": "Suspend", "group": 1, "clock": 2, "seq": 3}
    assert encode_control(message) == msgpack.packb(body), "the fields in their order"
    assert decode_control(memoryview(msgpack.packb(body))) == message


def test_counts_that_are_not_known_are_nothing() -> None:
    progress = Progress(worker=1, clock=2, samples=3)
    rest = (progress.loader_batches, progress.loader_until, progress.epoch, progress.epochs,
            progress.batch, progress.batches, progress.staleness, progress.waited_s)  # fmt: skip
    assert rest == (0, 0, 0, 0, 0, 0, 0, 0.0)


def test_a_control_message_of_just_the_limit_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CONTROL_LIMIT_BYTES == 67108864
    data = encode_control(Suspend(group=1, clock=2, seq=3))
    monkeypatch.setattr("psdist.protocol.control.Control.MOST_BYTES", len(data))
    assert decode_control(encode_control(Suspend(group=1, clock=2, seq=3)))
    monkeypatch.setattr("psdist.protocol.control.Control.MOST_BYTES", len(data) - 1)
    with pytest.raises(ProtocolError, match=f"of {len(data)} bytes, limit {len(data) - 1}"):
        decode_control(data)


RULE = PayloadRule(
    codec=3, name="small", dtypes=(Dtype.FLOAT32, Dtype.FLOAT16), smallest=(8, 4), largest=(12, 4)
)


@pytest.mark.parametrize(
    ("changed", "is_taken"),
    [
        ({}, True),
        ({"length": 7}, False),
        ({"length": 8}, True),
        ({"length": 12}, True),
        ({"length": 13}, False),
        ({"codec": 0}, False),
        ({"dtype": Dtype.FLOAT16}, False),
        ({"chunk": 1}, False),
        ({"chunk": 1, "dtype": Dtype.FLOAT16, "length": 4}, True),
        ({"chunk": 1, "dtype": Dtype.FLOAT16, "length": 3}, False),
        ({"chunk": 1, "dtype": Dtype.FLOAT16, "length": 5}, False),
    ],
)
def test_a_payload_is_of_its_chunks_size_dtype_and_codec(
    changed: dict[str, int], is_taken: bool
) -> None:
    header = Header(kind=1, sender=0, length=10, codec=3, dtype=Dtype.FLOAT32)
    assert RULE.takes(header._replace(**changed)) == is_taken


def test_a_refusal_says_which_sizes_are_expected() -> None:
    header = Header(kind=1, sender=0, length=9, codec=1, dtype=2)
    assert RULE.refusal(header).startswith(
        "sent 9 bytes of chunk 0 by codec 1, dtype 2; 8 to 12 bytes by codec 3 (small), dtype 1 are"
    )
    assert "; 4 bytes by codec 3 (small), dtype 3 are" in RULE.refusal(header._replace(chunk=1))


def test_before_there_are_chunks_there_is_a_rule_for_none() -> None:
    nothing = PayloadRule.of_nothing()
    assert (nothing.codec, nothing.name, nothing.dtypes) == (0, "raw", ())
    assert (nothing.smallest, nothing.largest) == ((), ())
