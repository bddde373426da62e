"""Read untrusted JSON, with limits and without JSON's liberties. The reader interprets it.

content = parse(text, where="plan.json", made_by="psdist plan", limits=Limits(depth=8, ...))
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Final, NoReturn

from psdist.errors import PlacementError
from psdist.topology.text import shown

_ESCAPE: Final = re.compile(r"\\.", re.DOTALL)
# In a text without escapes: a string, whole (a bracket in one is none), or a bracket. It never
# goes back: the closing quote may be missing.
_STRING_OR_BRACKET: Final = re.compile(r'"[^"]*"?|[\[\]{}]')
_NESTING: Final = {"[": 1, "{": 1, "]": -1, "}": -1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    depth: int
    """Lists and objects in each other."""
    brackets: int
    """Opening and closing ones together."""
    commas: int


def parse(text: str, *, where: str, made_by: str, limits: Limits) -> object:
    """The content: no key twice, no NaN or infinity. Raises PlacementError in one line.

    The limits are looked at before anything is built: one pass over ``text``, no recursion.
    """
    remedy = f"give the file that {made_by} wrote"
    depth = num_brackets = 0
    # An escape outside of a string is no JSON: whether that is found out here does not matter.
    for found in _STRING_OR_BRACKET.finditer(_ESCAPE.sub("", text)):
        nesting = _NESTING.get(found[0], 0)
        depth += nesting
        num_brackets += abs(nesting)
        if depth > limits.depth or num_brackets > limits.brackets:
            raise PlacementError(
                f"{where}: lists and objects more than {limits.depth} deep, or more than "
                f"{limits.brackets:,} brackets: {remedy}"
            )
    if text.count(",") > limits.commas:
        raise PlacementError(f"{where}: more than {limits.commas:,} values: {remedy}")
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise PlacementError(f"{where}:{error.lineno}: no JSON ({error.msg}): {remedy}") from None
    except _Refused as error:
        raise PlacementError(f"{where}: {error}: {remedy}") from None
    except ValueError:  # Python's own limit on the digits of a whole number
        raise PlacementError(f"{where}: a number of thousands of digits: {remedy}") from None


class _Refused(ValueError):
    pass


def _refuse(word: str) -> NoReturn:
    raise _Refused(f"{word} is no number here")


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _Refused(f"the key {shown(twice)} is there twice")
    return members
