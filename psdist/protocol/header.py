"""The fixed binary header of every message, and what its numbers mean.

    header = Header(kind=Kind.PUSH, sender=worker_id(0), chunk=7, clock=3, length=4096)
    header.pack_into(frame_bytes)
    Header.unpack(frame_bytes)            # raises ProtocolError on anything malformed

A data message is ``HEADER_BYTES`` of header and raw parameter or gradient bytes; a control message
(:mod:`psdist.protocol.control`) is the same header followed by one msgpack map. A header is checked
field by field. This module never touches the network and never sees tensors.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from operator import itemgetter
from typing import Any, NamedTuple
from zlib import crc32

from psdist.errors import ProtocolError

PROTOCOL_VERSION = 11
MAGIC = 0x31534450  # "PDS1", little-endian
HEADER_BYTES = 128  # two cache lines
NEVER = 2**62
"""``min_done`` where no active group is left to wait for."""

MOST_CREDITS = 4096
"""Messages of a worker that are outstanding at one server, at most: so many of each worker are kept
by a server that is not built yet."""

MOST_SETS = 64
"""Parameter sets of a job, at most: each has machines of its own in every rank."""


class Kind(IntEnum):
    PUSH = 1
    """A group's update of one chunk; payload: the gradient."""
    REPLY = 2
    """A chunk's parameters, in answer to a push or a pull."""
    PULL = 3
    """Asks for a chunk's parameters; no payload."""
    INIT = 4
    """The chief's parameters of one chunk: the initial values, or values of job.set_parameters."""
    CONTROL = 5
    RECEIPT = 6
    """A server has received a push, and its reply must wait, or it has set the chief's values; no
    payload."""
    RECORD = 7
    """A server sends its replica a change of its shard, the ``clock``-th from 1; payload: values or
    a gradient, then the record (psdist.servers.protocol.replication.records)."""
    RECORDED = 8
    """The replica stores all records up to the ``clock``-th; no payload."""
    MISSED = 9
    """Sent instead of the reply to a push: the round had closed without the group, which continues
    in round ``min_done``; no payload."""
    PULL_ROWS = 10
    """Asks for rows of tables; payload: their ids. The answer is a REPLY."""
    PUSH_ROWS = 11
    """The ``map_version``-th part of a push of rows that is too long for one message; its PUSH
    follows."""


class Flag:
    """Bits of ``Header.flags``; plain ints, because enum arithmetic costs more than a message."""

    NONE = 0
    FRESH = 1
    """On PULL: whatever is newest, without waiting for other groups. On REPLY: answers such a
    one."""
    CHECKSUMMED = 2
    """``checksum`` is that of the payload: its receiver compares (psdist.codecs.checks)."""
    FOR_PULL = 4
    """On REPLY: answers a PULL, not a PUSH."""
    RECORDED = 8
    """On REPLY: the server recorded a checksum of these parameters (docs/reference/history.md)."""
    UNCHANGED = 16
    """On REPLY: no payload, for the asker holds this version of the chunk already."""
    RETRANSMIT = 32
    """On PUSH, PULL, INIT: it was sent before, to a server that has failed since."""
    RECEIPT = 64
    """On PUSH: its sender has more to push than credits, and asks for a RECEIPT."""


class Dtype(IntEnum):
    NONE = 0
    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4


class CodecCode(IntEnum):
    """Codecs by number; which one a receiver takes is psdist.protocol.payloads'."""

    RAW = 0
    FP16 = 1
    BF16 = 2
    INT8 = 3
    INT4 = 4
    INT2 = 5
    SIGN = 6
    TOPK = 7
    RANDK = 8
    LOW_RANK = 9
    OWN = 10
    """One of the user's own, which all ranks have from their configuration."""
    PLAIN = 11
    """float32, as they are."""
    PACKED = 12
    """Another one's payload, made smaller without loss."""
    ROWS = 13
    """Rows of tables (psdist.tables.payloads)."""


# One field per line, in wire order; see Header for their meaning.
_LAYOUT = struct.Struct("<IHBBBBHIIIIIIqQqdQIIQ")
KIND_BYTE = 6
LENGTH_BYTES = slice(68, 76)
"""Positions of ``Header.kind`` and ``Header.length`` (little-endian) in a packed header."""
LENGTH = struct.Struct(f"<{LENGTH_BYTES.start}xQ")
"""Takes the latter out of one."""
_USED_BYTES = _LAYOUT.size
_SEALED = struct.Struct(f"<{_USED_BYTES}sI")
"""The layout's bytes and their checksum."""
_WHOLE = struct.Struct(f"{_LAYOUT.format}I")
"""The layout's fields and their checksum."""
_BEGINNING = (MAGIC, PROTOCOL_VERSION)


