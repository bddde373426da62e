"""The worker's state machine: events and commands in, actions out, no I/O.

One state machine, WorkerCore in core, put together from a module per subject. Imports
psdist/protocol and errors only: no torch, no MPI, no time, no randomness; the same objects run
over MPI, in tests and in simulations. psdist.workers.loop carries the actions out.

The seat of one worker in the job: its number, its group, the number of servers.

seat = Seat(worker=3, group=1, members=(2, 3), num_servers=2)
seat.is_leader                        # False: worker 2 leads group 1
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass


@dataclass(kw_only=True)
class Seat:
    worker: int
    group: int
    members: tuple[int, ...]
    """The remaining workers of the group; the first is its leader."""
    num_servers: int
    servers_have_buddies: bool = False
    """True if servers have replicas: another process takes the place of a failed server."""
    num_spares: int = 0
    """Number of spares that may take the place of a failed server."""
    is_substitute: bool = False
    """True if this worker joins the running job instead of a failed worker."""
    group_reforms: bool = False
    """True if the group continues without its failed workers."""

    def lose(self, dead: Collection[int]) -> int:
        """The group continues without these workers. Return how many it has lost by that."""
        before = len(self.members)
        self.members = tuple(each for each in self.members if each not in dead)
        return before - len(self.members)

    @property
    def needed(self) -> Set[int]:
        """Workers whose failure ends this one."""
        return {self.worker} if self.group_reforms else set(self.members)

    @property
    def place(self) -> int:
        """Index of this worker in its group."""
        return self.members.index(self.worker)

    @property
    def is_chief(self) -> bool:
        """True for worker 0, whose values all workers start with."""
        return self.worker == 0

    @property
    def is_leader(self) -> bool:
        """True if this worker represents its group to the servers."""
        return self.worker == self.members[0]
