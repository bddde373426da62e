"""Entries of a server's file other than tensors: the keys of each piece's optimizer state and its
single values (states per element are tensors); and, from the server that decides it, the number of
rounds that groups have missed (backup groups).

    plain = to_json({(0, 3): {"step": OneValue("float32", 0, 7.0), "sum": PerElement("float32")}})
    from_json(plain, where="it")                      # the same, or CheckpointError
    misses_from_json(plain, where="it")               # {}: no such entry
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from psdist.checkpoint import plain as plain_values
from psdist.errors import CheckpointError
from psdist.protocol.checkpoints import Misses
from psdist.protocol.optimizer_state import (
    OneValue,
    PerElement,
    PieceState,
    Plain,
    Whole,
    checked_state,
)

_MISSES: Final = "misses"
_KINDS: Final[Mapping[str, type[Any]]] = {
    "elements": PerElement,
    "one": OneValue,
    "plain": Plain,
    "whole": Whole,
}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


def to_json(
    states: Mapping[tuple[int, int], PieceState],
    misses: Mapping[int, Misses] = MappingProxyType({}),
) -> dict[str, object]:
    """``states`` by (set, piece), ``misses`` by set. Raises :class:`CheckpointError` for what is
    :class:`psdist.protocol.optimizer_state.Uncut`."""
    found = []
    for (set_index, piece), state in sorted(states.items(), key=lambda each: each[0]):
        items: list[list[object]] = []
        for key, entry in state.items():
            if type(entry) not in _NAMES:
                raise CheckpointError(f"optimizer state {key!r:.80} cannot be kept: {entry}")
            items.append([key, _NAMES[type(entry)], *map(plain_values.pack, entry)])
        found.append([set_index, piece, items])
    told = [[index, [*each.running], [*each.in_all]] for index, each in sorted(misses.items())]
    return {"states": found, **({_MISSES: told} if told else {})}


def from_json(content: object, *, where: str) -> dict[tuple[int, int], PieceState]:
    """The states that :func:`to_json` was given; raises :class:`CheckpointError` for anything
    else."""
    try:
        if not isinstance(content, dict) or content.keys() - {_MISSES} != {"states"}:
            raise ValueError("the states are missing")
        found = {}
        for set_index, piece, items in content["states"]:
            at = _count(set_index), _count(piece)
            if at in found:
                raise ValueError("a piece is described twice")
            found[at] = checked_state(
                (key, _KINDS[kind], [*map(plain_values.unpack, fields)])
                for key, kind, *fields in items
            )
    except (TypeError, ValueError, KeyError, CheckpointError) as error:
        raise CheckpointError(
            f"{where}: damaged: optimizer state that cannot be read: {error!s:.200}"
        ) from None
    return found


def misses_from_json(content: object, *, where: str) -> dict[int, Misses]:
    """By set the misses that :func:`to_json` was given; raises :class:`CheckpointError` for
    anything else."""
    try:
        told = content.get(_MISSES, []) if isinstance(content, dict) else []
        found = {_count(index): _misses(running, in_all) for index, running, in_all in told}
        if len(found) != len(told):
            raise ValueError("a set twice")
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: damaged: missed rounds that cannot be read: {error!s:.200}"
        ) from None
    return found


def _misses(running: Any, in_all: Any) -> Misses:
    pairs = list(zip(map(_count, running), map(_count, in_all), strict=True))
    if not all(since <= whole for since, whole in pairs):
        raise ValueError(f"{running!r:.80} of {in_all!r:.80} rounds")
    return Misses(running=tuple(running), in_all=tuple(in_all))


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is no number of a set, a piece or rounds")
    return value