class Header(NamedTuple):
    """Every message names generation, sender, set, clock and chunk: no order of arrival is assumed.

    ``clock`` is the iteration that a push ends, or for a reply the iteration whose update it
    answers. ``position`` is the position in the server's log of applies at which the reply was
    made; ``min_done`` the number of iterations that every active group had contributed by then.
    ``weight`` is the group's share in units of one worker's full batch. ``settings`` is the
    version of the sender's hyperparameters and absent pieces (see :class:`Settings`), in a push.
    ``pull_number`` counts from 1 the pulls of a worker and the times that it sets values: in a pull
    and the reply to it, in INIT of later values and the receipt of them; 0 in all else: replies of
    one clock differ by it. ``set_index``: the parameter set that the message is about, 0 for what
    concerns the whole job; chunks are counted within their set. ``chunk_version`` counts what has
    changed a chunk, steps and values that were set, from 1 for its initial ones: in a reply that of
    the parameters, in a push or pull that of those in the sender's memory, 0 where it holds none or
    wants them in any case.
    """

    kind: int
    sender: int
    chunk: int = 0
    clock: int = 0
    length: int = 0
    group: int = 0
    settings: int = 0
    weight: float = 0.0
    position: int = 0
    min_done: int = 0
    flags: int = 0
    dtype: int = 0
    codec: int = 0
    generation: int = 0
    map_version: int = 0
    checksum: int = 0
    pull_number: int = 0
    set_index: int = 0
    chunk_version: int = 0

    def pack_into(self, buffer: Any) -> None:
        data = _LAYOUT.pack(MAGIC, PROTOCOL_VERSION, *_in_wire_order(self))
        _SEALED.pack_into(buffer, 0, data, crc32(data))

    @classmethod
    def unpack(cls, buffer: Any) -> Header:
        """Parse and verify; raises :class:`ProtocolError` naming what is wrong."""
        if len(buffer) < HEADER_BYTES:
            raise ProtocolError(
                f"message with a broken header: {len(buffer)} bytes where {HEADER_BYTES} belong"
            )
        wire = _WHOLE.unpack_from(buffer)
        if (
            wire[:2] != _BEGINNING
            or crc32(buffer[:_USED_BYTES]) != wire[-1]
            or wire[2] not in _KINDS
            or wire[3] not in _DTYPES
            or wire[5] & ~_FLAGS
        ):
            raise _broken(wire, crc32(buffer[:_USED_BYTES]))
        return tuple.__new__(cls, _in_field_order(wire))


def _broken(wire: tuple[Any, ...], crc: int) -> ProtocolError:
    """Describe the fault in a header with these fields, whose bytes have this checksum."""
    (magic, version, kind, dtype, _codec, flags), stored = wire[:6], wire[-1]
    if magic != MAGIC:
        return ProtocolError(
            f"message with a broken header: magic {magic:#010x} where {MAGIC:#010x} belongs; "
            "is another program sending on psdist's communicator?"
        )
    if version != PROTOCOL_VERSION:
        return ProtocolError(
            f"message of protocol version {version}, this psdist speaks {PROTOCOL_VERSION}; "
            "install the same psdist version on all hosts"
        )
    if crc != stored:
        return ProtocolError(
            f"message with a broken header: checksum {stored:#010x}, its bytes give {crc:#010x}"
        )
    return ProtocolError(
        f"message with a broken header: kind {kind}, dtype {dtype}, "
        f"flags {flags:#x} are not all known to this version"
    )


_WIRE_ORDER = (
    "kind", "dtype", "codec", "flags", "set_index", "generation", "sender", "group", "chunk",
    "map_version", "settings", "clock", "position", "min_done", "weight", "length", "checksum",
    "pull_number", "chunk_version",
)  # fmt: skip
"""Behind magic and version. That of the fields is for those who read and write them."""
_in_wire_order = itemgetter(*map(Header._fields.index, _WIRE_ORDER))
_in_field_order = itemgetter(*(2 + _WIRE_ORDER.index(field) for field in Header._fields))

_KINDS = frozenset(Kind)
_DTYPES = frozenset(Dtype)
_FLAGS = (
    Flag.FRESH
    | Flag.CHECKSUMMED
    | Flag.FOR_PULL
    | Flag.RECORDED
    | Flag.UNCHANGED
    | Flag.RETRANSMIT
    | Flag.RECEIPT
)
