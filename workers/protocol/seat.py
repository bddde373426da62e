"""Where one worker stands in the job: its number, its group, how many servers there are.

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
    """The workers of the group that live; the first is its leader."""
    num_servers: int
    servers_have_buddies: bool = False
    """Whether another server goes on in the place of one that has died, with a copy of its
    shard."""
    num_spares: int = 0
    """Those that may do so, too."""
    is_substitute: bool = False
    """Whether this worker joins the running job, in place of one that has died."""
    group_reforms: bool = False
    """Whether the group goes on without those of its workers that have died."""

    def lose(self, dead: Collection[int]) -> int:
        """The group goes on without these; how many it has lost by that."""
        before = len(self.members)
        self.members = tuple(each for each in self.members if each not in dead)
        return before - len(self.members)

    @property
    def needed(self) -> Set[int]:
        """Workers without which this one cannot go on."""
        return {self.worker} if self.group_reforms else set(self.members)

    @property
    def place(self) -> int:
        """Index of this worker in its group."""
        return self.members.index(self.worker)

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, whose values everybody starts with."""
        return self.worker == 0

    @property
    def is_leader(self) -> bool:
        """Whether this worker speaks for its group to the servers."""
        return self.worker == self.members[0]
