"""Which payloads carry a CRC-32 of their bytes, and what a receiver does with it.

A network that is trusted needs none. Where a payload carries one its receiver compares: other bytes
than were sent are an error that names the sender, not a gradient or a parameter.

    checks = Checks("sampled", every=16)
    if checks.carries(chunk, clock):
        header = stamped(header, payload)
    verify(header, frame, receiver="worker 3")
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

from psdist.errors import ProtocolError
from psdist.protocol.events import Frame
from psdist.protocol.header import Flag, Header
from psdist.protocol.ids import describe_peer


@dataclass(frozen=True)
class Checks:
    which: Literal["off", "sampled", "all"] = "off"
    every: int = 16
    """With ``sampled``: one payload in this many has a checksum."""

    def carries(self, chunk: int, clock: int) -> bool:
        if self.which == "sampled":
            # Neighbouring chunks take turns, so that every chunk and every iteration is sampled.
            return (chunk + clock) % self.every == 0
        return self.which == "all"


NO_CHECKS = Checks()


def stamped(header: Header, payload: memoryview | None, *, crc: int | None = None) -> Header:
    """Return ``header`` with the checksum of the first ``header.length`` bytes of ``payload``, or
    ``crc``, their known CRC-32."""
    if payload is None or not header.length:
        return header
    checksum = zlib.crc32(payload[: header.length]) if crc is None else crc
    return header._replace(flags=header.flags | Flag.CHECKSUMMED, checksum=checksum)


def verify(header: Header, frame: Frame | None, *, receiver: str) -> None:
    """The payload carries a checksum: :class:`ProtocolError` if it is not that of its bytes."""
    if frame is None or frame.payload is None:
        return
    seen = zlib.crc32(frame.payload[: header.length])
    if seen != header.checksum:
        raise ProtocolError(
            f"{receiver}: {header.length} bytes of chunk {header.chunk} from "
            f"{describe_peer(header.sender)}, iteration {header.clock}, are not those that were "
            f"sent: their CRC-32 is {seen:08x}, that of the sender's {header.checksum:08x}; the "
            "network, or memory at either end, changes data"
        )
