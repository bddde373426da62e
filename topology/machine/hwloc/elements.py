"""lstopo's XML as a checked tree: expat in, elements with typed attributes out, within limits.

    document = read_document(data, where="node.xml")
    document.version, document.root.kind, document.root.children[0].mask

Has the format's syntax (hwloc 1, 2 and 3) and the defence against hostile input: entities and
internal DTD subsets are refused, and bytes, elements, depth, attributes and text are capped. The
caps are far above any real machine (4,096 PUs make about 12 MB) and keep a hostile file below
200 MB of memory and 2 seconds. Never recurses on the depth of its input.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final
from xml.parsers import expat

from psdist.errors import PlacementError
from psdist.topology.machine import UNKNOWN
from psdist.topology.text import bitmap, shown

MAX_BYTES: Final = 16 << 20
MAX_ELEMENTS: Final = 250_000
MAX_OBJECTS: Final = 50_000
MAX_DEPTH: Final = 256
MAX_ATTRIBUTES: Final = 64
MAX_GROUPS: Final = 8_000_000
"""Groups of 32 PUs in all bitmaps together."""
MAX_TEXT: Final = 4 << 20
"""Characters of all distance matrices together."""

_BLOCK_BYTES: Final = 128 << 10
"""Every tag is shorter; a tag of twice the length contains a whole block."""
_MAX_VALUE: Final = 256
_DIGITS: Final = re.compile(r"[0-9]{1,20}")
# All others (firmware, sizes, dates) are dropped while reading.
_INFOS: Final = re.compile(
    r"HostName|Type|CoreType|LinuxCapacity|DAXDevice"
    r"|NVIDIAUUID|AMDUUID|LevelZeroUUID|Port[0-9]{1,2}GID0"
)
_OLD_KINDS: Final = {"Socket": "Package", "System": "Machine"}
_NO_INDEX: Final = 4294967295

IO_KINDS: Final = frozenset({"Bridge", "PCIDev", "OSDev"})


@dataclass(kw_only=True, slots=True)
class Element:
    """One ``object``: its kind in hwloc 2's words, its numbers, its place in the tree."""

    kind: str
    os_index: int = UNKNOWN
    gp_index: str = ""
    mask: int | None = None
    """cpuset; None where there is none, as for devices."""
    complete_mask: int | None = None
    nodes: int | None = None
    """nodeset, likewise."""
    subtype: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    """The few that only some kinds have, as text."""
    parent: Element | None = None
    children: list[Element] = field(default_factory=list)
    infos: dict[str, str] = field(default_factory=dict)

    def add(self, child: Element) -> Element:
        child.parent = self
        self.children.append(child)
        return child

    def __str__(self) -> str:
        number = "" if self.os_index == UNKNOWN else f" {self.os_index}"
        return f"{self.kind[:20]}{number}"


@dataclass(kw_only=True, slots=True)
class Distances:
    """A matrix between objects, row by row; indexes name objects by gp_index."""

    name: str
    indexes: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class CpuKind:
    mask: int
    efficiency: int = UNKNOWN
    infos: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Document:
    root: Element = field(init=False)
    version: int = 1
    allowed: int | None = None
    """PUs allowed to the exporting process, and those online; None where the file has neither."""
    allowed_nodes: int | None = None
    infos: dict[str, str] = field(default_factory=dict)
    """HostName and the like, from the machine (hwloc 1, 2) or from the top level (3)."""
    distances: list[Distances] = field(default_factory=list)
    kinds: list[CpuKind] = field(default_factory=list)
    bandwidths: dict[str, int] = field(default_factory=dict)
    """Bandwidth of memory in MB/s, by the gp_index of its node."""
    knows_drivers: bool = False
    """True if network functions without names have no driver."""


def read_document(data: bytes | str, *, where: str) -> Document:
    """The checked tree. Raises PlacementError, one line, for whatever is not lstopo's XML."""
    if isinstance(data, str):
        data = data.encode("utf-8", "replace")  # lone surrogates are no text of any file
    _check_size(data, where)
    reader = _Reader(where)
    try:
        # In one call: fed in pieces, expat before 2.6 reads a long token again for each piece.
        reader.parser.Parse(data, True)
    except expat.ExpatError as error:
        reason = expat.ErrorString(error.code)
        raise PlacementError(
            f"{where}:{error.lineno}: not XML ({reason}); give the output of lstopo --of xml"
        ) from None
    if not reader.num_objects:
        raise PlacementError(f"{where}: no machine in it; give the output of lstopo --of xml")
    document = reader.document
    document.infos = {**document.infos, **document.root.infos}
    return document


