"""Messages that are sent as one msgpack map; each class describes its message completely; pure.

A family of messages extends :class:`Message`. Each class has the name on the wire, the types of the
fields and the limit. Nothing received is ever unpickled, imported or executed: the name selects a
class of the family. pydantic checks the fields strictly when a message is made, at the sender too.

    class Control(Message, sent_as=None): ...          # a family: it is not sent itself
    class Evict(Control, sent_as="Bury"):
        generation: int
        dead: Numbers

    data = Evict(generation=1, dead=[3]).encode()
    Control.decode(data)                               # ProtocolError on anything malformed
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Self, TypeAlias, dataclass_transform

import msgpack
from pydantic import ConfigDict, FailFast, ValidationError
from pydantic.dataclasses import dataclass

from psdist.errors import InvariantError, ProtocolError

# One error is reported, so a list of millions of wrong items must not become millions of errors.
Numbers: TypeAlias = Annotated[list[int], FailFast()]
Payloads: TypeAlias = Annotated[list[bytes], FailFast()]

_CONFIG = ConfigDict(strict=True, extra="forbid", defer_build=True)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
class Message:
    """Fields may be int, float, str, bytes, bool, lists and maps. A value of another type is a
    pydantic.ValidationError."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    WHAT: ClassVar[str]
    """Name of a message of the family in errors."""
    MOST_BYTES: ClassVar[int]
    """Maximum bytes of a message."""
    NAME: ClassVar[str]
    """Name of the class on the wire."""
    SENT: ClassVar[dict[str, type[Message]]]
    """Name on the wire -> class, of the whole family."""

    def __init_subclass__(cls, *, sent_as: str | None = "") -> None:
        """``sent_as``: the name on the wire, by default the name of the class; None: not sent."""
        dataclass(cls, frozen=True, kw_only=True, config=_CONFIG)
        if cls.__base__ is Message:
            cls.SENT = {}
        if sent_as is not None:
            cls.NAME = sent_as or cls.__name__
            cls.SENT[cls.NAME] = cls

    def fault(self) -> str:
        """Return what is wrong with the fields together; "" if nothing is."""
        return ""

    def encode(self) -> bytes:
        """Return one msgpack map: {"type": ..., field: value, ...}. Raises :class:`InvariantError`
        if it is too long."""
        names = [field.name for field in dataclasses.fields(self)]
        body = {"type": self.NAME} | {name: getattr(self, name) for name in names}
        packed: bytes = msgpack.packb(body, use_bin_type=True)
        if len(packed) > self.MOST_BYTES:
            raise InvariantError(
                f"{self.WHAT} {self.NAME} of {len(packed)} bytes, limit {self.MOST_BYTES}"
            )
        return packed

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Self:
        """Return the message of this family. Raises :class:`ProtocolError`: too long, no msgpack,
        an unknown type, or a missing, extra or mistyped field."""
        what, most = cls.WHAT, max(each.MOST_BYTES for each in cls.SENT.values())
        if len(data) > most:
            raise ProtocolError(f"{what} of {len(data)} bytes, limit {most}")
        try:
            # msgpack bounds every length by that of the data; the data was bounded above.
            body = msgpack.unpackb(data, raw=False, strict_map_key=True)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(f"{what} that is not msgpack: {error}") from error
        name = body.pop("type", None) if isinstance(body, dict) else None
        found = cls.SENT.get(name) if isinstance(name, str) else None
        if found is None:
            raise ProtocolError(f"{what} of unknown type {name!r:.80}")
        if len(data) > found.MOST_BYTES:
            raise ProtocolError(f"{what} {name} of {len(data)} bytes, limit {found.MOST_BYTES}")
        try:
            message = found(**body)
        except ValidationError as error:
            raise ProtocolError(f"{what} {name}: {_first_fault(error)}") from None
        except TypeError:
            raise ProtocolError(f"{what} {name}: a field that has no name") from None
        if fault := message.fault():
            raise ProtocolError(f"{what} {name}: {fault}")
        assert isinstance(message, cls)
        return message


def _first_fault(error: ValidationError) -> str:
    """``field workers.1 must be a valid integer``, on one line whatever was received."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, fault["loc"]))[:80]
    if not where.isprintable():
        where = repr(where)
    if fault["type"] == "missing":
        return f"field {where} is missing"
    if fault["type"] == "unexpected_keyword_argument":
        return f"field {where} is unknown"
    return f"field {where} {fault['msg'].replace('Input should be', 'must be', 1)}"
