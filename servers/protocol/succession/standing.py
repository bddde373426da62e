"""All that a registrar knows, as bytes for its next deputy, and back; pure.

    state = pack(office)
    unpack(state)                         # another one, which decides what the first would

The state of the machine is a graph: objects of psdist's own classes, containers and plain values,
some of them in two places. It goes as a table of nodes, in which each object is once: what was one
is one again. Messages among it are encoded as on the wire. Classes are those of the packages below
and no others; nothing received is imported, called or evaluated, and objects are made without their
constructors, out of attributes by name.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgpack

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Control, decode_control, encode_control

_PACKAGES: Final = ("psdist.servers.protocol.", "psdist.controller.")
"""State machines, which do no I/O: what a registrar consists of."""
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_MESSAGE: Final = "a message"
_CONTAINERS: Final[dict[str, type[Any]]] = {
    each.__name__: each for each in (list, tuple, set, frozenset, deque, dict, Counter)
}
_MOST_DEEP: Final = 64


def _class(name: str) -> type[Any] | None:
    """None where there is none of that name."""
    module, _, own = name.rpartition(".")
    if not module.startswith(_PACKAGES):
        return None
    found = getattr(sys.modules.get(module), own, None)
    return found if isinstance(found, type) and found.__module__ == module else None


def pack(value: Any) -> bytes:
    """Raises :class:`InvariantError` where there is something that no registrar has."""
    packing = _Packing()
    root = packing.packed(value)
    data: bytes = msgpack.packb([root, packing.nodes], use_bin_type=True)
    return data


class _Packing:
    """A plain value goes as it is, anything else as [number of its node]; a node is the name of
    what it is, and what that holds."""

    def __init__(self) -> None:
        self.nodes: list[list[Any]] = []
        self._numbers: dict[int, int] = {}
        """By what :func:`id` says of objects, which live while this is made."""

    def packed(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.nodes)
            self.nodes.append([])
            self.nodes[number] = self._node(value)
        return [number]

    def _node(self, value: Any) -> list[Any]:
        cls = type(value)
        if isinstance(value, Control):
            return [_MESSAGE, encode_control(value)]
        if _CONTAINERS.get(cls.__name__) is cls:
            items = (
                [part for item in value.items() for part in item]
                if isinstance(value, dict)
                else value
            )
            return [cls.__name__, *map(self.packed, items)]
        name = f"{cls.__module__}.{cls.__qualname__}"
        is_named_tuple = isinstance(value, tuple) and hasattr(cls, "_fields")
        is_container = isinstance(value, tuple(_CONTAINERS.values())) and not is_named_tuple
        if _class(name) is not cls or is_container:
            raise InvariantError(f"a registrar was to be told of with a {name} in it")
        if is_named_tuple:
            return [name, *map(self.packed, value)]
        attributes = _attributes(value)
        return [name, *(part for each in attributes for part in (each[0], self.packed(each[1])))]


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        for name in cls.__dict__.get("__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)


def unpack(data: bytes) -> Any:
    """What :func:`pack` was given, another one. Raises :class:`ProtocolError`."""
    try:
        root, nodes = msgpack.unpackb(data, raw=False, strict_map_key=True)
        return _Unpacking(nodes).made(root)
    except (ValueError, TypeError, LookupError, AttributeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"what the registrar knows has come damaged: {error}") from error


class _Unpacking:
    def __init__(self, nodes: list[list[Any]]) -> None:
        self._nodes = nodes
        self._made: dict[int, Any] = {}
        self._depth = 0

    def made(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        (number,) = value
        if number not in self._made:
            self._depth += 1
            if self._depth > _MOST_DEEP:
                raise ValueError(f"deeper than {_MOST_DEEP}")
            self._make(number, *self._nodes[number])
            self._depth -= 1
        return self._made[number]

    def _make(self, number: int, name: str, *items: Any) -> None:
        if name == _MESSAGE:
            self._made[number] = decode_control(items[0])
            return
        cls = _CONTAINERS.get(name) or _class(name)
        if cls is None:
            raise LookupError(f"{name!r} is nothing that a registrar has")
        if cls in (tuple, frozenset):  # cannot hold themselves
            self._made[number] = cls([self.made(each) for each in items])
            return
        if issubclass(cls, tuple):
            if len(items) != len(getattr(cls, "_fields", ())):
                raise ValueError(f"{name!r} of {len(items)} fields")
            self._made[number] = tuple.__new__(cls, map(self.made, items))
            return
        self._made[number] = made = cls() if name in _CONTAINERS else object.__new__(cls)
        if cls in (list, deque, set):
            add: Callable[[Any], object] = made.add if cls is set else made.append
            for each in items:
                add(self.made(each))
            return
        for key, each in zip(items[::2], items[1::2], strict=True):
            if isinstance(made, dict):
                made[self.made(key)] = self.made(each)
            else:
                object.__setattr__(made, key, self.made(each))
