"""Descriptions of optimizer state: in transfers, on replicas and in checkpoints; how it is cut.

The description of a piece maps the optimizer's own keys to entries. An entry with a value for each
element of the parameter is cut with it, by chunks, and these into parts. A number is in the
description itself.

    packed = pack_states({0: {"step": Plain(3), "exp_avg": PerElement("float32")}})
    states = unpack_states(packed, pieces=range(1))       # ProtocolError for anything else
    for start in part_starts(chunk.length):
        layout = stretches(chunk, states, start)          # what the bytes of that part are

torch is not imported: a dtype is its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

from psdist.errors import ProtocolError
from psdist.protocol.partition import ITEM_BYTES, Chunk

STATE_ITEM_BYTES: Final = {
    **ITEM_BYTES,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
PART_ELEMENTS: Final = 1 << 18
"""Elements of a chunk whose state travels in one message, at most."""
MOST_KEYS: Final = 16
"""Maximum keys of a parameter's state: a part with this many fits into a control message."""
MOST_CHARACTERS: Final = 128
"""Maximum length of a key, and of a server's messages for people."""
_MOST_DIMS: Final = 8
_MOST_WHOLE_DIMS: Final = 16
_MOST_FLOAT32: Final = float.fromhex("0x1.fffffep+127")

ONE_VALUE_KEYS: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of torch's optimizers that are one value for a tensor, also where the parameter is."""

Number: TypeAlias = "bool | int | float"


class PerElement(NamedTuple):
    """A tensor of the parameter's shape."""

    dtype: str


class OneValue(NamedTuple):
    """A tensor of one value."""

    dtype: str
    dims: int
    value: Number


class Plain(NamedTuple):
    """A number of Python's, or None."""

    value: Number | None


class Uncut(NamedTuple):
    """Something that cannot be cut, in words. Only servers send it, to the chief."""

    what: str


class Whole(NamedTuple):
    """A tensor of the whole piece with a shape of its own (Adafactor's rows). Replicas and
    checkpoints keep it; only optimizers of whole tensors have it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def what(self) -> str:
        return f"a {self.dtype} tensor of the shape {self.shape}"


Entry: TypeAlias = "PerElement | OneValue | Plain | Uncut | Whole"
PieceState: TypeAlias = dict[str, Entry]
"""Optimizer state of a parameter, by key, in the optimizer's order."""


class Stretch(NamedTuple):
    """``length`` elements of one entry of a piece, from element ``start`` of the chunk on."""

    piece: int
    key: str
    dtype: str
    start: int
    length: int

    @property
    def num_bytes(self) -> int:
        return self.length * STATE_ITEM_BYTES[self.dtype]


class StatePart(NamedTuple):
    """A message's worth: elements from ``start`` of the chunk on."""

    chunk: int
    start: int
    num_bytes: int


def is_key(key: object) -> bool:
    """Whether a state may have such a key."""
    return isinstance(key, str) and 0 < len(key) <= MOST_CHARACTERS and key.isprintable()


def fits_torch(optimizer: str, key: str, entry: Entry) -> bool:
    """True if torch's own code can step with such an entry. It does not check sizes: given one
    value instead of one per element, it would write past the end of its memory. Optimizers from
    outside torch are not checked."""
    if not optimizer.startswith("torch.optim."):
        return True
    if key in ONE_VALUE_KEYS:
        return isinstance(entry, OneValue)
    if isinstance(entry, PerElement):
        return "float" in entry.dtype
    return not isinstance(entry, OneValue)


# -- how it is cut ---------------------------------------------------------------------------------


def part_starts(num_elements: int) -> range:
    """Where the parts of a chunk begin."""
    return range(0, num_elements, PART_ELEMENTS)


def stretches(chunk: Chunk, states: Mapping[int, PieceState], start: int) -> list[Stretch]:
    """Return the state in the part from ``start`` on, in the order of its bytes."""
    stop = min(start + PART_ELEMENTS, chunk.length)
    found: list[Stretch] = []
    for segment in chunk.segments:
        low = max(segment.offset, start)
        length = min(segment.offset + segment.length, stop) - low
        if length > 0:
            found += [
                Stretch(segment.piece, key, entry.dtype, low, length)
                for key, entry in states.get(segment.piece, {}).items()
                if isinstance(entry, PerElement)
            ]
    return found


