"""Which server keeps the second copy of whose shard; pure.

Every server is the buddy of exactly one other, so that copies take equal memory. Where they can,
the two are in different racks, else on different hosts: what fails together is a host or a rack.
With more than two servers no two are each other's buddies, where that costs nothing of this: the
word that a record is held would wait behind the records of the other direction, in the one stream
between the two (docs/replication.md).

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
"""Its own, and the copy of another one's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    buddies: tuple[int, ...]
    """By server."""
    warning: str
    """What the user should know; nothing where no pair shares a host."""


def pair(*, hosts: Sequence[str], racks: Sequence[str]) -> Pairs:
    """``hosts``, ``racks``: of each server; "" for a rack that is not known. Raises
    :class:`ConfigError` where there is only one server."""
    count = len(hosts)
    if count < 2:
        raise ConfigError(
            f"replication = buddy needs 2 servers or more, this run has {count}: a server's second "
            "copy is kept by another server; pass --servers 2, or --set failures.replication=none"
        )
    # Neighbours in this order share racks, then hosts: a shift by as many as share most parts all.
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
            f"replication = buddy: {which} and the buddy share a host: what is lost with that host "
            "is lost with both copies; with servers on more hosts they would not"
        )
    return Pairs(buddies=tuple(by_server[each] for each in range(count)), warning=warning)


def _part_those_of_each_other(
    buddies: dict[int, int], *, hosts: Sequence[str], racks: Sequence[str]
) -> None:
    """Two that are each other's buddies become parts of a longer ring, by an exchange with a third
    one, where no pair comes closer by that."""

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
    """Which of ``others``, ids of servers and spares, is to keep another copy of a shard that
    ``host`` has: one on another host, in another rack, then a spare that has fewer than the two
    shards of a server, then one that has the fewest (``load``). ``saves_spares``: of spares rather
    one that has something; the others may become workers."""

    def apart(other: int) -> tuple[bool, bool, bool, bool, int, int]:
        is_elsewhere = hosts[other] != hosts[host], racks[other] != racks[host]
        has_room = is_spare(other) and load[other] < _SHARDS_OF_A_SERVER
        is_saving = saves_spares and has_room and load[other] > 0
        return *is_elsewhere, has_room, is_saving, -load[other], -other

    return max(others, key=apart)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
