"""What travels: the fixed header of data messages, and the control messages.

A data message is ``HEADER_BYTES`` of header and raw parameter or gradient bytes; a control message
is the same header followed by one msgpack map. Nothing received is ever unpickled,
imported or executed: a header is checked field by field, a control message is decoded with limits
into one of the frozen classes below.

    header = Header(kind=Kind.PUSH, sender=worker_id(0), chunk=7, clock=3, length=4096)
    header.pack_into(frame_bytes)
    Header.unpack(frame_bytes)            # raises ProtocolError on anything malformed

This module never touches the network and never sees tensors.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgpack

from psdist.errors import InvariantError, ProtocolError

PROTOCOL_VERSION = 1
MAGIC = 0x31534450  # "PDS1", little-endian
HEADER_BYTES = 128  # two cache lines
CONTROL_LIMIT_BYTES = 64 * 2**20
NEVER = 2**62
"""``min_done`` where no active group is left to wait for."""


class Kind(IntEnum):
    PUSH = 1
    """A group's update of one chunk; payload: the gradient."""
    REPLY = 2
    """A chunk's parameters, in answer to a push or a pull."""
    PULL = 3
    """Asks for a chunk's parameters; no payload."""
    INIT = 4
    """The chief's initial parameters of one chunk."""
    CONTROL = 5


class Flag:
    """Bits of ``Header.flags``; plain ints, because enum arithmetic costs more than a message."""

    NONE = 0
    FRESH = 1
    """On PULL: whatever is newest, without waiting for other groups."""
    CHECKSUMMED = 2
    """On REPLY: the server recorded a checksum of these bytes (history, design section 7)."""
    FOR_PULL = 4
    """On REPLY: answers a PULL, not a PUSH."""


class Dtype(IntEnum):
    NONE = 0
    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4


class Codec(IntEnum):
    RAW = 0


# One field per line, in wire order; see Header for their meaning.
_LAYOUT = struct.Struct("<IHBBBB2xIIIIIIqQqdQI")
KIND_BYTE = 6
LENGTH_BYTES = slice(68, 76)
"""Where ``Header.kind`` and ``Header.length`` (little-endian) stand in a packed header."""
_CHECKSUM = struct.Struct("<I")
_USED_BYTES = _LAYOUT.size


