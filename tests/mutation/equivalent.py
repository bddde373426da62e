"""The list of mutants that change nothing, kept by hand in ``equivalent.toml``, with reasons.

Owns reading it. An entry names its mutant by what somebody reads, not by a line number, so that
it survives edits elsewhere; one that no longer names a mutant is an error.

    [[mutant]]
    file = "servers/protocol/chunks/frontier.py"
    function = "Frontier.search"
    operator = "bound"
    line = "self._at = clocks.index(self._clock)"
    change = "..."
    ordinal = 0                     # left out for the first of several that are alike
    reason = "..."
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from tests.mutation.mutants import Key, Mutant

FIELDS = {"file", "function", "operator", "line", "change", "reason"}


class BadList(Exception):
    """An entry is malformed or names nothing; the text says which."""


def read(path: Path, mutants: Iterable[Mutant]) -> dict[Key, str]:
    """Mutant's key -> why it changes nothing. Raises :class:`BadList`."""
    known = {mutant.key for mutant in mutants}
    reasons: dict[Key, str] = {}
    entries = tomllib.loads(path.read_text("utf-8")).get("mutant", []) if path.exists() else []
    for number, entry in enumerate(entries, 1):
        missing = FIELDS - entry.keys()
        if missing or entry.keys() - FIELDS - {"ordinal"}:
            raise BadList(f"{path.name}: entry {number} has the keys {sorted(entry)}")
        key = (
            *(entry["file"], entry["function"], entry["operator"]),
            *(entry["line"], entry["change"], entry.get("ordinal", 0)),
        )
        where = f"{entry['file']}, {entry['function']}: {entry['change']} in {entry['line']!r}"
        if key not in known:
            raise BadList(
                f"{path.name}: entry {number} names no mutant any more ({where}): the code has "
                "changed; remove the entry, or mend it where the same mutant is still equivalent"
            )
        if key in reasons:
            raise BadList(f"{path.name}: entry {number} is there twice ({where})")
        if not entry["reason"].strip():
            raise BadList(f"{path.name}: entry {number} gives no reason ({where})")
        reasons[key] = entry["reason"]
    return reasons
