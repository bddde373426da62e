"""Count old names and banned words in the product, its pages and README.md.

Reads files and imports nothing of psdist.

    python -m tests.words                # words, today's number and files
    python -m tests.words --parts        # and every place
    python -m tests.words --ratchet      # write today's numbers to tests/words.json

tests/words.json has the places that are allowed: word -> file -> number. Names on the wire and in
files keep their old words for compatibility; every other entry is a place to mend.
tests/unit/test_words.py fails if a file has more places than that, or fewer: then run --ratchet.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

REPOSITORY: Final = Path(__file__).resolve().parents[1]
ALLOWED: Final = Path(__file__).with_name("words.json")
PRODUCT: Final = ("psdist", "servers", "workers", "topology")
LEFT_OUT: Final = ("CHANGELOG.md", "docs/dev/decisions.md")
"""Pages about the past, which name what is gone."""
MOST_WORDS_OF_A_NAME: Final = 3
"""A string of more words is prose."""

NAMES: Final = {
    "registrar": "coordinator",
    "deput(?:y|ies)": "standby",
    "succession": "failover",
    "second[ _]cop(?:y|ies)": "replica",
    "ShardPicture|FillRecord|FilledRecord": "ShardState, SnapshotBegin, SnapshotEnd",
    "[Bb]ury|[Bb]uried": "evict",
    "HeardUpTo|ReceivedUpTo": "StandbyAck, Ack",
    "[Ee]ntrust(?:s|ed|ing|All)?": "install (a snapshot)",
    "[Aa]ppoint(?:s|ed|ing)?": "nominate",
    "contained_offers": "duplicate_offers",
    "num_brought|land_late|end_dropped|miss_until": "last_pushed, wait_pending_pulls, "
    "abort_iteration, skip_to",
    "Standing": "GroupState, MemberState, ProgressReports",
    "[Rr]eform(?:s|ed|ing)?": "shrink (`on_group_death = reform` stays)",
    "fidelity": "tuning state",
    "heirs?": "successor",
}
"""Old name, a regular expression of a whole word or part of an identifier -> the new name."""

WORDS: Final = {
    "[Dd]ead|[Dd]eaths?|[Dd]ie[sd]?|[Dd]ying": "failed, failure",
    "[Gg]enerations?": "job epoch (transport), view number (membership)",
    "inherits?|inherited|inheriting": "contain, take over",
    "go on|goes on|going on|went on|gone on": "continue, resume",
    "in place of": "instead of",
    "in vain": "without success",
    "anew": "again",
    "alike": "the same",
    "beside": "next to, besides, together with",
    "but for": "except",
    "(?:by|but) so many|so many (?:of|as|that)": "at most N, exactly N",
    "behind (?:an?|the|that|this|it|them|each|every|which|one|any|its|what)": "after",
    "nobody|everybody|somebody|anybody|whoever|whomever": "the component",
    "(?:ranks?|servers?|workers?|coordinator|standby) (?:has |have )?"
    "(?:hears?|heard|says?|said|knows?|speaks?|tells?|told|lives?)": "receives, sends, stores",
}
"""Word of prose -> the field's word."""


class Place(NamedTuple):
    word: str
    path: str
    line: int


def _compiled(words: dict[str, str], start: str, end: str) -> dict[str, re.Pattern[str]]:
    return {word: re.compile(f"{start}(?:{word}){end}") for word in words}


# An old name may be a part of snake_case or CamelCase, as in EntrustAll or has_second_copy.
_NAMES: Final = _compiled(NAMES, r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))", r"(?![a-z])")
_WORDS: Final = _compiled(WORDS, r"(?<![\w./-])", r"(?![\w/-])")
_QUOTED: Final = re.compile(r"``[^`]*``|`[^`]*`|\]\([^)]*\)|--?[a-z][\w-]*")
_BLOCK: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page without code."""
    plain = _QUOTED.sub(_blank, _BLOCK.sub(_blank, text))
    for number, line in enumerate(plain.splitlines(), start=1):
        if not line.startswith("    "):
            yield number, line


def prose_of_module(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of comments, docstrings and texts of a module, without code in them."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], _QUOTED.sub(_blank, token.string)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if len(node.value.split()) > MOST_WORDS_OF_A_NAME:
            plain = _QUOTED.sub(_blank, node.value)
            yield from enumerate(plain.splitlines(), start=node.lineno)


def places_in(path: str, text: str) -> Iterator[Place]:
    """Yield each old name and banned word of a file. Pages may quote settings and keys as code."""
    if path.endswith(".py"):
        lines, prose = list(enumerate(text.splitlines(), start=1)), list(prose_of_module(text))
    else:
        lines = prose = list(prose_of_page(text))
    for patterns, found_in in ((_NAMES, lines), (_WORDS, prose)):
        for number, line in found_in:
            for word, pattern in patterns.items():
                yield from (Place(word, path, number) for _ in pattern.findall(line))


def files() -> Iterator[Path]:
    for part in PRODUCT:
        yield from sorted((REPOSITORY / part).rglob("*.py"))
    yield REPOSITORY / "README.md"
    yield from sorted((REPOSITORY / "docs").rglob("*.md"))


def places() -> list[Place]:
    """Return every place of the repository, each file once."""
    found: list[Place] = []
    seen: set[Path] = set()
    for file in files():
        path = file.resolve().relative_to(REPOSITORY).as_posix()
        if path in LEFT_OUT or file.resolve() in seen:
            continue
        seen.add(file.resolve())
        found += places_in(path, file.read_text(encoding="utf-8"))
    return found


def counted(found: list[Place]) -> dict[str, dict[str, int]]:
    """Return word -> file -> number."""
    table: dict[str, dict[str, int]] = {}
    for (word, path), number in sorted(Counter((each.word, each.path) for each in found).items()):
        table.setdefault(word, {})[path] = number
    return table


def allowed() -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = json.loads(ALLOWED.read_text(encoding="utf-8"))
    return table


def grown(today: dict[str, dict[str, int]], before: dict[str, dict[str, int]]) -> list[str]:
    """Return the words that have more places than before."""
    return [
        word
        for word, in_files in today.items()
        if sum(in_files.values()) > sum(before.get(word, {}).values())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.words", description=__doc__)
    parser.add_argument("--parts", action="store_true", help="print every place")
    parser.add_argument("--ratchet", action="store_true", help=f"write {ALLOWED.name}")
    given = parser.parse_args()
    found = places()
    today = counted(found)
    if given.ratchet:
        if worse := grown(today, allowed()):
            sys.exit(f"more places than {ALLOWED.name} allows: {', '.join(worse)}; see --parts")
        ALLOWED.write_text(json.dumps(today, indent=1) + "\n", encoding="utf-8")
    for word, new in (NAMES | WORDS).items():
        in_files = today.get(word, {})
        print(f"{sum(in_files.values()):5} in {len(in_files):3} files  {word} -> {new}")
        for each in found if given.parts else ():
            if each.word == word:
                print(f"      {each.path}:{each.line}")


if __name__ == "__main__":
    main()
