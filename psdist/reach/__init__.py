"""Whether the hosts of a job still reach each other: *lines*, TCP connections over which nothing
goes, and what is concluded when lines end.

    ranks = {4: Rank("h3", "worker 2 (rank 4 on h3)"), ...}
    watch = Watch(ranks, host="h1", timeout_s=60, is_hub=True)
    watch.on_open(4)
    watch.on_end(4, End.SILENT, now_s)
    watch.verdict(now_s, known=())          # a sentence, or None: nothing is wrong yet

:class:`Watch` is pure: the time is passed in. ``greeting`` has who may open a line, and how it
ends; ``hub`` is the end that listens, ``member`` the end that calls. The two kernels ask each other
whether they are there; no thread of psdist has to run for that, so a process that is stopped,
computes, or sits in a debugger is never taken for one that is cut off. psdist.ranks.hosts decides
what the job does about it.

A line ends in one of three ways. Its other end says goodbye: that rank is done. It is *silent*: for
``timeout_s`` its host's kernel has answered nothing, so the host is cut off or gone. It is *closed*
without a goodbye: the process has ended, and the launcher, or MPI, has to report it; the verdict
reports it only if they do not within ``timeout_s``.

Must not import anything of psdist but errors. Needs neither MPI nor torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Final, NamedTuple

SETTLE_S: Final = 1.5
"""From the first silent line to the verdict: those of the same host follow within a second."""
_MOST_TOLD: Final = 4
_REMEDY: Final = (
    "restart the job on hosts that reach each other (--resume continues from the last checkpoint)"
)


class End(Enum):
    GOODBYE = "goodbye"
    SILENT = "silent"
    CLOSED = "closed"


class Rank(NamedTuple):
    host: str
    who: str
    """As people know it: "worker 2 (rank 4 on h3)"."""


class Watch:
    def __init__(
        self,
        ranks: Mapping[int, Rank],
        *,
        host: str,
        timeout_s: float,
        is_hub: bool,
        outlives_hubs: bool = False,
    ) -> None:
        """``ranks``: the ranks at the other ends; ``host``: this host. A hub gives its verdict at
        the first silent line, a member only when all its lines are silent. ``outlives_hubs``: the
        job of this member continues when a hub fails, so a closed line proves nothing."""
        self._outlives_hubs = outlives_hubs
        self._ranks = ranks
        self._host = host
        self._timeout_s = timeout_s
        self._is_hub = is_hub
        self._open: set[int] = set()
        self._left: set[int] = set()
        self._silent: dict[int, float] = {}
        """When that was noticed."""
        self._closed: dict[int, float] = {}

    @property
    def unwatched(self) -> list[str]:
        """Hosts with a rank whose line was never opened."""
        seen = self._open | self._left | self._silent.keys() | self._closed.keys()
        return sorted({self._ranks[rank].host for rank in self._ranks.keys() - seen})

    @property
    def is_waiting(self) -> bool:
        """Whether a verdict may come by time alone."""
        return bool(self._silent or (self._closed and not self._outlives_hubs))

    def may_open(self, rank: int) -> bool:
        """Whether a line of that rank is awaited: each has one, once."""
        seen = self._open | self._left | self._silent.keys() | self._closed.keys()
        return rank in self._ranks and rank not in seen

    def on_open(self, rank: int) -> None:
        self._open.add(rank)

    def on_end(self, rank: int, how: End, now_s: float) -> None:
        """The line of ``rank``, which was open, has ended."""
        self._open.remove(rank)
        if how is End.GOODBYE:
            self._left.add(rank)
        elif how is End.SILENT:
            self._silent[rank] = now_s
        else:
            self._closed[rank] = now_s

    def verdict(self, now_s: float, known: Collection[int]) -> str | None:
        """Return why the job, or on a member its rank, cannot continue; ``known``: ranks whose
        failure the job has noticed already."""
        silent = {rank: at for rank, at in self._silent.items() if rank not in known}
        closed = {rank: at for rank, at in self._closed.items() if rank not in known}
        if self._outlives_hubs:
            closed.clear()
        if not self._is_hub and (self._open or self._left):
            return None
        if silent and now_s - min(silent.values()) >= SETTLE_S:
            return self._of_hub(silent) if self._is_hub else self._of_member(silent)
        if closed and now_s - min(closed.values()) >= self._timeout_s:
            return (
                f"{self._told(closed)} ended without a word, and for {self._timeout_s:g} s "
                f"(failures.host_timeout_s) neither MPI nor the launcher has said so; {_REMEDY}"
            )
        return None

    def _of_hub(self, silent: Collection[int]) -> str:
        hosts = sorted({self._ranks[rank].host for rank in silent})
        if not self._open:
            return (
                f"no other host ({', '.join(hosts)}) has answered for {self._timeout_s:g} s "
                f"(failures.host_timeout_s): {self._host} is cut off; {_REMEDY}"
            )
        return (
            f"{', '.join(hosts)} ({self._told(silent)}) has not answered for {self._timeout_s:g} s "
            f"(failures.host_timeout_s): cut off, or gone; {_REMEDY}"
        )

    def _of_member(self, silent: Collection[int]) -> str:
        return (
            f"{self._host} has been cut off from {self._told(silent)} for {self._timeout_s:g} s "
            "(failures.host_timeout_s): its ranks end here, and the job has ended without them; "
            f"{_REMEDY}"
        )

    def _told(self, ranks: Collection[int]) -> str:
        who = [self._ranks[rank].who for rank in sorted(ranks)]
        more = f" and {len(who) - _MOST_TOLD} more" if len(who) > _MOST_TOLD else ""
        return ", ".join(who[:_MOST_TOLD]) + more
