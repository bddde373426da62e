"""JSON from outside, with limits and without JSON's liberties. What it means is its reader's.

content = parse(text, where="plan.json", made_by="psdist plan", limits=Limits(depth=8, ...))
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Final, NoReturn

from psdist.errors import PlacementError
from psdist.topology.text.untrusted import shown

# Whatever is no bracket, strings whole (a bracket in one is none), then a bracket or the end.
_BRACKET: Final = re.compile(r'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+"?)*+([\[\]{}]|\Z)', re.DOTALL)


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
    depth = 0
    for num_brackets, found in enumerate(_BRACKET.finditer(text), start=1):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1, "": 0}[found[1]]
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
