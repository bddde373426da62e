"""The catalogue of a network's measured speeds: ``network.json``, which ``psdist probe`` writes.

network = read(Path("network.json"))
network.node_links["n3"].bytes_per_s
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from psdist.topology.text import decoded, file_bytes, shown, strict_json
from psdist.topology.text.models import (
    CLOSED,
    EACH_ONCE,
    FIRST_FAULT,
    TABLE,
    HostName,
    Number,
    String,
    Truth,
    check_format,
    fault,
    fits,
    validated,
)

FORMAT = "psdist network"
VERSION = 1
MAX_BYTES = 10 * 10**6

Kind = Literal["node", "rack", "socket", "core", "gpu"]
"""Between nodes of a rack, nodes of different racks, sockets of a node, cores of a socket, a GPU
and its host."""

# The shortest texts that make objects are limited, so that 10 MB of JSON cannot become 1 GB.
_LIMITS = strict_json.Limits(depth=8, brackets=300_000, commas=1_000_000)
_REMEDY = "give what psdist probe of this version wrote"


def _is_date(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


_Measured: TypeAlias = Annotated[Number, Field(ge=0, le=1e18)]
_Label: TypeAlias = Annotated[
    String, fits(re.compile(r"[ -~]{0,255}").fullmatch, "at most 255 characters of ASCII")
]
_Date: TypeAlias = Annotated[_Label, fits(_is_date, "a date of ISO 8601")]
_Place: TypeAlias = Annotated[
    String,
    fits(
        re.compile(r"[A-Za-z0-9._:/@+,\[\]-]{1,255}").fullmatch,
        "the name of a host, a part of one, or a switch",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Speed of a link or a class of links, one direction; 0 if not measured."""

    __pydantic_config__ = CLOSED

    latency_s: _Measured
    bytes_per_s: _Measured
    is_lower_bound: Truth
    """Something else was full before this was: an uplink may carry more than its nodes send."""


UNMEASURED = Speed(latency_s=0.0, bytes_per_s=0.0, is_lower_bound=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One measurement. Places are host names, or parts of a host: ``n3/package1``."""

    __pydantic_config__ = CLOSED

    first: _Place
    second: _Place
    kind: Kind
    latency_s: _Measured
    bytes_per_s: _Measured


def _each_pair_once(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    keys = Counter((each.first, each.second, each.kind) for each in pairs)
    for (first, second, kind), count in keys.items():
        if count > 1:
            raise fault(f"has {shown(f'{first} -> {second} ({kind})')} twice")
    return pairs


@dataclass(frozen=True, kw_only=True)
class Network:
    """Result of one run of the probe."""

    __pydantic_config__ = CLOSED

    date: _Date
    """ISO 8601, of the measurement."""
    hosts: Annotated[tuple[HostName, ...], FIRST_FAULT, EACH_ONCE]
    mpi: _Label
    """The MPI library's own words."""
    components: Annotated[tuple[_Label, ...], FIRST_FAULT, EACH_ONCE]
    """Components that carried the messages, where the library names them: ``ucx``, ``btl/tcp``."""
    versions: Annotated[dict[_Label, _Label], TABLE]
    """Versions of psdist and of its dependencies."""
    classes: Annotated[dict[Kind, Speed], TABLE]
    """Typical (median) speed of each kind of pair."""
    node_links: Annotated[dict[HostName, Speed], TABLE]
    """By host: all its traffic at once."""
    switch_uplinks: Annotated[dict[_Place, Speed], TABLE]
    """By switch: all traffic that leaves it at once."""
    pairs: Annotated[
        tuple[Pair, ...],
        FIRST_FAULT,
        AfterValidator(_each_pair_once),
    ]


def encode(network: Network) -> bytes:
    """As JSON text, for people to read and :func:`decode` to take back."""
    content = {"format": FORMAT, "version": VERSION, **asdict(network)}
    return (json.dumps(content, indent=1) + "\n").encode()


def read(path: Path) -> Network:
    """The catalogue in a file. Raises PlacementError where it cannot be read or is none."""
    data, where = file_bytes(path, max_bytes=MAX_BYTES)
    return decode(data, where=where)


def decode(data: bytes, *, where: str) -> Network:
    """The network in a catalogue. Raises PlacementError for anything that is not exactly one."""
    text = decoded(data, where=where, max_bytes=MAX_BYTES)
    content = strict_json.parse(text, where=where, made_by="psdist probe", limits=_LIMITS)
    members = check_format(content, FORMAT, VERSION, where=where, remedy=_REMEDY)
    return validated(Network, members, where=where, remedy=_REMEDY)
