"""Snapshots of state machines: their state as msgpack, for another rank that continues; pure.

    class Counts(HasSnapshot):
        STATE = Fields({int: "_number", dict[int, Seen]: "_seen", Nested: "_window"})

    data = counts.to_snapshot()
    another.from_snapshot(data)               # made with the same parameters

A class declares the type of each attribute. Nothing received names a class or an attribute.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from types import GenericAlias
from typing import Any, ClassVar, NamedTuple

import msgpack
from pydantic import TypeAdapter, ValidationError


class Nested:
    """In place of a type: an attribute with a snapshot of its own, or None in both machines."""


class Change(NamedTuple):
    """An attribute of a machine gets a value."""

    machine: object
    name: str
    value: Any


class Fields:
    def __init__(self, names: Mapping[Any, str]) -> None:
        """``names``: by type, the attributes, separated by spaces."""
        self._types = {name: kind for kind, listed in names.items() for name in listed.split()}

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        kinds = (bytes | None if each is Nested else each for each in self._types.values())
        state: Any = GenericAlias(tuple, tuple(kinds))
        return TypeAdapter(state)

    def dump(self, machine: object) -> bytes:
        values = []
        for name, kind in self._types.items():
            value = getattr(machine, name)
            values.append(value.to_snapshot() if kind is Nested and value is not None else value)
        data: bytes = msgpack.packb(self._adapter.dump_python(tuple(values)), default=_as_list)
        return data

    def read(self, machine: object, data: bytes) -> list[Change]:
        """Return the changes that bring ``machine``, and the machines nested in it, to this state.
        Raises ValueError, in one line, for anything else than such a state. msgpack bounds every
        length by that of ``data``."""
        try:
            found = msgpack.unpackb(data, use_list=False, strict_map_key=False)
            values = self._adapter.validate_python(found)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, fault["loc"]))[:80]
            name = type(machine).__name__
            raise ValueError(f"field {where!r} of {name}: {fault['msg']}") from None
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ValueError(f"not msgpack: {error}") from error
        changes: list[Change] = []
        for (name, kind), value in zip(self._types.items(), values, strict=True):
            if kind is not Nested:
                changes.append(Change(machine, name, value))
            elif (value is None) != (getattr(machine, name) is None):
                raise ValueError(
                    f"field {name!r} of {type(machine).__name__}: of another kind of job"
                )
            elif value is not None:
                changes += getattr(machine, name).read_snapshot(value)
        return changes


class HasSnapshot:
    STATE: ClassVar[Fields]
    """All attributes that change."""

    def to_snapshot(self) -> bytes:
        """Return the state."""
        return self.STATE.dump(self)

    def read_snapshot(self, data: bytes) -> list[Change]:
        """Check the state of a machine that was made with the same parameters, and return the
        changes that it makes here. Raises ValueError if it is damaged."""
        return self.STATE.read(self, data)

    def from_snapshot(self, data: bytes) -> None:
        """Take the state of a machine that was made with the same parameters. Raises ValueError if
        it is damaged; then nothing has changed."""
        for machine, name, value in self.read_snapshot(data):
            setattr(machine, name, value)


def _as_list(value: Collection[Any]) -> list[Any]:
    """Equal sets have equal snapshots, whatever the order in which they were filled."""
    return sorted(value) if isinstance(value, set) else list(value)
