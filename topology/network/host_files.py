"""The hosts of an allocation, as a batch system or a launcher writes them: names, in order, slots.

    found = read(Path("hostfile"))
    found.names, found.slots             # ("n1", "n2"), {"n1": 8, "n2": 8}

Formats are told apart by content: Open MPI and Kubernetes' MPI operator (``n1 slots=8``), Open
MPI's rankfile, MPICH and Intel MPI (``n1:8``), PBS, Torque and Slurm (``n1``, once for each slot),
Flux's R (JSON) and ``flux resource list``. A host that is named again gets more slots; its first
place counts. Flux has no slots: the number is 0. Lines for Open MPI are read as the parser of its
mpirun 5 reads them (PRRTE's hostfile_lex.l).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from pydantic import ConfigDict, Field

from psdist.errors import PlacementError
from psdist.topology.network.tree import MAX_NODES, too_many
from psdist.topology.text import (
    HOST_NAME,
    decoded,
    file_bytes,
    hostlist,
    numbered_lines,
    shown,
    strict_json,
)
from psdist.topology.text.models import FIRST_FAULT, String, Whole, validated

MAX_BYTES: Final = 8 << 20
MAX_SLOTS: Final = 65_536
"""Maximum slots of a host."""

_COUNTED: Final = re.compile(
    rf"(?P<user>[A-Za-z0-9_][A-Za-z0-9._-]{{0,63}}@)?(?P<host>{HOST_NAME.pattern})"
    r"(?::(?P<slots>[0-9]{1,9}))?"
)
_KEY: Final = re.compile(r"([A-Za-z_-]{1,32})=(\S{1,200})")
_RANK: Final = re.compile(r"rank\s+[0-9]{1,9}=(?P<entry>\S+)(?:\s+slots?=\S+)?")
_COMMENT: Final = re.compile(r"(?:#|//)[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_IPV6: Final = re.compile(r"(?:[^@]*@)?[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}")
_SLOTS_KEYS: Final = frozenset(("slots", "cpu", "count"))
# Open MPI takes the maximum for the number where that is missing.
_MAX_KEYS: Final = frozenset(
    form.format(key, dash)
    for key in _SLOTS_KEYS
    for dash in "_-"
    for form in ("max{1}{0}", "{0}{1}max")
)
_LOGIN_KEYS: Final = frozenset(("user", "username", "user-name", "user_name", "port"))
# Options that say nothing about places.
_OTHER_KEYS: Final = frozenset(("binding", "ifname"))
_NUMBERS: Final = _SLOTS_KEYS | _MAX_KEYS
_KEYS: Final = _NUMBERS | _LOGIN_KEYS | _OTHER_KEYS
_COUNT: Final = re.compile(r"[0-9]{1,9}")
_TABLE: Final = re.compile(r"\s*STATE\s.*\bNODELIST\s*")
_IDS: Final = re.compile(r"[0-9]{1,9}(?:-[0-9]{1,9})?(?:,[0-9]{1,9}(?:-[0-9]{1,9})?)*")
_LIMITS: Final = strict_json.Limits(depth=24, brackets=300_000, commas=1_000_000)
_REMEDY: Final = "give what `flux job info ID R` or `flux R encode` wrote"
_MAX_NOTED: Final = 200
_UNUSABLE: Final = ("down", "drain", "exclude", "offline")


@dataclass(frozen=True, kw_only=True)
class HostFile:
    """Hosts in the order of the file, each once."""

    names: tuple[str, ...]
    slots: dict[str, int]
    """By host; 0: the file does not say."""
    source: str
    notes: tuple[str, ...] = ()


def read(path: Path) -> HostFile:
    """The hosts in a file, of whichever format. PlacementError where there are none."""
    data, where = file_bytes(path, max_bytes=MAX_BYTES)
    return parse(data, where=where)


def parse(data: bytes, *, where: str) -> HostFile:
    """The hosts in a text. Raises PlacementError, with the line, for what is no such list."""
    text = decoded(data, where=where, max_bytes=MAX_BYTES)
    for _, line in _significant(text):
        if line.startswith("{"):
            return _flux_resources(text, where)
        return _flux_table(text, where) if _TABLE.fullmatch(line) else _lines(text, where)
    raise PlacementError(f"{where}: nothing in it but comments: give the right file")


def begins_one(line: str) -> bool:
    """True if a text whose first line is ``line`` may be a list of hosts."""
    words = _words(line)
    if line.lstrip().startswith("{") or _TABLE.fullmatch(line):
        return True
    return bool(
        words and _COUNTED.fullmatch(words[0]) and all(_KEY.fullmatch(word) for word in words[1:])
    )


def _words(line: str) -> list[str]:
    """Return the words of a line; ``key = value`` is one word."""
    line = "=".join(part.strip() for part in line.split("="))
    if match := _RANK.fullmatch(line):
        return [match["entry"]]
    return line.split()


def _significant(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) without comments and blanks at the ends, of the lines that have anything."""
    for number, raw in numbered_lines(text):
        if line := raw.split("#", 1)[0].strip():
            yield number, line


