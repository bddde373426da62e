"""YAML from outside: what is read, and that its liberties are refused with their line."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import PlacementError
from psdist.topology.text.strict_yaml import MAX_CHARACTERS, Limits, Node, parse

LIMITS = Limits(depth=4, nodes=12)
WIDE = Limits(depth=40, nodes=1000)
TEXTS = st.text(alphabet="abn-:#[]{},&*!|>'\"% \n", max_size=8)
VALUES = st.recursive(
    TEXTS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=12,
)


def read(text: str, limits: Limits = WIDE) -> Node:
    return parse(text, where="file", limits=limits)


def plain(node: Node) -> Any:
    if isinstance(node.content, list):
        return [plain(each) for each in node.content]
    if isinstance(node.content, dict):
        return {key: plain(each) for key, each in node.content.items()}
    return node.content


def count(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    if isinstance(value, dict):
        return 1 + sum(1 + count(each) for each in value.values())
    return 1


def depth(value: Any) -> int:
    """Of lists and mappings with something in them: what is in none may be in one more."""
    inside = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(map(depth, inside)) if isinstance(inside, list) and inside else 0


@given(VALUES, st.booleans())
def test_what_pyyaml_writes_is_read_back_the_same(value: Any, is_flow: bool) -> None:
    text = yaml.safe_dump(value, default_flow_style=is_flow)
    if "*" in text and "&" in text:  # the same empty list twice becomes an alias
        text = yaml.dump(value, Dumper=WithoutAliases, default_flow_style=is_flow)
    assert plain(read(text)) == value


@given(VALUES)
def test_the_limits_are_exact(value: Any) -> None:
    text = yaml.dump(value, Dumper=WithoutAliases)
    exact = Limits(depth=max(1, depth(value) + 1), nodes=count(value))
    assert plain(read(text, exact)) == value
    with pytest.raises(PlacementError, match="give the right file"):
        read(text, Limits(depth=exact.depth, nodes=exact.nodes - 1))
    if exact.depth > 1:
        with pytest.raises(PlacementError, match="give the right file"):
            read(text, Limits(depth=exact.depth - 1, nodes=exact.nodes))


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    said = "file"
    try:
        read(text, LIMITS)
    except PlacementError as error:
        said = str(error)
    assert said.isprintable()
    assert len(said) < 300
    assert said.startswith("file")


class WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, _data: Any) -> bool:
        return True


def test_scalars_stay_the_text_that_was_written_with_their_lines() -> None:
    node = read("---\n# a remark\n- yes\n- 0x10\n- 'a: b'\n- {c: 1e3}\n")
    assert plain(node) == ["yes", "0x10", "a: b", {"c": "1e3"}]
    assert [each.place for each in node.items("it")] == [f"file:{line}" for line in (3, 4, 5, 6)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x 1\nb: *x\n", "file:2: *x is an alias: write out its value"),
        ("a: !!python/object/apply:os.system [ls]\n", "file:1: the tag 'tag:yaml.org,2002:python"),
        ("a: !!int 3\n", "file:1: the tag 'tag:yaml.org,2002:int'"),
        ("a: 1\n---\nb: 2\n", "file:2: a second document begins"),
        ("a: 1\nb: 2\na: 3\n", "file:3: the key 'a' is there twice"),
        ("? [a]\n: 1\n", "file:1: a key is a list, not a text"),
        ("? {a: 1}\n: 1\n", "file:1: a key is a mapping, not a text"),
        ("a: [1, 2\nb: 3\n", "file:2: not YAML ("),
        ("a:\n\tb: 1\n", "file:2: not YAML ("),
        ("a: \x01\n", "file: not YAML ("),
        ("", "file: nothing in it but comments"),
        ("x" * (MAX_CHARACTERS + 1), "file: 4,194,305 characters, more than 4,194,304"),
    ],
)
def test_the_liberties_of_yaml_are_refused_with_their_line(text: str, said: str) -> None:
    with pytest.raises(PlacementError) as caught:
        read(text)
    assert said in str(caught.value)


def test_the_longest_text_is_read() -> None:
    assert len(read("x" * MAX_CHARACTERS).text("it")) == MAX_CHARACTERS


def test_an_empty_document_is_an_empty_text() -> None:
    assert read("# only\n---\n# this\n").content == ""


def test_what_is_not_of_the_wanted_kind_is_named() -> None:
    node = read("a: [1]\nb: text\n")
    members = node.members("the file")
    with pytest.raises(PlacementError, match=r"file:1: it is a list, not a text"):
        members["a"].text("it")
    with pytest.raises(PlacementError, match=r"file:2: it is 'text', not a list"):
        members["b"].items("it")
    with pytest.raises(PlacementError, match=r"file:2: it is 'text', not 'key: value'"):
        members["b"].members("it")
    with pytest.raises(PlacementError, match=r"file:1: it is a mapping, not a text"):
        node.text("it")


def test_a_bomb_of_aliases_ends_at_the_first_of_them() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    with pytest.raises(PlacementError, match=r"file:2: \*a0 is an alias"):
        read("\n".join(lines))
