"""The hosts and the tree of switches that joins them, with the speed of each link.

    cluster = one_rack(["n1", "n2"], machine)
    cluster.nodes[0].switch             # index into cluster.switches
    cluster.path(0)                     # switches from node 0 up to the root

Here are the types that planning and drawing read. ``sources`` makes a cluster out of machines and a
``tree``, which ``slurm``, ``topology_yaml``, ``infiniband`` (with ``fabric``) or ``rack_table``
read from files and environment; without one, :func:`one_rack` is used. ``host_files`` are hosts
and slots without racks. ``catalogue`` is network.json, the speeds that psdist probe measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from psdist.topology.machine import Machine

ONE_FLAT_RACK = "one flat rack"
"""Source of a cluster with unknown racks."""
DEFAULT_LINK_BYTES_PER_S = 12e9
"""Speed of an unknown network link in one direction (the figure of NCCL's own table)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A switch, or a set of switches that acts as one (all rails of a rack)."""

    name: str
    parent: int
    """Index of the switch above; -1 for the root. There is exactly one root."""
    bytes_per_s: float
    """Sum of its uplinks' bandwidths, one direction; no meaning at the root."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A host: its machine (what of it the job may use), and the link that joins it to a switch."""

    name: str
    machine: Machine
    switch: int
    bytes_per_s: float
    """Sum of its network cards' bandwidths, one direction."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes in the order in which launchers count them; ``switches[0]`` is the root."""

    nodes: tuple[Node, ...]
    switches: tuple[Switch, ...]
    source: str
    """Where the tree comes from, for people: ``topology.conf``, ``one flat rack`` ..."""
    notes: tuple[str, ...] = ()
    is_exact: bool = True
    """False where the network is no tree: no bound for this one holds for that."""

    @property
    def has_racks(self) -> bool:
        """True if a source named the switch of each host."""
        return self.source != ONE_FLAT_RACK

    def path(self, node: int) -> tuple[int, ...]:
        """The switches above a node, from its own to the root."""
        found: list[int] = []
        switch = self.nodes[node].switch
        while switch >= 0:
            found.append(switch)
            switch = self.switches[switch].parent
        return tuple(found)

    def with_links(
        self,
        *,
        node_bytes_per_s: Mapping[str, float] = MappingProxyType({}),
        switch_bytes_per_s: Mapping[str, float] = MappingProxyType({}),
    ) -> Cluster:
        """Return the same cluster with other link speeds, by name."""
        nodes = (
            replace(each, bytes_per_s=node_bytes_per_s.get(each.name, each.bytes_per_s))
            for each in self.nodes
        )
        switches = (
            replace(each, bytes_per_s=switch_bytes_per_s.get(each.name, each.bytes_per_s))
            for each in self.switches
        )
        return replace(self, nodes=tuple(nodes), switches=tuple(switches))


def one_rack(
    names: Sequence[str],
    machines: Machine | Mapping[str, Machine],
    *,
    bytes_per_s: float = DEFAULT_LINK_BYTES_PER_S,
    note: str = "",
) -> Cluster:
    """All nodes under one switch: what is assumed where no source tells of racks."""
    return Cluster(
        nodes=tuple(
            Node(
                name=name,
                machine=machines if isinstance(machines, Machine) else machines[name],
                switch=0,
                bytes_per_s=bytes_per_s,
            )
            for name in names
        ),
        switches=(Switch(name="switch", parent=-1, bytes_per_s=bytes_per_s),),
        source=ONE_FLAT_RACK,
        notes=(note,) if note else (),
    )