def _lines(text: str, where: str) -> HostFile:
    # As many line ends as before: messages name lines by their numbers.
    text = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    slots: dict[str, int] = {}
    has_logins = False
    for number, line in _significant(text):
        place = f"{where}:{number}"
        host, count, has_login = _entry(line, place)
        has_logins |= has_login
        if host not in slots and len(slots) >= MAX_NODES:
            raise too_many(place, MAX_NODES, "hosts")
        slots[host] = slots.get(host, 0) + count
        if not 1 <= slots[host] <= MAX_SLOTS:
            raise PlacementError(
                f"{place}: {host} has {slots[host]:,} slots: give it 1 to {MAX_SLOTS:,}, or leave "
                "it out"
            )
    if not slots:
        raise PlacementError(f"{where}: nothing in it but comments: give the right file")
    notes: tuple[str, ...] = ()
    if has_logins:
        notes = (
            f"{where}: user names and ports are not kept in the files of --emit: put them into "
            "~/.ssh/config",
        )
    return HostFile(names=tuple(slots), slots=slots, source=where, notes=notes)


def _entry(line: str, place: str) -> tuple[str, int, bool]:
    """(host, slots, whether a login is given) of a line."""
    first, *words = _words(line)
    match = _COUNTED.fullmatch(first)
    if match is None and _IPV6.fullmatch(first):
        raise PlacementError(
            f"{place}: {shown(first)} is an IPv6 address: write the name of the host, or its IPv4 "
            "address"
        )
    if match is None:
        raise PlacementError(
            f"{place}: {shown(first)} is not a host: expected lines like 'n1 slots=8', 'n1:8' or "
            "'n1'"
        )
    host, count, most = match["host"], match["slots"], None
    has_login = match["user"] is not None
    for word in words:
        pair = _KEY.fullmatch(word)
        key = "" if pair is None else pair[1].lower()
        if pair is None or key not in _KEYS:
            raise PlacementError(
                f"{place}: {shown(word)} is not known here: expected slots=N after the host"
            )
        has_login |= key in _LOGIN_KEYS
        if key not in _NUMBERS:
            continue
        if not _COUNT.fullmatch(pair[2]):
            raise PlacementError(
                f"{place}: {key}={shown(pair[2])} is not a whole number: write {key}=8"
            )
        if key in _MAX_KEYS:
            most = pair[2]
            continue
        if count is not None:
            raise PlacementError(f"{place}: {host} has two numbers of slots: leave one")
        count = pair[2]
    return host, int(count or most or 1), has_login


# --- Flux

_Extra: Final = ConfigDict(extra="ignore")
_IdSet: TypeAlias = Annotated[String, Field(max_length=1 << 20)]


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    __pydantic_config__ = _Extra

    rank: _IdSet


