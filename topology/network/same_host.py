"""Which names mean the same host: ``n1`` and ``n1.example.org``, or two cards with one GUID. Pure.

by_name(["n1.example.org"], ["n1", "n2"])         # {"n1.example.org": "n1"}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from psdist.errors import PlacementError
from psdist.topology.network.tree import TreeNode
from psdist.topology.text import shown


def is_same_host(one: str, other: str) -> bool:
    """Whether two names may be those of one host: equal, or equal where one is written short."""
    if "." in one and "." in other:
        return one == other
    return one.partition(".")[0] == other.partition(".")[0]


def matched(
    names: Sequence[str], nodes: Sequence[TreeNode], guids: Mapping[int, str]
) -> dict[str, TreeNode]:
    """Host to node: by the same name, else the short one where only one fits, else by GUID."""
    listed = {node.name: node for node in nodes}
    found: dict[str, TreeNode] = {}
    owners: dict[str, str] = {}
    wanted = set(names)
    by_guid = {
        guids[guid]: node.name for node in nodes for guid in node.port_guids if guid in guids
    }
    for name, other in {**by_guid, **by_name(names, listed)}.items():
        if name not in wanted:
            continue
        if other in owners:
            raise PlacementError(
                f"hosts {shown(owners[other])} and {shown(name)} are both {shown(other)} in the "
                "tree of switches: write the names there in full"
            )
        owners[other] = name
        found[name] = listed[other]
    return found


def by_name(names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """For each name the one of ``others`` that means the same host.

    Two full names are never the same host because of their first part.
    """
    exact = set(others)
    by_short: dict[str, list[str]] = {}
    for other in exact:
        by_short.setdefault(_short(other), []).append(other)
    found = {}
    for name in names:
        fits = [
            other
            for other in by_short.get(_short(name), [])
            if other == name or "." not in name or "." not in other
        ]
        if name in exact:
            found[name] = name
        elif len(fits) == 1:
            found[name] = fits[0]
    return found


def _short(name: str) -> str:
    """``n1`` of ``n1.example.org``; an IP address has no short name."""
    first = name.partition(".")[0]
    return name if first.isdecimal() else first
