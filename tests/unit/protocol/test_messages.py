"""What travels: every header and control message comes back as it was sent, and nothing else is
taken for one."""

from __future__ import annotations

import dataclasses
import struct
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol import header as layout
from psdist.protocol.control import (
    CONTROL_LIMIT_BYTES,
    Append,
    Collected,
    Control,
    Stop,
    Suspend,
    decode_control,
    encode_control,
)
from psdist.protocol.header import HEADER_BYTES, MAGIC, Dtype, Flag, Header, Kind

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)

HEADERS = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    sender=UINT32,
    chunk=UINT32,
    clock=INT64,
    length=UINT64,
    group=UINT32,
    settings=UINT32,
    weight=st.floats(allow_nan=False),
    position=UINT64,
    min_done=INT64,
    flags=st.integers(0, 31),
    dtype=st.sampled_from(Dtype),
    codec=st.integers(0, 255),
    set_index=st.integers(0, 2**16 - 1),
    generation=UINT32,
    map_version=UINT32,
    checksum=UINT32,
    pull_number=UINT32,
    chunk_version=UINT64,
)


def packed(header: Header) -> bytearray:
    buffer = bytearray(HEADER_BYTES)
    header.pack_into(buffer)
    return buffer


@given(HEADERS)
def test_a_header_comes_back_as_it_was_packed(header: Header) -> None:
    assert Header.unpack(packed(header)) == header


@given(HEADERS, HEADERS)
def test_a_frame_is_used_again_without_a_trace_of_the_last_header(
    first: Header, second: Header
) -> None:
    buffer = packed(first)
    second.pack_into(buffer)
    assert buffer == packed(second)


@given(HEADERS, st.data())
def test_one_changed_bit_anywhere_in_use_is_noticed(header: Header, data: st.DataObject) -> None:
    buffer = packed(header)
    used = layout._USED_BYTES + 4  # the checksum itself included
    bit = data.draw(st.integers(0, used * 8 - 1))
    buffer[bit // 8] ^= 1 << bit % 8
    # Alignment bytes are not checked as fields, but they are under the checksum.
    with pytest.raises(ProtocolError):
        Header.unpack(buffer)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_no_bytes_raise_anything_but_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Header.unpack(data)


def test_bytes_of_another_program_are_named_by_their_magic() -> None:
    with pytest.raises(ProtocolError) as caught:
        Header.unpack(b"HTTP" + bytes(HEADER_BYTES))
    assert str(caught.value) == (
        "message with a broken header: magic 0x50545448 where 0x31534450 belongs; is another "
        "program sending on psdist's communicator?"
    )


def test_another_protocol_version_is_named_with_ours_before_anything_else_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(layout, "PROTOCOL_VERSION", 999)
        buffer = packed(Header(kind=Kind.PULL, sender=0))
    buffer[100] ^= 1  # that version may have fields of which we know nothing
    with pytest.raises(ProtocolError) as caught:
        Header.unpack(buffer)
    assert str(caught.value) == (
        "message of protocol version 999, this psdist speaks 11; install the same psdist version "
        "on all hosts"
    )


@pytest.mark.parametrize("field", ["kind", "dtype", "flags"])
def test_a_kind_dtype_or_flag_that_this_version_does_not_know_is_refused(field: str) -> None:
    header = Header(kind=Kind.PUSH, sender=1)._replace(**{field: 200})
    with pytest.raises(ProtocolError, match=rf"broken header: .*{field}s? (200|0xc8)"):
        Header.unpack(packed(header))


def test_a_header_that_is_cut_off_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"broken header: 50 bytes where 128 belong"):
        Header.unpack(packed(Header(kind=Kind.PUSH, sender=1))[:50])


def test_the_layout_is_little_endian_and_leaves_payloads_aligned() -> None:
    buffer = packed(Header(kind=Kind.PUSH, sender=1, chunk=0x01020304, pull_number=0x05060708))
    assert buffer[:4] == struct.pack("<I", MAGIC) == b"PDS1"
    assert buffer[24:28] == b"\4\3\2\1"  # the MPI transport reads the chunk from here,
    assert buffer[6] == Kind.PUSH  # and the kind
    assert buffer[80:84] == b"\x08\7\6\5"
    assert HEADER_BYTES % 64 == 0


def test_the_flags_do_not_overlap() -> None:
    assert Flag.FRESH + Flag.CHECKSUMMED + Flag.FOR_PULL + Flag.RECORDED == 15
    assert Flag.FRESH | Flag.CHECKSUMMED | Flag.FOR_PULL | Flag.RECORDED == 15


# -- control messages --------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is list:
        return st.lists(values_of(get_args(hint)[0]), max_size=5)
    if get_origin(hint) is dict:
        return st.dictionaries(st.text(), PLAIN, max_size=4)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: INT64,
        str: st.text(),
        bytes: st.binary(),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
    }
    return simple[hint]


def hints_of(cls: type[Control]) -> dict[str, Any]:
    names = {each.name for each in dataclasses.fields(cls)}
    return {name: hint for name, hint in get_type_hints(cls).items() if name in names}


