"""The reports of ranks to the coordinator, as status.json and summary.json need them; pure.

reports = RankReports(roles=roles, workers=coordinator.done, servers=coordinator.servers,
                      progress=coordinator.progress)
reports.all_workers, reports.last_progress
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from psdist.protocol.control import Progress
from psdist.protocol.roles import Roles


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A collective that some workers have entered."""

    key: int
    """Number of the call in this job."""
    what: str
    present: Collection[int]
    absent: Collection[int]


@dataclass(frozen=True, kw_only=True)
class RankReports:
    """The reports of all ranks, and the membership."""

    roles: Roles
    workers: Mapping[int, Mapping[str, Any]]
    """Statistics of workers whose script has finished; ``sets`` has those of each set."""
    servers: Mapping[int, Mapping[str, Any]]
    """Statistics of servers that have finished; ``sets`` has those of each set."""
    progress: Mapping[int, Progress]
    """The latest report of each worker."""
    contained: Sequence[Sequence[int]] = ()
    """By set and group: iterations that the chunks of the coordinator's server contain; empty if it
    has no chunks of a set. After a failure these are newer than ``progress``."""
    out: frozenset[int] = frozenset()
    """Workers that are not in the job: no sum includes their statistics."""
    not_joined: frozenset[int] = frozenset()
    """Substitutes that have not joined."""
    calls: Sequence[OpenCall] = ()
    num_idle_spares: int = 0
    coordinator_line: str = ""
    """Place of the coordinator and its standby; "" while both are as at the start."""

    @property
    def all_workers(self) -> bool:
        """True if each worker of the job has sent its statistics."""
        return set(range(self.roles.num_workers)) - self.out <= set(self.workers)

    @property
    def all_servers(self) -> bool:
        """True if each server has sent its statistics."""
        return len(self.servers) == self.roles.num_servers

    @property
    def last_progress(self) -> dict[int, Progress]:
        """The latest report of each worker, with the clock that its group's updates show."""
        contained = next(iter(self.contained), ())
        groups = self.roles.group_of_worker
        return {
            worker: replace(each, clock=max([each.clock, *contained[groups[worker] :][:1]]))
            for worker, each in self.progress.items()
        }
