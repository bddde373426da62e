"""The server that keeps the replica of each shard; pure.

Every server keeps exactly one replica, so that replicas take equal memory. The two servers of a
pair are on different hosts if possible, and in different racks, because hosts and racks fail as a
whole. With more than two servers no two keep each other's replicas, unless that brings a pair
closer: acknowledgements would wait after the records of the other direction, in the one stream
between two servers (docs/concepts/replication.md).

    pairs = pair(hosts=["n1", "n1", "n2", "n2"], racks=["", "", "", ""])
    pairs.buddies                         # (3, 2, 0, 1)
    pairs.warning                         # "" unless some pair shares a host
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psdist.errors import ConfigError
from psdist.protocol.ids import is_spare

_SHARDS_OF_A_SERVER = 2
"""Its own shard and one replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    buddies: tuple[int, ...]
    """By server: the server that keeps its replica."""
    warning: str
    """A warning for the user if pairs share a host, else nothing."""


def pair(*, hosts: Sequence[str], racks: Sequence[str]) -> Pairs:
    """Choose the pairs. ``hosts``, ``racks``: by server, "" for an unknown rack. Raises
    :class:`ConfigError` with only one server."""
    count = len(hosts)
    if count < 2:
        raise ConfigError(
            f"failures.replication = buddy needs 2 servers or more, this run has {count}: another "
            "server keeps the replica of a shard; pass --servers 2, or --set "
            "failures.replication=none"
        )
    # Neighbours in this order share racks, then hosts. A shift by the largest of these groups
    # separates every pair.
    order = sorted(range(count), key=lambda server: (racks[server], hosts[server], server))

    def shifted(by: int) -> list[tuple[int, int]]:
        return [(each, order[(at + by) % count]) for at, each in enumerate(order)]

    def apart(by: int) -> tuple[int, int, int]:
        pairs = shifted(by)
        other_host = sum(hosts[one] != hosts[other] for one, other in pairs)
        other_rack = sum(racks[one] != racks[other] for one, other in pairs)
        return other_host, other_rack, -by

    by_server = dict(shifted(max(range(1, count), key=apart)))
    _part_those_of_each_other(by_server, hosts=hosts, racks=racks)
    sharing = sorted(one for one, other in by_server.items() if hosts[one] == hosts[other])
    warning = ""
    if sharing:
        which = "every server" if len(sharing) == count else f"servers {_listed(sharing)}"
        warning = (
            f"failures.replication = buddy: {which} and the replica share a host: if that host "
            "fails, both copies are lost; place servers on more hosts"
        )
    return Pairs(buddies=tuple(by_server[each] for each in range(count)), warning=warning)


def _part_those_of_each_other(
    buddies: dict[int, int], *, hosts: Sequence[str], racks: Sequence[str]
) -> None:
    """Exchange the replicas of two servers that keep each other's with those of a third server, if
    no pair comes closer."""

    def apart(pairs: Mapping[int, int]) -> tuple[int, int]:
        other_host = sum(hosts[one] != hosts[other] for one, other in pairs.items())
        return other_host, sum(racks[one] != racks[other] for one, other in pairs.items())

    for one in buddies:
        if buddies[buddies[one]] != one:
            continue
        for third in sorted(buddies.keys() - {one, buddies[one]}):
            now = {one: buddies[one], third: buddies[third]}
            exchanged = {one: buddies[third], third: buddies[one]}
            if apart(exchanged) >= apart(now):
                buddies.update(exchanged)
                break


def next_keeper(
    host: int,
    others: Sequence[int],
    *,
    hosts: Mapping[int, str],
    racks: Mapping[int, str],
    load: Mapping[int, int],
    saves_spares: bool = False,
) -> int:
    """Return the one of ``others``, ids of servers and spares, that keeps a new replica of a shard
    on ``host``: first one on another host, then in another rack, then a spare with fewer than the
    two shards of a server, then the one with the fewest shards (``load``). ``saves_spares``: prefer
    a spare that has a shard, because the others may become workers."""

    def apart(other: int) -> tuple[bool, bool, bool, bool, int, int]:
        is_elsewhere = hosts[other] != hosts[host], racks[other] != racks[host]
        has_room = is_spare(other) and load[other] < _SHARDS_OF_A_SERVER
        is_saving = saves_spares and has_room and load[other] > 0
        return *is_elsewhere, has_room, is_saving, -load[other], -other

    return max(others, key=apart)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