def messages_of(cls: type[Control]) -> st.SearchStrategy[Control]:
    return st.builds(cls, **{name: values_of(hint) for name, hint in hints_of(cls).items()})


CLASSES: list[type[Control]] = [*Control.SENT.values()]  # type: ignore[list-item]
CONTROLS = st.one_of([messages_of(cls) for cls in CLASSES])


@given(CONTROLS)
def test_a_control_message_comes_back_as_it_was_sent(message: Control) -> None:
    assert decode_control(encode_control(message)) == message


@pytest.mark.parametrize("cls", CLASSES)
@settings(max_examples=5)
@given(data=st.data())
def test_every_kind_of_control_message_is_received_as_its_own_class(
    cls: type[Control], data: st.DataObject
) -> None:
    assert type(decode_control(encode_control(data.draw(messages_of(cls))))) is cls


@given(CONTROLS, st.data())
def test_a_control_message_with_a_changed_byte_is_refused_or_well_formed(
    message: Control, data: st.DataObject
) -> None:
    encoded = bytearray(encode_control(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        again = decode_control(encoded)
    except ProtocolError:
        return
    for name, hint in hints_of(type(again)).items():
        value, origin = getattr(again, name), get_origin(hint)
        assert value in get_args(hint) if origin is Literal else isinstance(value, origin or hint)


@given(st.binary(max_size=200))
def test_no_bytes_are_anything_but_a_control_message_or_a_protocol_error(data: bytes) -> None:
    with suppress(ProtocolError):
        assert isinstance(decode_control(data), Control)


@given(PLAIN)
def test_no_msgpack_value_is_anything_but_a_control_message_or_a_protocol_error(
    value: object,
) -> None:
    with suppress(ProtocolError):
        assert isinstance(decode_control(msgpack.packb(value)), Control)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"type": "Reboot"}, "control message of unknown type 'Reboot'"),
        ({"type": "Control"}, "control message of unknown type 'Control'"),
        ({"type": ["Stop"]}, r"control message of unknown type \['Stop'\]"),
        ({"group": 1}, "control message of unknown type None"),
        ([1, 2], "control message of unknown type None"),
        ({"type": "Stop", "now": True}, "Stop: field now is unknown$"),
        ({"type": "Resume"}, "Resume: field seq is missing$"),
        ({"type": "Resume", "seq": "1"}, "Resume: field seq must be a valid integer$"),
        ({"type": "Resume", "seq": True}, "Resume: field seq must be a valid integer$"),
        ({"type": "Absent", "seq": 1, "workers": [1, None]}, r"Absent: field workers\.1 must be a"),
        ({"type": "Metrics", "line": [1]}, "Metrics: field line must be a"),
        (
            {"type": "CommitMode", "number": 1, "rounds": [1], "mode": "auto", "staleness": 0},
            "CommitMode: field mode must be 'sync', 'ssp' or 'async'$",
        ),
        ({"type": "Stop", "a\nb": 1}, r"Stop: field 'a\\nb' is unknown$"),
        ({"type": "Stop", b"a": 1}, "Stop: a field that has no name$"),
        ({"type": "Stop", "__dataclass_self__": 1}, "Stop: a field that has no name$"),
    ],
)
def test_a_malformed_control_message_is_refused_with_the_reason(body: object, told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        decode_control(msgpack.packb(body))


def test_a_field_of_another_type_is_an_error_at_the_sender() -> None:
    for cls in CLASSES:
        names = [field.name for field in dataclasses.fields(cls)]
        if names:
            with pytest.raises(ValidationError):
                cls(**dict.fromkeys(names, object()))


def test_of_a_million_wrong_items_one_is_told() -> None:
    data = msgpack.packb(
        {"type": "Absent", "seq": 1, "num_absent": 1, "workers": [None] * 1_000_000}
    )
    with pytest.raises(ProtocolError, match=r"field workers\.0 must be a valid integer$") as caught:
        decode_control(data)
    faults = caught.value.__context__
    assert isinstance(faults, ValidationError)
    assert faults.error_count() == 1


def test_maps_with_keys_that_are_no_text_and_nesting_without_end_are_refused() -> None:
    with pytest.raises(ProtocolError, match="not msgpack"):
        decode_control(msgpack.packb({1: 2}))
    with pytest.raises(ProtocolError, match="not msgpack"):
        decode_control(b"\x91" * 100_000 + b"\x90")


def test_control_messages_are_bounded_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CONTROL_LIMIT_BYTES == 64 * 2**20
    for each in (Control, Append):
        monkeypatch.setattr(each, "MOST_BYTES", 100)
    large = Collected(seq=1, payloads=[bytes(200)], runs=[0, 1], values=b"", error="")
    with pytest.raises(InvariantError, match=r"Collected of \d+ bytes, limit 100"):
        encode_control(large)
    with pytest.raises(ProtocolError, match="of 101 bytes, limit 100"):
        decode_control(bytes(101))


def test_control_messages_are_frozen_and_compare_by_value() -> None:
    message = Suspend(group=1, clock=2, seq=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.group = 2  # type: ignore[misc]
    assert message == Suspend(group=1, clock=2, seq=3)
    assert decode_control(encode_control(Stop())) == Stop()
