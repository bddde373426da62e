"""Plain values as JSON and back, exactly: types, tuples, keys that are no text, infinities.

    kept = pack({"best": math.inf, 3: (1, 2.5)})   # JSON
    unpack(kept) == {"best": math.inf, 3: (1, 2.5)}

A list is a JSON array; a type without a JSON form is an object of one member, whose key names the
type. All other values go to ``other``; psdist.checkpoint.tree has one for tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Final

from psdist.errors import CheckpointError, UsageError

MOST_DEPTH: Final = 64
_MOST_BITS: Final = 8192
"""Maximum bits of a whole number: JSON's reader takes 4,300 digits."""
_MAPS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_MAP_TYPES: Final = {name: kind for kind, name in _MAPS.items()}
_FLOATS: Final = ("inf", "-inf", "nan")


def refuse(value: Any, path: str) -> object:
    raise UsageError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint keeps "
        "dicts, lists, tuples, sets, text, bytes, numbers, True, False, None, tensors and numpy "
        "arrays; convert it, or leave it out"
    )


def pack(
    value: Any, *, path: str = "the value", other: Callable[[Any, str], object] = refuse
) -> object:
    """``value`` as JSON. Raises :class:`UsageError` that names the place of what cannot be kept."""
    return _pack(value, path, other, 0)


def _pack(value: Any, path: str, other: Callable[[Any, str], object], depth: int) -> object:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _checked_text(value, path)
    if kind is int:
        if value.bit_length() > _MOST_BITS:
            raise UsageError(f"{path} is a number of {value.bit_length()} bits: too large to keep")
        return value
    if kind is float:
        return value if isfinite(value) else {"float": repr(value)}
    if depth == MOST_DEPTH:
        raise UsageError(f"{path:.80} ... lies more than {MOST_DEPTH} levels deep, or holds itself")
    if kind in (list, tuple):
        items = [
            _pack(item, f"{path}[{index}]", other, depth + 1) for index, item in enumerate(value)
        ]
        return items if kind is list else {"tuple": items}
    if kind is set:
        return {"set": [_pack(item, f"an item of {path}", other, depth + 1) for item in value]}
    if kind in _MAPS:
        pairs = [
            [
                _pack(key, f"a key of {path}", other, depth + 1),
                _pack(item, f"{path}[{key!r:.80}]", other, depth + 1),
            ]
            for key, item in value.items()
        ]
        return {_MAPS[kind]: pairs}
    return other(value, path)


def _checked_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{path} is text with a lone surrogate, which no file keeps") from None
    return text


def _no_other(what: str, _content: object) -> Any:
    raise CheckpointError(f"{what!r:.80} is no kind of value")


def unpack(kept: object, *, other: Callable[[str, object], Any] = _no_other) -> Any:
    """Return the value that :func:`pack` was given. Raises :class:`CheckpointError` for other
    JSON."""
    try:
        return _unpack(kept, other, 0)
    except (TypeError, ValueError) as error:  # a key that cannot be one, a pair of three
        raise CheckpointError(f"values that cannot be read: {error!s:.200}") from None


def _unpack(kept: object, other: Callable[[str, object], Any], depth: int) -> Any:
    if kept is None or isinstance(kept, bool | int | float | str):
        return kept
    if depth > MOST_DEPTH:
        raise CheckpointError(f"values that are more than {MOST_DEPTH} levels deep")
    if isinstance(kept, list):
        return [_unpack(item, other, depth + 1) for item in kept]
    if not isinstance(kept, Mapping) or len(kept) != 1:
        raise CheckpointError("an object that does not have one member")
    ((kind, content),) = kept.items()
    if kind == "float":
        if content not in _FLOATS:
            raise CheckpointError(f"{content!r:.80} is no number")
        return float(str(content))
    if kind in ("tuple", "set", *_MAP_TYPES):
        if not isinstance(content, list):
            raise CheckpointError(f"a {kind} that is no list")
        if kind in ("tuple", "set"):
            items = [_unpack(item, other, depth + 1) for item in content]
            return tuple(items) if kind == "tuple" else set(items)
        pairs = [
            (_unpack(key, other, depth + 1), _unpack(item, other, depth + 1))
            for key, item in content
        ]
        found = dict(pairs)
        if len(found) != len(pairs):
            raise CheckpointError(f"a {kind} with a key that is there twice")
        return _MAP_TYPES[kind](found)
    return other(str(kind), content)
