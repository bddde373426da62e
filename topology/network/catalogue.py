"""The catalogue of a network's measured speeds: ``network.json``.

Owns its form and the comparison of two of them. ``psdist probe`` measures and writes it, ``psdist
plan`` and :func:`psdist.topology.network.sources.build_cluster` read it; nothing is measured here.

    network = read(Path("network.json"))
    network.node_links["n3"].bytes_per_s
    for line in compare(old, network): print(line)     # n3 -> n4: 11.2 -> 4.1 GB/s (2.7x slower)
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, TypeAdapter

from psdist.topology.text import strict_json
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
from psdist.topology.text.untrusted import decoded, file_bytes, shown

FORMAT = "psdist network"
VERSION = 1
MAX_BYTES = 10 * 10**6

Kind = Literal["node", "rack", "socket", "core", "gpu"]
"""Between nodes of a rack, nodes of different racks, sockets of a node, cores of a socket, a GPU
and its host."""

# Whatever JSON spends least text on: so that 10 MB of it do not become a gigabyte of objects.
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
    """Of a link or a class of links, one direction; 0 where it was not measured."""

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
    """What one run of the probe found."""

    __pydantic_config__ = CLOSED

    date: _Date
    """ISO 8601, of the measurement."""
    hosts: Annotated[tuple[HostName, ...], FIRST_FAULT, EACH_ONCE]
    mpi: _Label
    """The MPI library's own words."""
    components: Annotated[tuple[_Label, ...], FIRST_FAULT, EACH_ONCE]
    """What carried the messages, where the library says: ``ucx``, ``btl/tcp``."""
    versions: Annotated[dict[_Label, _Label], TABLE]
    """Of psdist and of what it stands on."""
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
    return validated(_adapter(), members, where=where, remedy=_REMEDY)


@cache
def _adapter() -> TypeAdapter[Network]:
    return TypeAdapter(Network)


def compare(old: Network, new: Network, *, threshold: float = 0.1) -> list[str]:
    """A line for all that changed by more than ``threshold`` (a share), the worst first.

    Hosts that are new or gone come first. What only one of the two measured is not compared,
    nor a bandwidth of which one gives a lower bound that the other does not contradict.
    """
    lines = []
    for word, these, those in (("new", new, old), ("gone", old, new)):
        known = set(those.hosts)
        lines += [f"{host}: {word}" for host in these.hosts if host not in known]
    changes: list[tuple[float, str]] = []
    before, after = _measured(old), _measured(new)
    for name in before.keys() & after.keys():
        was, now = before[name], after[name]
        faster = now.bytes_per_s > was.bytes_per_s
        if not (was if faster else now).is_lower_bound:  # "at least 4" and 5 may be the same
            changes += _change(
                name, was.bytes_per_s, now.bytes_per_s, threshold, _speed_text, False
            )
        changes += _change(name, was.latency_s, now.latency_s, threshold, _time_text, True)
    return lines + [line for _, line in sorted(changes, key=lambda each: (-each[0], each[1]))]


def _measured(network: Network) -> dict[str, Speed]:
    """All that was measured, by the words for it."""
    found = {f"typical {kind} pair": speed for kind, speed in network.classes.items()}
    found |= {f"link of {host}": speed for host, speed in network.node_links.items()}
    found |= {f"uplink of {name}": speed for name, speed in network.switch_uplinks.items()}
    for pair in network.pairs:
        name = f"{pair.first} -> {pair.second}"
        if pair.kind in ("socket", "core", "gpu"):
            name += f" ({pair.kind})"
        found[name] = replace(UNMEASURED, latency_s=pair.latency_s, bytes_per_s=pair.bytes_per_s)
    return found


def _change(
    name: str,
    was: float,
    now: float,
    threshold: float,
    written: Callable[[float, float], str],
    is_less_better: bool,
) -> Iterable[tuple[float, str]]:
    """(how many times worse, line), or nothing for what is the same or not in both."""
    if not was or not now:
        return
    worse = now / was if is_less_better else was / now
    if max(worse, 1 / worse) <= 1 + threshold:
        return
    word = f"{worse:.2g}x slower" if worse > 1 else f"{1 / worse:.2g}x faster"
    yield worse, f"{name}: {written(was, now)} ({word})"


def _speed_text(was: float, now: float) -> str:
    unit, scale = ("GB/s", 1e9) if max(was, now) >= 1e9 else ("MB/s", 1e6)
    return f"{was / scale:.3g} -> {now / scale:.3g} {unit}"


def _time_text(was: float, now: float) -> str:
    return f"latency {was * 1e6:.3g} -> {now * 1e6:.3g} us"
