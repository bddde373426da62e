"""Links from measured pairs, and how they are shown.

    network = catalogue(results, steps, hosts=hosts, racks=racks, gpus=copies, mpi=library)
    Console().print(table(network))

A node's link is the fastest that any of its pairs reached while all pairs of its rack exchanged. A
rack's uplink is the sum over its nodes while all of them exchange with other racks; where the
nodes' own links carry no more, it is a lower bound. With two racks both uplinks have one figure.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import get_args

from rich.table import Table

from psdist.commands.probe.exchange import Flow, together
from psdist.commands.probe.schedule import Step
from psdist.install import family_of, library_name
from psdist.topology.draw import counted
from psdist.topology.network.catalogue import Kind, Network, Pair, Speed
from psdist.topology.text.hostlist import natural_key
from psdist.version import VERSION

# At this share of the capacity of the nodes' links, these links are the limit, not the uplink.
FULL_SHARE = 0.9
_NAMES: Mapping[Kind, str] = {
    "core": "within a socket",
    "socket": "across sockets",
    "node": "nodes of a rack",
    "rack": "nodes across racks",
    "gpu": "host and GPU",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Figures of one pair in one step."""

    step: int
    first: int
    second: int
    """Ranks."""
    latency_s: float
    """0 where the step did not measure it."""
    bytes_per_s: float
    flow: Flow
    """Kind uplink: with its times."""


def catalogue(
    results: Iterable[Result],
    steps: Sequence[Step],
    *,
    hosts: Sequence[str],
    racks: Mapping[str, str],
    gpus: Sequence[Pair],
    library: str,
) -> Network:
    """``hosts`` by rank; ``racks`` as for :func:`~psdist.commands.probe.schedule.schedule`;
    ``library`` is the whole version text of the MPI library."""
    pairs: list[Pair] = []
    loads: list[Result] = []
    for each in results:
        step = steps[each.step]
        if step.kind == "uplink":
            loads.append(each)
            continue
        ends = [
            hosts[rank] + (f"/package{package}" if (package := step.packages.get(rank, -1)) >= 0
                           else "")
            for rank in (each.first, each.second)
        ]  # fmt: skip
        pairs.append(
            Pair(
                first=ends[0],
                second=ends[1],
                kind=step.kind,
                latency_s=each.latency_s,
                bytes_per_s=each.bytes_per_s,
            )
        )
    pairs += gpus
    links = _node_links(pairs, tuple(dict.fromkeys(hosts)))
    return Network(
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        hosts=tuple(dict.fromkeys(hosts)),
        mpi=library_name(library),
        components=_components(library),
        versions=_versions(),
        classes={
            kind: _typical(these)
            for kind in get_args(Kind)
            if (these := [pair for pair in pairs if pair.kind == kind])
        },
        node_links=links,
        switch_uplinks=_uplinks(loads, steps, pairs, hosts, racks, links),
        pairs=tuple(pairs),
    )


def table(network: Network) -> Table:
    """A row for each kind of pair, one for the nodes' links and one for the uplinks."""
    shown = Table(
        title=f"{counted(len(network.hosts), 'node')}, {network.mpi}"
        + (f", {', '.join(network.components)}" if network.components else "")
    )
    shown.add_column("")
    for name in ("measured", "latency", "slowest", "median", "fastest"):
        shown.add_column(name, justify="right")
    for kind, name in _NAMES.items():
        these = [pair for pair in network.pairs if pair.kind == kind]
        _add_row(shown, name, {f"{pair.first} - {pair.second}": pair for pair in these})
    _add_row(shown, "node links", network.node_links)
    _add_row(shown, "rack uplinks", network.switch_uplinks)
    remarks = [
        f"slowest {what}: {min(speeds, key=lambda name: speeds[name].bytes_per_s)}"
        for what, speeds in (("node", network.node_links), ("rack", network.switch_uplinks))
        if len(speeds) > 1
    ]
    if any(speed.is_lower_bound for speed in network.switch_uplinks.values()):
        remarks.append("uplinks: at least this, the links of the nodes were full")
    shown.caption = "; ".join(remarks)
    return shown


def _add_row(shown: Table, name: str, speeds: Mapping[str, Pair | Speed]) -> None:
    if not speeds:
        return
    rates = sorted(each.bytes_per_s for each in speeds.values())
    latency_s = statistics.median(each.latency_s for each in speeds.values())
    shown.add_row(
        name,
        str(len(speeds)),
        f"{latency_s * 1e6:.1f} us" if latency_s else "",
        _rate(rates[0]),
        _rate(statistics.median(rates)),
        _rate(rates[-1]),
    )


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    return f"{bytes_per_s / 1e6:.1f} MB/s"


def _typical(pairs: Sequence[Pair]) -> Speed:
    return Speed(
        latency_s=statistics.median(pair.latency_s for pair in pairs),
        bytes_per_s=statistics.median(pair.bytes_per_s for pair in pairs),
        is_lower_bound=False,
    )


def _node_links(pairs: Sequence[Pair], hosts: Sequence[str]) -> dict[str, Speed]:
    links = {}
    for host in hosts:
        near = [pair for pair in pairs if host in (pair.first, pair.second)]
        # A node alone in its rack is seen through the uplink only.
        for kind in ("node", "rack"):
            mine = [pair for pair in near if pair.kind == kind]
            if mine:
                links[host] = Speed(
                    latency_s=statistics.median(pair.latency_s for pair in mine),
                    bytes_per_s=max(pair.bytes_per_s for pair in mine),
                    is_lower_bound=kind == "rack",
                )
                break
    return links


def _uplinks(
    loads: Sequence[Result],
    steps: Sequence[Step],
    pairs: Sequence[Pair],
    hosts: Sequence[str],
    racks: Mapping[str, str],
    links: Mapping[str, Speed],
) -> dict[str, Speed]:
    uplinks = {}
    for number, step in enumerate(steps):
        at_once = [each for each in loads if each.step == number]
        if not at_once:
            continue
        carried = together([each.flow for each in at_once])
        possible = sum(
            min(links[hosts[each.first]].bytes_per_s, links[hosts[each.second]].bytes_per_s)
            for each in at_once
        )
        for rack in sorted(step.racks, key=natural_key):
            crossing = [
                pair.latency_s
                for pair in pairs
                if pair.kind == "rack" and rack in (racks[pair.first], racks[pair.second])
            ]
            uplinks[rack] = Speed(
                latency_s=statistics.median(crossing),
                bytes_per_s=carried,
                is_lower_bound=carried >= FULL_SHARE * possible,
            )
    return uplinks


def _components(library: str) -> tuple[str, ...]:
    """Return the components that carry messages, from the settings or the library's version."""
    if family_of(library) == "openmpi":
        chosen = ((key, os.environ.get(f"OMPI_MCA_{key}", "")) for key in ("pml", "mtl", "btl"))
        return tuple(f"{key}/{value}" for key, value in chosen if value)
    lines = (line.partition(":") for line in library.splitlines())
    return tuple(
        " ".join(value.split()) for key, _, value in lines if key.strip() == "MPICH Device"
    )


def _versions() -> dict[str, str]:
    found = {"psdist": VERSION, "python": platform.python_version()}
    for name in ("mpi4py", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
