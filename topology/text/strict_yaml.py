"""Read untrusted YAML, with limits and without YAML's liberties. The reader interprets it.

    found = parse(text, where="topology.yaml", limits=Limits(depth=8, nodes=100_000))
    for item in found.items("the file"): ...

A tag that would make an object is refused, and so are an alias (a few lines of them become
gigabytes), a second document, a key that is no text or is there twice. Every scalar stays the text
that was written, with its line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from psdist.errors import PlacementError
from psdist.topology.text import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_CHARACTERS: Final = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    depth: int
    """Lists and mappings in each other."""
    nodes: int
    """Scalars, lists and mappings together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A text, a list or a mapping, and where it begins."""

    content: str | list[Node] | dict[str, Node]
    where: str
    line: int

    @property
    def place(self) -> str:
        """``topology.yaml:3``, for messages."""
        return f"{self.where}:{self.line}"

    def text(self, what: str) -> str:
        """The text that this is; PlacementError where it is none."""
        if not isinstance(self.content, str):
            raise PlacementError(f"{self.place}: {what} is {self._words()}, not a text: correct it")
        return self.content

    def items(self, what: str) -> list[Node]:
        """The list that this is; PlacementError where it is none."""
        if not isinstance(self.content, list):
            raise PlacementError(
                f"{self.place}: {what} is {self._words()}, not a list: write each item after '- '"
            )
        return self.content

    def members(self, what: str) -> Mapping[str, Node]:
        """The mapping that this is; PlacementError where it is none."""
        if not isinstance(self.content, dict):
            raise PlacementError(
                f"{self.place}: {what} is {self._words()}, not 'key: value' lines: correct it"
            )
        return self.content

    def _words(self) -> str:
        if isinstance(self.content, str):
            return shown(self.content)
        return "a list" if isinstance(self.content, list) else "a mapping"


def parse(text: str, *, where: str, limits: Limits) -> Node:
    """The one document in ``text``. Raises PlacementError, with the line, for what is none.

    The limits are checked on PyYAML's events, before anything is built.
    """
    if len(text) > MAX_CHARACTERS:
        raise PlacementError(
            f"{where}: {len(text):,} characters, more than {MAX_CHARACTERS:,}: write host lists "
            "with ranges, n[1-16]"
        )
    import yaml  # needed by few: not when the program starts

    # libyaml's parser is twenty times as fast; a PyYAML that was built without it has its own.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check(yaml.parse(text, Loader=loader), where, limits)
        root = yaml.compose(text, Loader=loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = where if mark is None else f"{where}:{mark.line + 1}"
        reason = " ".join(str(getattr(error, "problem", None) or error).split())[:120]
        raise PlacementError(f"{place}: not YAML ({reason}): correct it") from None
    if root is None:
        raise PlacementError(f"{where}: nothing in it but comments: give the right file")
    return _node(root, where)


def _check(events: Iterator[Any], where: str, limits: Limits) -> None:
    """Raise PlacementError for more than the limits allow, and for YAML's liberties."""
    count = depth = num_documents = 0
    for event in events:
        kind = type(event).__name__
        place = f"{where}:{event.start_mark.line + 1}"
        num_documents += kind == "DocumentStartEvent"
        if num_documents > 1:
            raise PlacementError(f"{place}: a second document begins: leave one in the file")
        if kind == "AliasEvent":
            raise PlacementError(f"{place}: *{event.anchor[:40]} is an alias: write out its value")
        depth -= kind in ("SequenceEndEvent", "MappingEndEvent")
        if kind not in ("ScalarEvent", "SequenceStartEvent", "MappingStartEvent"):
            continue
        count += 1
        if count > limits.nodes or depth >= limits.depth:
            raise PlacementError(
                f"{place}: more than {limits.nodes:,} values, or more than {limits.depth} lists "
                "and mappings in each other: give the right file"
            )
        if event.tag not in (None, "!"):
            raise PlacementError(f"{place}: the tag {shown(event.tag)}: leave it out")
        depth += kind != "ScalarEvent"


def _node(found: Any, where: str) -> Node:
    """Return what PyYAML has composed; no deeper than the limits."""
    content: str | list[Node] | dict[str, Node]
    if isinstance(found.value, str):
        content = found.value
    elif found.id == "sequence":
        content = [_node(each, where) for each in found.value]
    else:
        content = {}
        for key, value in found.value:
            node = _node(key, where)
            name = node.text("a key")
            if name in content:
                raise PlacementError(f"{node.place}: the key {shown(name)} is there twice")
            content[name] = _node(value, where)
    return Node(content=content, where=where, line=found.start_mark.line + 1)
