"""One word per thing: old names and banned words stay where tests/words.json allows them."""

from __future__ import annotations

import pytest

from tests import words
from tests.words import Place, places_in


def test_no_file_has_more_old_names_and_banned_words_than_is_allowed_or_fewer() -> None:
    found, allowed = words.places(), words.allowed()
    today = words.counted(found)
    more = [
        f"{each.path}:{each.line}: {each.word}: write {(words.NAMES | words.WORDS)[each.word]}"
        for each in found
        if today[each.word][each.path] > allowed.get(each.word, {}).get(each.path, 0)
    ]
    assert not more, "\n".join(more)
    fewer = [
        f"{path}: {word}"
        for word, by_file in allowed.items()
        for path, number in by_file.items()
        if today.get(word, {}).get(path, 0) < number
    ]
    assert not fewer, f"fewer places than allowed; run python -m tests.words --ratchet: {fewer}"


def words_in(path: str, text: str) -> list[tuple[int, str]]:
    return [(each.line, each.word) for each in places_in(path, text)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("registrar = 1\n", 1),
        ("x = 1\nhas_second_copy = 1\n", 2),
        ("class EntrustAll: ...\n", 1),
        ('"""A docstring.\n\nThe worker is dead by then."""\n', 3),
        ("x = 1  # the others are alike\n", 1),
        ("raise ValueError(f'all but for worker {x} have come')\n", 1),
    ],
)
def test_a_word_is_found_in_identifiers_comments_and_texts(text: str, line: int) -> None:
    ((at, _),) = words_in("servers/x.py", text)
    assert at == line


@pytest.mark.parametrize(
    "text",
    [
        "dead = {1}\n",  # a key on the wire
        'kind = "death"\n',
        '"""Return ``dead``, besides the others."""\n',
        "# see tests/mpi/deaths, and --max-deaths\n",
        "theirs = 1\n",
    ],
)
def test_code_that_keeps_an_old_key_is_no_prose(text: str) -> None:
    assert words_in("servers/x.py", text) == []


def test_a_page_is_judged_without_its_code_and_links() -> None:
    page = "```\nthe dead\n```\n\n    dies\n\n[spares](deaths.md) and `dead`: nobody dies.\n"
    assert [line for line, _ in words_in("docs/x.md", page)] == [7, 7]


def test_the_ratchet_refuses_a_word_that_has_more_places() -> None:
    before = {"anew": {"a.py": 1}}
    assert words.grown({"anew": {"b.py": 1}}, before) == []
    assert words.grown({"anew": {"a.py": 1, "b.py": 1}}, before) == ["anew"]
    found = [Place("anew", "a.py", 3), Place("anew", "a.py", 5)]
    assert words.counted(found) == {"anew": {"a.py": 2}}
