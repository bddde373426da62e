"""JSON from outside: what counts as a bracket, and that hostile text takes linear time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import PlacementError
from psdist.topology.text.strict_json import Limits, parse

LIMITS = Limits(depth=3, brackets=12, commas=20)

VALUES = st.recursive(
    st.one_of(st.integers(), st.text(alphabet='[]{}"\\,a\n', max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(alphabet='[{"\\', max_size=3), inner, max_size=3),
    ),
    max_leaves=12,
)


def read(text: str, limits: Limits = LIMITS) -> object:
    return parse(text, where="file", made_by="psdist", limits=limits)


def depth(value: object) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def brackets(value: object) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 2 + sum(map(brackets, value)) if isinstance(value, list) else 0


@given(VALUES, st.booleans())
def test_brackets_in_strings_are_none_and_all_others_count(value: object, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    exact = Limits(depth=depth(value), brackets=brackets(value), commas=len(text))
    assert read(text, exact) == value
    for wrong in (
        Limits(depth=exact.depth - 1, brackets=exact.brackets, commas=exact.commas),
        Limits(depth=exact.depth, brackets=exact.brackets - 1, commas=exact.commas),
    ):
        if exact.depth:
            with pytest.raises(PlacementError, match="lists and objects more than"):
                read(text, wrong)


@pytest.mark.parametrize(
    "text",
    [
        '"\\\\",[[[[1]]]]',  # the string ends behind two backslashes
        '"a[", [[[[',
        "[[[[",
        '{"a":' * 4,
        '["\\"[", [[[1]]]]',
    ],
)
def test_brackets_outside_of_strings_are_counted_before_anything_is_built(text: str) -> None:
    with pytest.raises(PlacementError, match="lists and objects more than 3 deep"):
        read(text)


@given(st.text(alphabet='[]{}"\\,:a1 \n', max_size=30))
def test_any_text_is_what_python_reads_or_one_line_of_complaint(text: str) -> None:
    complaint = ""
    content: object = None
    try:
        content = read(text)
    except PlacementError as error:
        complaint = str(error)
    assert complaint.isprintable()
    assert complaint or content == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        '"' + '\\"' * 500_000,
        '"' * 1_000_000,
        "\\" * 1_000_000,
        '["' + '\\"a"' * 300_000,
        "[" + '"a' * 400_000,
    ],
    ids=["escaped quotes", "quotes", "backslashes", "escapes and quotes", "unclosed strings"],
)
def test_a_megabyte_of_quotes_is_refused_at_once(text: str) -> None:
    with pytest.raises(PlacementError):  # in quadratic time pytest's limit ends it
        read(text)
