"""Which payloads carry a checksum, and that other bytes than were sent are an error."""

from __future__ import annotations

import zlib

import pytest

from psdist.codecs.checks import Checks, stamped, verify
from psdist.config.settings import RunConfig
from psdist.errors import ProtocolError
from psdist.protocol.events import Frame
from psdist.protocol.header import Flag, Header, Kind
from psdist.protocol.ids import worker_id
from psdist.ranks.wire import wire_of

HEADER = Header(kind=Kind.PUSH, sender=worker_id(3), chunk=5, clock=7, length=3, flags=Flag.FRESH)


def test_none_one_in_so_many_or_all_carry_one() -> None:
    places = [(chunk, clock) for chunk in range(4) for clock in range(8)]
    assert not any(Checks().carries(*place) for place in places)
    assert all(Checks("all").carries(*place) for place in places)
    sampled = [place for place in places if Checks("sampled", every=4).carries(*place)]
    assert len(sampled) == 8
    assert {chunk for chunk, _ in sampled} == set(range(4))
    assert {clock for _, clock in sampled} == set(range(8))
    assert wire_of(RunConfig(checksum="sampled", checksum_every=5)).checks == Checks("sampled", 5)
    assert wire_of(RunConfig()).checks == Checks("off", 16)


def test_a_payload_is_compared_as_far_as_it_was_announced() -> None:
    memory = bytearray(b"abcdef")
    header = stamped(HEADER, memoryview(memory))
    assert header == HEADER._replace(
        flags=Flag.FRESH | Flag.CHECKSUMMED, checksum=zlib.crc32(b"abc")
    )
    verify(header, Frame(memoryview(b"abcxyz")), receiver="server 0")
    with pytest.raises(ProtocolError) as caught:
        verify(header, Frame(memoryview(b"abxdef")), receiver="server 0")
    assert str(caught.value).startswith(
        "server 0: 3 bytes of chunk 5 from worker 3, iteration 7, are not those that were sent"
    )


def test_what_has_no_bytes_carries_no_checksum() -> None:
    assert stamped(HEADER, None) == HEADER
    empty = HEADER._replace(length=0)
    assert stamped(empty, memoryview(b"abc")) == empty
    verify(stamped(HEADER, memoryview(b"abc")), Frame(capacity=3), receiver="server 0")
