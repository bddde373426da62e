"""What a server's file says of optimizer state: of each piece, which keys there are and what is
there; what has elements is in tensors beside it.

    plain = to_json({(0, 3): {"step": OneValue("float32", 0, 7.0), "sum": PerElement("float32")}})
    from_json(plain)                                  # the same, or CheckpointError
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from psdist.checkpoint import plain as plain_values
from psdist.errors import CheckpointError, ProtocolError
from psdist.protocol.optimizer_state import (
    MOST_KEYS,
    STATE_ITEM_BYTES,
    Entry,
    OneValue,
    PerElement,
    Plain,
    is_key,
)


class Whole(NamedTuple):
    """A tensor that belongs to the whole piece, of a shape of its own (Adafactor's rows)."""

    dtype: str
    shape: tuple[int, ...]


StateEntry: TypeAlias = "Entry | Whole"
State: TypeAlias = "Mapping[str, StateEntry]"
"""By the optimizer's own keys, in its order."""

_KINDS: Final[Mapping[str, type[Any]]] = {
    "elements": PerElement,
    "one": OneValue,
    "plain": Plain,
    "whole": Whole,
}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


def to_json(states: Mapping[tuple[int, int], State]) -> dict[str, object]:
    """``states`` by (set, piece). Raises :class:`CheckpointError` for what is
    :class:`psdist.protocol.optimizer_state.Uncut`."""
    found = []
    for (set_index, piece), state in sorted(states.items(), key=lambda each: each[0]):
        items: list[list[object]] = []
        for key, entry in state.items():
            if type(entry) not in _NAMES:
                raise CheckpointError(f"optimizer state {key!r:.80} cannot be kept: {entry}")
            items.append([key, _NAMES[type(entry)], *map(plain_values.pack, entry)])
        found.append([set_index, piece, items])
    return {"states": found}


def from_json(content: object, *, where: str) -> dict[tuple[int, int], dict[str, StateEntry]]:
    """What :func:`to_json` made; raises :class:`CheckpointError` for anything else."""
    try:
        if not isinstance(content, dict) or content.keys() != {"states"}:
            raise ValueError("the states are missing")
        found = {}
        for set_index, piece, items in content["states"]:
            at = _count(set_index), _count(piece)
            if at in found or not 0 < len(items) <= MOST_KEYS:
                raise ValueError("a piece is described twice, or too long")
            found[at] = _state(items)
    except (TypeError, ValueError, CheckpointError, ProtocolError) as error:
        raise CheckpointError(
            f"{where}: damaged: optimizer state that cannot be read: {error!s:.200}"
        ) from None
    return found


def _state(items: Any) -> dict[str, StateEntry]:
    state: dict[str, StateEntry] = {}
    for key, kind, *fields in items:
        if not is_key(key) or key in state or kind not in _KINDS:
            raise ValueError(f"state {key!r:.80} is of no kind that there is")
        entry = _KINDS[kind](*map(plain_values.unpack, fields))
        if not _CHECKS[kind](entry):
            raise ValueError(f"state {key!r:.80} is {entry!r:.80}")
        state[key] = entry
    return state


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is no number of a set or a piece")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def _is_shape(shape: object) -> bool:
    return isinstance(shape, tuple) and all(type(each) is int and each >= 0 for each in shape)


_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "elements": lambda entry: entry.dtype in STATE_ITEM_BYTES,
    "one": lambda entry: (
        entry.dtype in STATE_ITEM_BYTES
        and type(entry.dims) is int
        and 0 <= entry.dims <= 8
        and _is_number(entry.value)
    ),
    "plain": lambda entry: entry.value is None or _is_number(entry.value),
    "whole": lambda entry: entry.dtype in STATE_ITEM_BYTES and _is_shape(entry.shape),
}
