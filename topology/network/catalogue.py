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
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from psdist.errors import PlacementError
from psdist.topology.text import strict_json
from psdist.topology.text.untrusted import HOST_NAME, decoded, file_bytes, shown

FORMAT = "psdist network"
VERSION = 1
MAX_BYTES = 10 * 10**6

Kind = Literal["node", "rack", "socket", "core", "gpu"]
"""Between nodes of a rack, nodes of different racks, sockets of a node, cores of a socket, a GPU
and its host."""

_KINDS: tuple[Kind, ...] = get_args(Kind)
# Whatever JSON spends least text on: so that 10 MB of it do not become a gigabyte of objects.
_LIMITS = strict_json.Limits(depth=8, brackets=300_000, commas=1_000_000)
_MAX_NUMBER = 1e18
_PLACE = re.compile(r"[A-Za-z0-9._:/@+,\[\]-]{1,255}")
_LABEL = re.compile(r"[ -~]{0,255}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Of a link or a class of links, one direction; 0 where it was not measured."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    is_lower_bound: bool = False
    """Something else was full before this was: an uplink may carry more than its nodes send."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One measurement. Places are host names, or parts of a host: ``n3/package1``."""

    first: str
    second: str
    kind: Kind
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Network:
    """What one run of the probe found."""

    date: str
    """ISO 8601, of the measurement."""
    hosts: tuple[str, ...]
    mpi: str
    """The MPI library's own words."""
    components: tuple[str, ...] = ()
    """What carried the messages, where the library says: ``ucx``, ``btl/tcp``."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of psdist and of what it stands on."""
    classes: dict[Kind, Speed] = field(default_factory=dict)
    """Typical (median) speed of each kind of pair."""
    node_links: dict[str, Speed] = field(default_factory=dict)
    """By host: all its traffic at once."""
    switch_uplinks: dict[str, Speed] = field(default_factory=dict)
    """By switch: all traffic that leaves it at once."""
    pairs: tuple[Pair, ...] = ()


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
    reader = _Reader(where)
    top = reader.mapping(content, "the file")
    form, version = top.get("format"), top.get("version")
    if (form, version) != (FORMAT, VERSION):  # first, so that another program's file is called that
        raise PlacementError(
            f"{where}: format {shown(form)}, version {shown(version)}: this psdist reads "
            f"{FORMAT!r}, version {VERSION}: give what psdist probe of this version wrote"
        )
    reader.table(top, "the file", ("format", "version", *Network.__dataclass_fields__))
    pairs = tuple(
        reader.pair(each, f"pairs[{index}]")
        for index, each in enumerate(reader.rows(top["pairs"], "pairs"))
    )
    if len({_key(pair) for pair in pairs}) < len(pairs):
        raise PlacementError(f"{where}: a pair is in pairs twice: give what psdist probe wrote")
    classes = reader.speeds(top["classes"], "classes", lambda name: name in _KINDS)
    return Network(
        date=reader.date(top["date"]),
        hosts=reader.texts(top["hosts"], "hosts", HOST_NAME),
        mpi=reader.text(top["mpi"], "mpi", _LABEL),
        components=reader.texts(top["components"], "components", _LABEL),
        versions={
            reader.text(name, "versions", _LABEL): reader.text(value, f"versions.{name}", _LABEL)
            for name, value in reader.mapping(top["versions"], "versions").items()
        },
        classes={kind: classes[kind] for kind in _KINDS if kind in classes},
        node_links=reader.speeds(top["node_links"], "node_links", HOST_NAME.fullmatch),
        switch_uplinks=reader.speeds(top["switch_uplinks"], "switch_uplinks", _PLACE.fullmatch),
        pairs=pairs,
    )


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
        found[name] = Speed(latency_s=pair.latency_s, bytes_per_s=pair.bytes_per_s)
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


def _key(pair: Pair) -> tuple[str, str, str]:
    return pair.first, pair.second, pair.kind


class _Reader:
    """Checked values out of parsed JSON; every complaint names the place in the file."""

    def __init__(self, where: str) -> None:
        self._where = where

    def wrong(self, place: str, value: object) -> PlacementError:
        return PlacementError(
            f"{self._where}: {place}: {shown(value)} does not belong there: give what psdist probe "
            "of this version wrote"
        )

    def mapping(self, value: object, place: str) -> dict[str, object]:
        if not isinstance(value, dict):
            raise self.wrong(place, value)
        return value

    def table(self, value: object, place: str, keys: tuple[str, ...]) -> dict[str, object]:
        table = self.mapping(value, place)
        for key in table:
            if key not in keys:
                raise self.wrong(place, key)
        for key in keys:
            if key not in table:
                raise PlacementError(f"{self._where}: {place}: {key} is missing: run psdist probe")
        return table

    def rows(self, value: object, place: str) -> list[object]:
        if not isinstance(value, list):
            raise self.wrong(place, value)
        return value

    def text(self, value: object, place: str, pattern: re.Pattern[str]) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self.wrong(place, value)
        return value

    def texts(self, value: object, place: str, pattern: re.Pattern[str]) -> tuple[str, ...]:
        found = tuple(self.text(each, place, pattern) for each in self.rows(value, place))
        if len(set(found)) < len(found):
            raise PlacementError(f"{self._where}: {place}: a name is there twice: leave one")
        return found

    def number(self, value: object, place: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(place, value)
        if not 0 <= value <= _MAX_NUMBER:  # nor is infinity (1e999), nor NaN
            raise self.wrong(place, value)
        return float(value)

    def date(self, value: object) -> str:
        text = self.text(value, "date", _LABEL)
        try:
            datetime.fromisoformat(text)
        except ValueError:
            raise self.wrong("date", value) from None
        return text

    def speed(self, value: object, place: str) -> Speed:
        table = self.table(value, place, tuple(Speed.__dataclass_fields__))
        is_lower_bound = table["is_lower_bound"]
        if not isinstance(is_lower_bound, bool):
            raise self.wrong(f"{place}.is_lower_bound", is_lower_bound)
        return Speed(
            latency_s=self.number(table["latency_s"], f"{place}.latency_s"),
            bytes_per_s=self.number(table["bytes_per_s"], f"{place}.bytes_per_s"),
            is_lower_bound=is_lower_bound,
        )

    def speeds(
        self, value: object, place: str, is_name: Callable[[str], object]
    ) -> dict[str, Speed]:
        found = {}
        for name, each in self.mapping(value, place).items():
            if not is_name(name):
                raise self.wrong(place, name)
            found[name] = self.speed(each, f"{place}.{name}")
        return found

    def pair(self, value: object, place: str) -> Pair:
        table = self.table(value, place, tuple(Pair.__dataclass_fields__))
        kind = next((kind for kind in _KINDS if kind == table["kind"]), None)
        if kind is None:
            raise self.wrong(f"{place}.kind", table["kind"])
        return Pair(
            first=self.text(table["first"], f"{place}.first", _PLACE),
            second=self.text(table["second"], f"{place}.second", _PLACE),
            kind=kind,
            latency_s=self.number(table["latency_s"], f"{place}.latency_s"),
            bytes_per_s=self.number(table["bytes_per_s"], f"{place}.bytes_per_s"),
        )
