"""Views of the membership: which workers have failed, and which servers have evicted them; pure.

The network of every rank notices a failure, but only the coordinator declares it, in two steps.
Each declaration begins a new view. Every server gets ``Evict`` and removes the failed groups from
its clocks. When all have answered, every worker gets ``MembershipChanged``. So when a worker learns
of a failure, no server waits for the failed worker any longer. Failures in between are part of the
next view.

    views = Views(groups=((0,), (1,)), num_servers=2, max_deaths=1)
    views.on_lost(1, "worker 1 (rank 3 on n2)", is_ready=True)   # Evict for every server
    views.on_ack(0, EvictAck(generation=1, server=0))
    views.on_ack(1, EvictAck(generation=1, server=1))          # MembershipChanged for workers
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

from psdist.controller.snapshots import Fields, HasSnapshot
from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.control import Evict, EvictAck, MembershipChanged
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.membership import IsOut
from psdist.servers.protocol.snapshots import OnWire


@dataclass(frozen=True, slots=True)
class Death:
    """The worker is evicted."""

    worker: int
    who: str
    """Name of the worker in messages."""
    generation: int
    left: tuple[int, ...]
    """The other workers of its group, which are not in the job any more either."""
    chief: int
    """The worker with the chief's duties."""
    group: int = -1
    """Its group if the group continues without it, else -1."""
    stay: tuple[int, ...] = ()
    """Workers that remain in that group."""


@dataclass(frozen=True, slots=True)
class Survived:
    """All servers have evicted the failed workers up to this view number."""

    generation: int


class Views(HasSnapshot):
    TAKES = (EvictAck,)
    STATE = Fields(
        {
            int: "generation",
            set[int]: "dead out waiting _awaited",
            list[int]: "_undeclared",
            Annotated[Evict, OnWire]: "_told",
            Annotated[MembershipChanged, OnWire]: "settled",
        }
    )

    def __init__(
        self,
        *,
        groups: Sequence[Sequence[int]],
        num_servers: int,
        max_deaths: int = 0,
        substitutes: Collection[int] = (),
        is_out: IsOut = any,
    ) -> None:
        """``groups``: the workers of each; ``max_deaths``: maximum number of failed workers in the
        job; ``substitutes``: workers that have still to join, each a group of its own
        (psdist.servers.protocol.joins)."""
        self._groups = groups
        self._is_out = is_out
        self._group_of = {worker: group for group in groups for worker in group}
        self._num_servers = num_servers
        self._max_deaths = max_deaths
        self.generation = 0
        self.dead: set[int] = set()
        """Failed workers."""
        self.out: set[int] = set()
        """All workers of groups with a failed worker; only the failed ones if groups re-form."""
        self.waiting = set(substitutes)
        """Substitutes that have not joined."""
        self._undeclared: list[int] = []
        """Failed workers not declared yet: servers have not all answered the last view."""
        self._awaited: set[int] = set()
        """Servers that have not answered the newest view."""
        self._told = Evict(generation=0, dead=[])
        """Last message to servers."""
        self.settled = MembershipChanged(generation=0, dead=[], chief=self.chief)
        """Last message to workers, after all servers."""

    @property
    def is_settling(self) -> bool:
        """True while some server has not answered the newest view."""
        return bool(self._awaited)

    @property
    def live(self) -> list[int]:
        """Workers of groups that have joined and are not out, ascending."""
        return sorted(self._group_of.keys() - self.out - self.waiting)

    @property
    def chief(self) -> int:
        return min(self._group_of.keys() - self.out - self.waiting, default=0)

    def admit(self, substitute: int) -> None:
        """The substitute has joined."""
        self.waiting.remove(substitute)

    def on_lost(self, worker: int, who: str, *, is_ready: bool) -> list[Death | SendControl]:
        """``worker`` failed; ``is_ready``: True if training has begun. Raises
        :class:`PeerLostError` if the job cannot continue without the worker."""
        if worker in self.out:
            return []
        num_deaths = len(self.dead) + 1
        if not self._max_deaths:
            raise PeerLostError(who)
        if not is_ready:
            raise PeerLostError(
                who, "before training had begun, for which every worker is needed: restart the job"
            )
        if num_deaths > self._max_deaths:
            raise PeerLostError(
                who,
                f"which is death {num_deaths}, and failures.max_deaths = {self._max_deaths}: "
                "restart the job, or set failures.max_deaths higher",
            )
        self.dead.add(worker)
        group = self._group_of[worker]
        others = tuple(each for each in group if each not in self.out and each != worker)
        is_out = self._is_out(each in self.dead for each in group)
        left, stay = (others, ()) if is_out else ((), others)
        self.out.update((worker, *left))
        gone = self.out | self.waiting
        if all(gone.issuperset(each) for each in self._groups):
            raise PeerLostError(who, "which leaves no group: restart the job")
        self._undeclared.append(worker)
        generation = self.generation + 1
        at = self._groups.index(group) if stay else -1
        death = Death(worker, who, generation, left, self.chief, at, stay)
        return [death, *self._declare()]

    def _declare(self) -> list[SendControl]:
        if self._awaited or not self._undeclared:
            return []
        self._undeclared.clear()
        self.generation += 1
        self._awaited = set(range(self._num_servers))
        self._told = Evict(generation=self.generation, dead=sorted(self.dead))
        return [SendControl(server_id(server), self._told) for server in range(self._num_servers)]

    def ask_again(self, server: int) -> list[SendControl]:
        """``server`` was replaced. Send its successor ``Evict`` again if it was not answered."""
        if server not in self._awaited:
            return []
        return [SendControl(server_id(server), self._told)]

    def reached(self, message: EvictAck) -> list[int]:
        """Return by set the most updates of a failed group that the server's chunks contain.

        Empty if the view number is not the newest, which :meth:`on_ack` refuses. Raises
        :class:`ProtocolError` if the message is not of these workers."""
        num_dead = len(self._told.dead)
        if not num_dead or message.generation != self.generation:
            return []
        if len(message.reached) % num_dead:
            raise ProtocolError(
                f"the coordinator: server {message.server} sent EvictAck with "
                f"{len(message.reached)} clocks of {num_dead} workers"
            )
        starts = range(0, len(message.reached), num_dead)
        return [max(message.reached[start : start + num_dead]) for start in starts]

    def on_ack(self, server: int, message: EvictAck) -> list[Survived | SendControl]:
        """A server has evicted the workers. After the last one, notify the workers."""
        if message.generation != self.generation or server not in self._awaited:
            raise ProtocolError(
                f"the coordinator: server {server} sent EvictAck of view number "
                f"{message.generation} in view {self.generation}, or twice"
            )
        self._awaited.remove(server)
        if self._awaited:
            return []
        if self._undeclared:
            return [*self._declare()]
        self.settled = told = MembershipChanged(
            generation=self.generation, dead=sorted(self.dead), chief=self.chief
        )
        heard_by = sorted(self._group_of.keys() - self.waiting)
        survive = [SendControl(worker_id(worker), told) for worker in heard_by]
        return [*survive, Survived(self.generation)]