@dataclass(frozen=True, kw_only=True)
class _Execution:
    __pydantic_config__ = _Extra

    R_lite: Annotated[tuple[_Ranks, ...], FIRST_FAULT]  # as RFC 20 spells it
    nodelist: Annotated[tuple[String, ...], FIRST_FAULT]


@dataclass(frozen=True, kw_only=True)
class _Resources:
    __pydantic_config__ = _Extra

    version: Whole
    execution: _Execution


def _flux_resources(text: str, where: str) -> HostFile:
    """R, version 1 (RFC 20): nodelist names the hosts of R_lite's ranks, in ascending order."""
    content = strict_json.parse(text, where=where, made_by="Flux", limits=_LIMITS)
    found = validated(_Resources, content, where=where, remedy=_REMEDY)
    if found.version != 1:
        raise PlacementError(
            f"{where}: version {shown(found.version)} of Flux's R: this psdist reads version 1"
        )
    names: list[str] = []
    for words in found.execution.nodelist:
        names += hostlist.expand(
            words, max_hosts=MAX_NODES - len(names), where=f"{where}: execution.nodelist"
        )
    ranks = 0
    for number, each in enumerate(found.execution.R_lite):
        ranks += _num_ids(each.rank, f"{where}: execution.R_lite[{number}].rank")
    if ranks != len(names):
        raise PlacementError(
            f"{where}: R_lite has {ranks:,} ranks and nodelist {len(names):,} hosts, not one for "
            f"each: {_REMEDY}"
        )
    return _unique(names, where, notes=())


def _num_ids(text: str, where: str) -> int:
    if not _IDS.fullmatch(text):
        raise PlacementError(f"{where}: {shown(text)} is no set of ranks like 0-3,7: {_REMEDY}")
    total = 0
    for word in text.split(","):
        first, _, last = word.partition("-")
        total += int(last or first) - int(first) + 1
        if int(last or first) < int(first) or total > MAX_NODES:
            raise PlacementError(
                f"{where}: {shown(word)} goes down, or there are more than {MAX_NODES:,}: {_REMEDY}"
            )
    return total


def _flux_table(text: str, where: str) -> HostFile:
    """``flux resource list``: a line for each state; NODELIST is its last word."""
    names: list[str] = []
    left_out: list[str] = []
    after = 0  # columns behind NNODES, NODELIST among them
    for number, line in _significant(text):
        words, place = line.split(), f"{where}:{number}"
        if not after:
            if "NNODES" not in words:
                raise PlacementError(f"{place}: no column NNODES: give `flux resource list`")
            after = len(words) - 1 - words.index("NNODES")
            continue
        if words[-after:][0] == "0" and all(map(str.isdecimal, words[-after:])):
            continue  # no node in this state, and so no list
        room = MAX_NODES - len(names) - len(left_out)
        found = hostlist.expand(words[-1], max_hosts=room, where=place)
        if words[:-after][-1:] != [str(len(found))]:
            raise PlacementError(
                f"{place}: NNODES does not count the hosts of NODELIST {shown(words[-1])}: give "
                "the whole output of `flux resource list`"
            )
        is_unusable = words[0].lower().startswith(_UNUSABLE)
        (left_out if is_unusable else names).extend(found)
    notes: tuple[str, ...] = ()
    if left_out:
        without = hostlist.compress(sorted(left_out, key=hostlist.natural_key))
        notes = (f"{where}: without {without[:_MAX_NOTED]}, which are down or drained",)
    return _unique(sorted(names, key=hostlist.natural_key), where, notes=notes)


def _unique(names: list[str], where: str, *, notes: tuple[str, ...]) -> HostFile:
    if not names:
        raise PlacementError(f"{where}: no host in it: give the right file")
    slots = dict.fromkeys(names, 0)
    return HostFile(names=tuple(slots), slots=slots, source=where, notes=notes)
