"""The hosts of ``psdist plan`` from a launcher's or a batch system's file, and what its slots mean.

given = given_hosts(Path("hostfile"), nodes=None, racks=None)
notes = beyond_slots(plan, given)
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Final

from psdist.errors import PlacementError
from psdist.topology.network import host_files
from psdist.topology.network.host_files import HostFile
from psdist.topology.plan import Plan
from psdist.topology.text import hostlist

_MAX_LISTED: Final = 200
"""Characters of a host list in a note."""


def given_hosts(hostfile: Path | None, *, nodes: str | None, racks: Path | None) -> HostFile | None:
    """What a file says of the hosts: the one that was named, else that of a PBS job."""
    if hostfile is not None:
        if nodes is not None:
            raise PlacementError(
                "--hostfile and --nodes both name the hosts of the job: leave one out"
            )
        return host_files.read(hostfile)
    if nodes is None and racks is None and os.environ.get("PBS_NODEFILE"):
        return host_files.read(Path(os.environ["PBS_NODEFILE"]))
    return None


def beyond_slots(plan: Plan, given: HostFile) -> tuple[str, ...]:
    """A note where a launcher that is given that file would refuse the plan's ranks."""
    ranks = Counter(each.host for each in plan.ranks)
    beyond = [host for host in given.names if 0 < given.slots[host] < ranks[host]]
    if not beyond:
        return ()
    host = beyond[0]
    return (
        f"{hostlist.compress(beyond)[:_MAX_LISTED]}: more ranks than slots in {given.source} "
        f"({host}: {ranks[host]} of {given.slots[host]}), servers come in addition to workers: "
        "start it with the files that --emit writes, or give --workers-per-node",
    )