def parts_of(chunk: Chunk, states: Mapping[int, PieceState]) -> list[StatePart]:
    """The parts of a chunk that have bytes, ascending."""
    parts = [
        StatePart(
            chunk.index, start, sum(each.num_bytes for each in stretches(chunk, states, start))
        )
        for start in part_starts(chunk.length)
    ]
    return [part for part in parts if part.num_bytes]


# -- on the wire -----------------------------------------------------------------------------------


def pack_states(states: Mapping[int, PieceState]) -> bytes:
    """Nothing for no state at all."""
    if not states:
        return b""
    packed: bytes = msgpack.packb(
        [
            [piece, [[key, _LETTERS[type(entry)], *entry] for key, entry in state.items()]]
            for piece, state in sorted(states.items())
        ]
    )
    return packed


def unpack_states(
    data: bytes, *, pieces: Collection[int], is_of_server: bool = False
) -> dict[int, PieceState]:
    """Return what :func:`pack_states` packed, of some of ``pieces``. Raises :class:`ProtocolError`
    for any other bytes. ``is_of_server``: there may be :class:`Uncut` and :class:`Whole`."""
    if not data:
        return {}
    try:
        body = msgpack.unpackb(data, use_list=False)
        states = {piece: _checked_state(items) for piece, items in body}
        _require(list(states) == sorted(states) and len(states) == len(body))
        _require(all(type(piece) is int and piece in pieces for piece in states))
        entries = (entry for state in states.values() for entry in state.values())
        _require(is_of_server or not any(isinstance(entry, Uncut | Whole) for entry in entries))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"optimizer state that cannot be read: {error!r:.200}") from None
    return states


def _checked_state(items: Sequence[Any]) -> PieceState:
    return checked_state(
        (key, _KINDS[_LETTER_NUMBERS.index(kind)], each) for key, kind, *each in items
    )


def checked_state(items: Iterable[tuple[Any, type[Any], Sequence[Any]]]) -> PieceState:
    """Return the state of a piece. ``items``: key, class and fields of each entry. Raises
    ValueError or TypeError for fields that no entry has."""
    state: PieceState = {}
    for key, kind, fields in items:
        _require(is_key(key) and key not in state)
        state[key] = entry = kind(*fields)
        if isinstance(entry, PerElement | OneValue | Whole):
            _require(entry.dtype in STATE_ITEM_BYTES)
        if isinstance(entry, OneValue):
            _require(_is_number(entry.value) and _fits(entry.value, entry.dtype))
            _require(type(entry.dims) is int and 0 <= entry.dims <= _MOST_DIMS)
        elif isinstance(entry, Plain):
            _require(entry.value is None or _is_number(entry.value))
        elif isinstance(entry, Uncut):
            _require(isinstance(entry.what, str) and len(entry.what) <= MOST_CHARACTERS)
            _require(entry.what.isprintable())
        elif isinstance(entry, Whole):
            _require(isinstance(entry.shape, tuple) and len(entry.shape) <= _MOST_WHOLE_DIMS)
            _require(all(type(each) is int and 0 <= each < 2**40 for each in entry.shape))
    _require(0 < len(state) <= MOST_KEYS)
    return state


def _fits(value: Number, dtype: str) -> bool:
    """Whether torch makes a tensor of such a value."""
    if dtype == "bool":
        return isinstance(value, bool)
    if "int" not in dtype:
        # Others become infinite there, which float32 alone refuses.
        return dtype != "float32" or abs(value) <= _MOST_FLOAT32 or not isfinite(value)
    bits = 8 * STATE_ITEM_BYTES[dtype]
    low, high = (0, 2**bits) if dtype == "uint8" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return isinstance(value, int) and low <= value < high


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def _require(is_so: bool) -> None:
    if not is_so:
        raise ValueError("an entry is none that there is")


_KINDS: Final[tuple[type[Any], ...]] = (PerElement, OneValue, Plain, Uncut, Whole)
_LETTER_NUMBERS: Final = ("e", "o", "p", "u", "w")
_LETTERS: Final = dict(zip(_KINDS, _LETTER_NUMBERS, strict=True))