class Header(NamedTuple):
    """Every message names generation, sender, clock and chunk: nothing relies on arrival order.

    ``clock`` is the iteration that a push ends, or for a reply the iteration whose update it
    answers. ``position`` is the position in the server's log of applies at which the reply was
    made; ``min_done`` the number of iterations that every active group had contributed by then.
    ``weight`` is the group's share in units of one worker's full batch. ``settings`` is the
    version of the sender's hyperparameters and absent pieces (see :class:`Settings`); in a pull
    and the reply to it, the number of the pull.
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

    def pack_into(self, buffer: Any) -> None:
        _LAYOUT.pack_into(
            buffer, 0, MAGIC, PROTOCOL_VERSION, self.kind, self.dtype, self.codec, self.flags,
            self.generation, self.sender, self.group, self.chunk, self.map_version, self.settings,
            self.clock, self.position, self.min_done, self.weight, self.length, self.checksum,
        )  # fmt: skip
        crc = zlib.crc32(memoryview(buffer)[:_USED_BYTES])
        _CHECKSUM.pack_into(buffer, _USED_BYTES, crc)

    @classmethod
    def unpack(cls, buffer: Any) -> Header:
        """Parse and verify; raises :class:`ProtocolError` naming what is wrong."""
        if len(buffer) < HEADER_BYTES:
            raise ProtocolError(
                f"message with a broken header: {len(buffer)} bytes where {HEADER_BYTES} belong"
            )
        (
            magic, version, kind, dtype, codec, flags,
            generation, sender, group, chunk, map_version, settings,
            clock, position, min_done, weight, length, checksum,
        ) = _LAYOUT.unpack_from(buffer)  # fmt: skip
        if magic != MAGIC:
            raise ProtocolError(
                f"message with a broken header: magic {magic:#010x} where {MAGIC:#010x} belongs; "
                "is another program sending on psdist's communicator?"
            )
        if version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"message of protocol version {version}, this psdist speaks {PROTOCOL_VERSION}; "
                "install the same psdist version on all hosts"
            )
        crc = zlib.crc32(memoryview(buffer)[:_USED_BYTES])
        (stored,) = _CHECKSUM.unpack_from(buffer, _USED_BYTES)
        if crc != stored:
            raise ProtocolError(
                f"message with a broken header: checksum {stored:#010x}, its bytes give {crc:#010x}"
            )
        if kind not in _KINDS or dtype not in _DTYPES or codec not in _CODECS or flags & ~_FLAGS:
            raise ProtocolError(
                f"message with a broken header: kind {kind}, dtype {dtype}, codec {codec}, "
                f"flags {flags:#x} are not all known to this version"
            )
        return cls(
            kind, sender, chunk, clock, length, group, settings, weight, position, min_done,
            flags, dtype, codec, generation, map_version, checksum,
        )  # fmt: skip


_KINDS = frozenset(Kind)
_DTYPES = frozenset(Dtype)
_CODECS = frozenset(Codec)
_FLAGS = Flag.FRESH | Flag.CHECKSUMMED | Flag.FOR_PULL


# ---------------------------------------------------------------------------------------------
# Control messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """Base of the control messages; fields may be int, float, str, bytes, bool, lists and maps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup(Control):
    """Chief to every server: how parameters are cut and which optimizer runs
    (psdist.protocol.partition)."""

    partition: bytes
    optimizer: str
    hyper: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Register(Control):
    """A group's leader to every server: from now on this group has a clock."""

    group: int
    workers: list[int]
    clock: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered(Control):
    """A server's answer to :class:`Register`; tells where the group's clock stands there."""

    group: int
    server: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(Control):
    """A worker to a server, before the first push made under it.

    ``hyper``: the packed hyperparameters of all optimizer groups (psdist.protocol.optimizers);
    ``absent``: pieces without a gradient in the pushes that name this version.
    """

    version: int
    hyper: bytes
    absent: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspend(Control):
    """A group's leader to every server: the group waits in collective ``seq``; others need not
    wait for its iterations from ``clock`` on."""

    group: int
    clock: int
    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume(Control):
    """Registrar to every server: collective ``seq`` is over, its groups count again."""

    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed(Control):
    """A server's answer to :class:`Resume`."""

    seq: int
    server: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave(Control):
    """A group's leader to every server: the group's script has finished after ``clock``
    iterations."""

    group: int
    clock: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Enter(Control):
    """A worker to the registrar: I have come to collective number ``seq``, called ``name``."""

    worker: int
    seq: int
    name: str
    payload: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected(Control):
    """Registrar to every worker: what all brought to collective ``seq``, or why it failed."""

    seq: int
    payloads: list[bytes]
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Done(Control):
    """A worker to the registrar: my script has finished; ``statistics`` go into summary.json."""

    worker: int
    statistics: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics(Control):
    """A worker to the registrar: one line for metrics.jsonl."""

    line: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Control):
    """A worker to the registrar, a few times a second: for the progress line."""

    worker: int
    clock: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish(Control):
    """Registrar to every other server: all workers are done; send your statistics and end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(Control):
    """A server's answer to :class:`Finish`."""

    server: int
    statistics: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop(Control):
    """Registrar to every worker: the job is complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(Control):
    """Anybody to the registrar: I have failed with this text; print it once and end the job."""

    heading: str
    text: str
    exit_status: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WhoIsMissing(Control):
    """A worker that has waited long, to a server: whom does this chunk wait for?"""

    chunk: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing(Control):
    """The answer to :class:`WhoIsMissing`: groups whose updates the chunk waits for."""

    chunk: int
    groups: list[int]
    clocks: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class WhoIsAbsent(Control):
    """A worker that has waited long in collective ``seq``, to the registrar."""

    worker: int
    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Absent(Control):
    """The answer to :class:`WhoIsAbsent`."""

    seq: int
    workers: list[int]


_TYPES: dict[str, type[Control]] = {cls.__name__: cls for cls in Control.__subclasses__()}
_HINTS: dict[str, dict[str, Any]] = {name: get_type_hints(cls) for name, cls in _TYPES.items()}


def encode_control(message: Control) -> bytes:
    """One msgpack map: {"type": ..., field: value, ...}."""
    body: dict[str, Any] = {"type": type(message).__name__}
    for field in dataclasses.fields(message):
        body[field.name] = getattr(message, field.name)
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    if len(packed) > CONTROL_LIMIT_BYTES:
        raise InvariantError(
            f"control message {body['type']} of {len(packed)} bytes, limit {CONTROL_LIMIT_BYTES}"
        )
    return packed


def decode_control(data: bytes | bytearray | memoryview) -> Control:
    """The message, or :class:`ProtocolError`: unknown type, missing, extra or mistyped field."""
    if len(data) > CONTROL_LIMIT_BYTES:
        raise ProtocolError(f"control message of {len(data)} bytes, limit {CONTROL_LIMIT_BYTES}")
    try:
        # msgpack bounds every length by that of the data; the data was bounded above.
        body = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"control message that is not msgpack: {error}") from error
    name = body.pop("type", None) if isinstance(body, dict) else None
    cls = _TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ProtocolError(f"control message of unknown type {name!r}")
    hints = _HINTS[cls.__name__]
    if body.keys() != hints.keys():
        wrong = sorted(body.keys() ^ hints.keys(), key=str)
        raise ProtocolError(f"control message {name}: fields {wrong} missing or unknown")
    for field, hint in hints.items():
        if not _is_a(body[field], hint):
            raise ProtocolError(f"control message {name}: field {field} must be {hint}")
    return cls(**body)


def _is_a(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin = get_origin(hint)
    if origin is list:
        (item,) = get_args(hint)
        return isinstance(value, list) and all(_is_a(each, item) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
