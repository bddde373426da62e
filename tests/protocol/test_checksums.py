"""Payloads that change on their way: noticed where they carry a checksum, by either side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psdist.codecs.checks import Checks
from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.errors import ProtocolError
from psdist.protocol.events import Frame
from psdist.protocol.header import Header, Kind
from tests.protocol.codecs.test_codecs import BOTH_WAYS
from tests.support.virtual.job import VirtualJob, play
from tests.support.virtual.network import VirtualNetwork
from tests.support.virtual.proof import prove
from tests.support.virtual.schedule import Schedule

ALL = Checks("all")
SCHEDULE = Schedule(seed=3, mode="ssp", staleness=1, duplicate_rate=0.3, iterations=(5, 5))


class Flips(VirtualNetwork):
    """Changes one bit of a payload of ``kind`` on its way."""

    kind = Kind.PUSH

    def _arrive(self, receiver: int, ticket: Any, frame: Any) -> None:
        header = Header.unpack(ticket.header)
        if header.kind == self.kind and header.clock in (0, 2) and ticket.copy == b"":
            payload = bytearray(ticket.frame.payload[: ticket.num_bytes])
            payload[-1] ^= 4
            ticket.frame = Frame(memoryview(payload))
        super()._arrive(receiver, ticket, frame)


@pytest.mark.parametrize("wire", [RAW_WIRE, BOTH_WAYS], ids=["raw", "encoded"])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Kind.PUSH, r"server \d: \d+ bytes of chunk \d from worker \d, iteration \d, are not"),
        (Kind.REPLY, r"worker \d: \d+ bytes of chunk \d from server \d, iteration \d, are not"),
        (Kind.INIT, r"server \d: \d+ bytes of chunk \d from worker 0, iteration 0, are not"),
    ],
)
def test_changed_bytes_are_an_error_that_names_the_sender(
    wire: Wire, kind: Kind, what: str
) -> None:
    network = Flips(verify_open_sends=False)
    network.kind = kind
    job = VirtualJob(
        replace(SCHEDULE, duplicate_rate=0.0),
        wire=replace(wire, checks=ALL),
        network=network,
        is_watched=False,
    )
    with pytest.raises(ProtocolError, match=what):
        job.network.run()


@pytest.mark.parametrize("wire", [RAW_WIRE, BOTH_WAYS], ids=["raw", "encoded"])
@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_checksums_change_nothing_where_the_network_changes_nothing(wire: Wire, mode: str) -> None:
    prove(play(replace(SCHEDULE, mode=mode), wire=replace(wire, checks=ALL)))
