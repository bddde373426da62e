"""The control messages: what ranks tell one another beside parameters and gradients.

Each travels as a header (:mod:`psdist.protocol.header`) followed by one msgpack map. Nothing
received is ever unpickled, imported or executed: a message is decoded with limits into one of the
frozen classes below.

    data = encode_control(Leave(group=2, clock=17))
    decode_control(data)                  # raises ProtocolError on anything malformed
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

import msgpack

from psdist.errors import InvariantError, ProtocolError

CONTROL_LIMIT_BYTES = 64 * 2**20


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