def _check_size(data: bytes, where: str) -> None:
    """Check sizes before expat reads the data: it holds a whole tag in memory, many times over.

    No tag has a "<" inside, and in UTF-8 no other character has that byte.
    """
    what = ""
    if len(data) > MAX_BYTES:
        what = f"more than {MAX_BYTES:,} bytes"
    elif data.count(b",") > MAX_GROUPS:
        what = f"bitmaps with more than {MAX_GROUPS:,} groups"
    elif any(
        data.find(b"<", start, start + _BLOCK_BYTES) < 0
        for start in range(0, len(data) - _BLOCK_BYTES, _BLOCK_BYTES)
    ):
        what = f"a tag of more than {_BLOCK_BYTES:,} bytes"
    if what:
        raise PlacementError(
            f"{where}: {what}; that is no machine's topology, give the output of lstopo --of xml"
        )


class _Reader:
    """expat's handlers. ``open`` holds what is open: an Element, another record, or a bare name."""

    def __init__(self, where: str) -> None:
        self.where = where
        # Always UTF-8, whatever the file declares: lstopo writes it, and the checks above need it.
        self.parser = expat.ParserCreate("utf-8")
        self.parser.StartElementHandler = self.start
        self.parser.EndElementHandler = self.end
        self.parser.CharacterDataHandler = self.characters
        self.parser.StartDoctypeDeclHandler = self.doctype
        self.parser.EntityDeclHandler = self.refuse_entity
        self.parser.ExternalEntityRefHandler = self.refuse_entity
        self.parser.buffer_text = True
        self.open: list[Element | Distances | CpuKind | str] = []
        self.text: list[str] | None = None
        self.text_size = 0
        self.num_elements = 0
        self.num_objects = 0
        self.document = Document()
        self.reads_bandwidth = False

    def fail(self, what: str) -> PlacementError:
        return PlacementError(
            f"{self.where}:{self.parser.CurrentLineNumber}: {what}; give the output of "
            "lstopo --of xml"
        )

    def refuse_entity(self, *_: object) -> int:
        raise self.fail("it declares or uses an XML entity, which lstopo never does")

    def doctype(
        self, _name: str, _system: str | None, _public: str | None, has_internal_subset: bool
    ) -> None:
        # Default attributes in an internal subset multiply like entities do.
        if has_internal_subset:
            raise self.fail("its DOCTYPE declares something, which lstopo's never does")

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self.num_elements += 1
        if self.num_elements > MAX_ELEMENTS:
            raise self.fail(f"more than {MAX_ELEMENTS:,} elements")
        if len(self.open) >= MAX_DEPTH:
            raise self.fail(f"elements nested more than {MAX_DEPTH} deep")
        if len(attributes) > MAX_ATTRIBUTES:
            raise self.fail(f"an element with {len(attributes):,} attributes")
        if not self.open:
            self.open.append(self.topology(name, attributes))
            return
        parent = self.open[-1]
        at_top = len(self.open) == 1
        if name == "object":
            self.open.append(self.add_object(attributes, parent))
            return
        if name == "info":
            self.info(attributes, parent)
        elif name in ("distances2", "distances2hetero") and at_top:
            self.open.append(Distances(name=attributes.get("name", "")))
            return
        elif name in ("indexes", "u64values") and isinstance(parent, Distances):
            self.text = parent.indexes if name == "indexes" else parent.values
        elif name == "cpukind" and at_top:
            kind = CpuKind(
                mask=self.bits(attributes, "cpuset") or 0,
                efficiency=self.number(attributes, "forced_efficiency"),
            )
            self.document.kinds.append(kind)
            self.open.append(kind)
            return
        elif name == "memattr" and at_top:
            self.reads_bandwidth = attributes.get("name") == "Bandwidth"
        elif name == "memattr_value" and self.reads_bandwidth and parent == "memattr":
            self.bandwidth(attributes)
        self.open.append(name[:_MAX_VALUE])

    def end(self, _name: str) -> None:
        self.text = None
        done = self.open.pop()
        if isinstance(done, Distances) and done.name in ("NVLinkBandwidth", "XGMIBandwidth"):
            self.document.distances.append(done)

    def characters(self, data: str) -> None:
        if self.text is None:
            return
        self.text_size += len(data)
        if self.text_size > MAX_TEXT:
            raise self.fail(f"more than {MAX_TEXT:,} characters of distances")
        self.text.append(data)

    def topology(self, name: str, attributes: dict[str, str]) -> str:
        if name != "topology":
            raise self.fail(f"its first element is {shown(name)}, not topology")
        version = attributes.get("version", "1")
        major = version.partition(".")[0]
        if major not in ("1", "2", "3"):
            raise self.fail(f"topology version {shown(version)} is none of 1, 2 and 3")
        self.document.version = int(major)
        return name

    def add_object(self, attributes: dict[str, str], parent: object) -> Element:
        self.num_objects += 1
        if self.num_objects > MAX_OBJECTS:
            raise self.fail(f"more than {MAX_OBJECTS:,} objects")
        above = parent if isinstance(parent, Element) else None
        if above is None and (self.num_objects > 1 or len(self.open) != 1):
            raise self.fail("an object outside of the one machine")
        mask = self.bits(attributes, "cpuset")
        # Mostly the same text, and the longest of all attributes.
        is_complete = attributes.get("complete_cpuset") == attributes.get("cpuset")
        element = Element(
            kind=self.kind(attributes),
            os_index=self.number(attributes, "os_index"),
            gp_index=attributes.get("gp_index", "")[:20],
            mask=mask,
            complete_mask=mask if is_complete else self.bits(attributes, "complete_cpuset"),
            nodes=self.bits(attributes, "nodeset"),
            subtype=attributes.get("subtype", "")[:_MAX_VALUE],
            attributes={
                key: value[:_MAX_VALUE]
                for key in ("name", "pci_busid", "pci_type", "pci_link_speed", "osdev_type")
                if (value := attributes.get(key)) is not None
            },
        )
        if "local_memory" in attributes:
            element.attributes["local_memory"] = str(self.number(attributes, "local_memory"))
        if above is not None:
            return above.add(element)
        if element.kind != "Machine":
            raise self.fail(f"its outermost object is {shown(element.kind)}, not a Machine")
        self.document.root = element
        for key in ("allowed_cpuset", "online_cpuset"):  # hwloc 1 has both
            bits = self.bits(attributes, key)
            if bits is not None:
                self.document.allowed = (
                    bits if self.document.allowed is None else self.document.allowed & bits
                )
        self.document.allowed_nodes = self.bits(attributes, "allowed_nodeset")
        return element

    def kind(self, attributes: dict[str, str]) -> str:
        text = attributes.get("type")
        if text is None:
            raise self.fail("an object without a type")
        if text == "Group" and attributes.get("subtype") == "Die":
            return "Die"
        if text == "Cache":  # hwloc 1: the level is an attribute
            instruction = "i" if attributes.get("cache_type") == "2" else ""
            return f"L{self.number(attributes, 'depth')}{instruction}Cache"
        return _OLD_KINDS.get(text, text[:_MAX_VALUE])

    def number(self, attributes: dict[str, str], key: str) -> int:
        text = attributes.get(key)
        if text is None or text == "-1":
            return UNKNOWN
        if not _DIGITS.fullmatch(text) or int(text) >= 1 << 64:
            raise self.fail(f"{key} {shown(text)} is not a number")
        number = int(text)
        return UNKNOWN if key == "os_index" and number == _NO_INDEX else number

    def bits(self, attributes: dict[str, str], key: str) -> int | None:
        text = attributes.get(key)
        if text is None:
            return None
        try:
            return bitmap.parse_mask(text)
        except PlacementError as error:
            raise self.fail(f"{key}: {error}") from None

    def info(self, attributes: dict[str, str], parent: object) -> None:
        name, value = attributes.get("name", ""), attributes.get("value", "")
        if len(name) > _MAX_VALUE or len(value) > _MAX_VALUE or not _INFOS.fullmatch(name):
            return
        if isinstance(parent, Element | CpuKind):
            parent.infos[name] = value
            if (
                isinstance(parent, Element)
                and name == "Type"
                and value == "Die"
                and parent.kind == "Group"
            ):
                parent.kind = "Die"  # hwloc 1
        elif len(self.open) == 1:
            self.document.infos[name] = value

    def bandwidth(self, attributes: dict[str, str]) -> None:
        if attributes.get("target_obj_type") != "NUMANode":
            return
        target = attributes.get("target_obj_gp_index", "")[:20]
        value = self.number(attributes, "value")
        self.document.bandwidths[target] = max(value, self.document.bandwidths.get(target, 0))


def in_order(elements: list[Element]) -> list[Element]:
    """Siblings as hwloc counts them: by the first PU, or the first that could be there.

    hwloc sorts again what an XML has in another order (hwloc__reorder_children), by
    complete_cpuset. Those without PUs come last.
    """
    return sorted(elements, key=_first_pu)


def _first_pu(element: Element) -> int:
    mask = element.complete_mask or element.mask
    return (mask & -mask).bit_length() if mask else bitmap.MAX_CPUS + 1
