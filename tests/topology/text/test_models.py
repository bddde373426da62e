"""Types with limits, and the one line of a refusal: where, what is there, what belongs there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import PlacementError
from psdist.topology.text.models import (
    CLOSED,
    EACH_ONCE,
    FIRST_FAULT,
    MAX_TABLE,
    TABLE,
    Amount,
    HostName,
    Text,
    Truth,
    Whole,
    check_format,
    validated,
)


@dataclass(frozen=True, kw_only=True)
class Item:
    __pydantic_config__ = CLOSED

    name: Text
    amount: Amount = 0.0


@dataclass(frozen=True, kw_only=True)
class Content:
    __pydantic_config__ = CLOSED

    host: HostName
    count: Whole
    is_open: Truth
    items: Annotated[tuple[Item, ...], FIRST_FAULT]
    names: Annotated[tuple[Text, ...], EACH_ONCE]
    table: Annotated[dict[HostName, Amount], TABLE]


GOOD: dict[str, Any] = {
    "host": "n1",
    "count": 3,
    "is_open": False,
    "items": [{"name": "a", "amount": 1}],
    "names": ["a", "b"],
    "table": {"n1": 0.5},
}


def read(content: object) -> Content:
    return validated(Content, content, where="file.json", remedy="correct it")


def test_what_fits_becomes_the_type() -> None:
    assert read(GOOD) == Content(
        host="n1",
        count=3,
        is_open=False,
        items=(Item(name="a", amount=1.0),),
        names=("a", "b"),
        table={"n1": 0.5},
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": "3"}, "count is '3', not a whole number"),
        ({"count": True}, "count is True, not a whole number"),
        ({"count": 3.0}, "count is 3.0, not a whole number"),
        ({"is_open": 0}, "is_open is 0, not true or false"),
        ({"host": "-o"}, "host is '-o', not letters, digits"),
        ({"host": None}, "host is None, not text"),
        ({"items": {}}, "items is a dict, not a list"),
        ({"items": [[]]}, "items[0] is a list, not an object"),
        ({"items": [{"name": "a"}, {}]}, "items[1] has no key 'name'"),
        ({"items": [{"name": "a\nb"}]}, r"items[0].name is 'a\nb', not at most 2000 characters"),
        ({"items": [{"name": "a", "amount": -1}]}, "items[0].amount is -1, not greater than or"),
        ({"items": [{"name": "a", "amount": 1e999}]}, "items[0].amount is inf, not a finite"),
        (
            {"items": [{"name": "a", "amount": 10**400}]},
            "items[0].amount is a number of 1329 bits, not a number that a float holds",
        ),
        ({"names": ["a", "b", "a"]}, "names has 'a' twice"),
        ({"table": {"a b": 1}}, "a key of table is 'a b', not letters, digits"),
        ({"table": {"n.1": "x"}}, "table['n.1'] is 'x', not a number"),
        ({"more\n": 1}, r"the content has the unknown key 'more\n'"),
    ],
)
def test_the_first_fault_is_said_with_its_place_and_what_belongs_there(
    change: dict[str, object], words: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        read(GOOD | change)
    message = str(caught.value)
    assert message.startswith(f"file.json: {words}")
    assert message.endswith(": correct it")
    assert message.isprintable()


def test_of_a_long_list_one_fault_is_told_and_a_table_has_a_limit() -> None:
    with pytest.raises(PlacementError, match=r"items\[0\] is None, not an object"):
        read(GOOD | {"items": [None] * 1_000_000})
    table = dict.fromkeys(map(str, range(MAX_TABLE + 1)), None)
    with pytest.raises(PlacementError, match="table has 65,537 keys, more than 65,536"):
        read(GOOD | {"table": table})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*GOOD, "a\nb"]), VALUES) | VALUES)
def test_whatever_comes_is_taken_or_refused_in_one_short_line(content: object) -> None:
    merged = {**GOOD, **content} if isinstance(content, dict) else content
    line = ""
    try:
        read(merged)
    except PlacementError as error:
        line = str(error)
    assert line.isprintable()
    assert len(line) < 400


def test_another_programs_file_is_called_that_before_its_members_are_looked_at() -> None:
    def check(content: object) -> dict[str, object]:
        return check_format(content, "psdist x", 2, where="f", remedy="make it again")

    assert check({"format": "psdist x", "version": 2, "a": 1}) == {"a": 1}
    with pytest.raises(PlacementError, match=r"^f: this is a list, not an object: make it again$"):
        check([])
    with pytest.raises(
        PlacementError, match=r"^f: format 'psdist y', version None: this psdist reads 'psdist x'"
    ):
        check({"format": "psdist y"})
