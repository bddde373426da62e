"""Substitutes: workers that join a running job after other workers have failed; pure.

A spare worker has a number and a group of its own, the last ones. Nothing counts that group before
it has joined, so pushes of the failed worker never count as its own. When all servers have
evicted a failed worker, the coordinator asks an idle spare worker to replace it (``TakePlace``).
The spare worker runs the script and reports when it can join (``JoinReady``).

It joins in a collective of all workers that is called for this (``JOIN``). Every server gets
``AdmitWorker`` before the collective's ``Resume``. The worker gets ``JoinAccepted`` when all have
answered. So every server counts it before any rank learns that it has joined.

Its clocks begin where the farthest live worker is. No live worker has pushed that round yet, so all
servers have the same contributors for each round from there on. A failed worker may have been
farther. Then no worker joins until a live one is as far, so that no part of the data is used twice.
With several parameter sets a worker may fail between the steps of two sets. A script cannot start
there, so with several sets only the live workers decide. No worker joins while the chief has no
state for its script.

    joins = Joins([3])
    joins.on_died(1)
    joins.on_evict_ack([13])
    joins.ask()                                   # [SendControl(3, TakePlace(worker=1))]
    joins.on_ready(worker_id(3), JoinReady(worker=3, num_sets=1))
    clocks = [(12,), (14,)]                       # of the live workers, which all wait
    joins.admit(seq=7, clocks=clocks, state="state-12-1")   # [Joined(3, 1, (14,), "state-12-1")]
    joins.take_welcome(7)                         # the same, once: servers have answered
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from psdist.controller.snapshots import Fields
from psdist.errors import ProtocolError
from psdist.protocol.collected import JOIN, unpack_join
from psdist.protocol.control import (
    AdmitWorker,
    Control,
    JoinAccepted,
    JoinReady,
    Progress,
    Stop,
    TakePlace,
)
from psdist.protocol.ids import (
    describe_peer,
    server_id,
    spare_id,
    spare_of,
    worker_id,
    worker_of,
)
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.collectives import Collective, Warn
from psdist.servers.protocol.coordinator import Actions, Coordinator, CoordinatorPart, refuse
from psdist.servers.protocol.takeovers import Takeovers

FIRST_PATIENCE: Final = 16
"""Iterations."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A substitute has joined at these clocks."""

    worker: int
    place: int
    """The worker whose part of the data it takes: one of those that began the job."""
    clocks: tuple[int, ...]
    """By parameter set."""
    state: str
    """Name of the state that its script resumes from."""


@dataclass(frozen=True, slots=True)
class SubstituteDeath:
    """A substitute failed before it joined; the log and the report say so."""

    worker: int
    who: str


class Joins(CoordinatorPart):
    NAME = "joins"
    TAKES = (JoinReady,)
    COMPLETES = (JOIN,)
    STATE = Fields(
        {
            deque[int]: "_idle _free",
            dict[int, int]: "_asked _ready _place_of",
            set[int]: "_lost",
            tuple[int, ...]: "reached",
            dict[int, list[Joined]]: "_admitted",
            int: "_not_before _patience",
        }
    )

    def __init__(self, substitutes: Sequence[int], *, takeovers: Takeovers | None = None) -> None:
        """``substitutes``: numbers of the workers that wait; ``takeovers``: given if they are the
        spares, in the same order."""
        self._first = substitutes[0]
        self._takeovers = takeovers
        self._idle = deque(substitutes)
        """Substitutes that were not asked yet; the first is asked next."""
        self._free: deque[int] = deque()
        """Places of failed workers that no substitute was asked to take."""
        self._asked: dict[int, int] = {}
        """Substitute that was asked and has not joined -> the place that it is to take."""
        self._ready: dict[int, int] = {}
        """Asked substitute that can join -> number of parameter sets that it has prepared."""
        self._lost: set[int] = set()
        """Substitutes that failed before they joined."""
        self.reached: tuple[int, ...] = ()
        """By parameter set, the most updates of a failed group that a chunk contains."""
        self._place_of: dict[int, int] = {}
        """Substitute that has joined -> the place that it has taken."""
        self._admitted: dict[int, list[Joined]] = {}
        """Collective -> the workers that it admits, until all servers have answered."""
        self._not_before = 0
        """Iterations before which no substitute may join, because the chief had no state."""
        self._patience = 0
        """Iterations of the next delay. It doubles each time that the chief has no state."""

    def handle(self, peer: int, message: Control, job: Coordinator) -> Actions:
        assert isinstance(message, JoinReady)
        if peer != worker_id(message.worker):
            refuse(peer, f"sent JoinReady of worker {message.worker}")
        self.on_ready(peer, message)
        return self._call(job)

    def accepts(self, name: str, payload: bytes) -> bool:
        return unpack_join(payload) is not None

    def on_progress(self, message: Progress, job: Coordinator) -> Actions:
        names = (each.name for each in job.collectives.values() if not each.error)
        return [] if job.pause.due == JOIN or JOIN in names else self._call(job)

    def _call(self, job: Coordinator) -> Actions:
        """Call a meeting if a substitute waits to join and the reported clocks allow it."""
        live = set(job.membership.live)
        clocks = [each.clock for worker, each in job.progress.items() if worker in live]
        may_join = not clocks or self.may_join([max(clocks)])
        return [*job.pause.call()] if self._ready and may_join else []

    def complete(self, seq: int, collective: Collective, job: Coordinator) -> Actions:
        """Tell servers which workers join, before ``Resume``."""
        brought = {
            worker: unpack_join(collective.entered[worker].payload)
            for worker in job.membership.live
        }
        clocks = [each.clocks for each in brought.values() if each is not None]
        if fault := collective.fault_of_sets(clocks):
            return job.fail(seq, fault)
        of_chief = brought[job.membership.chief]
        assert of_chief is not None
        actions = Actions()
        for worker in self.refuse(num_sets=len(clocks[0])):
            actions += [
                Warn(
                    f"worker {worker}, which was to join, has prepared another number of "
                    f"optimizers than the job, which has {len(clocks[0])}: it does not join"
                ),
                SendControl(worker_id(worker), Stop()),
            ]
        for each in self.admit(seq, clocks, state=of_chief.state):
            actions += job.admit(each.worker, seq, each.clocks)
            actions += job.to_servers(AdmitWorker(worker=each.worker, clocks=list(each.clocks)))
        return [*actions, *job.resume(seq)]

    def on_collected(self, name: str, seq: int, job: Coordinator) -> Actions:
        """After a join, send the new workers their clocks. After another collective, call a meeting
        for substitutes that could not join before."""
        if name != JOIN:
            return self._call(job)
        actions = Actions()
        settled = job.membership.settled  # not all servers may have evicted those that failed since
        for each in self.take_welcome(seq):
            welcome = JoinAccepted(
                worker=each.worker,
                clocks=list(each.clocks),
                state=each.state,
                seq=seq,
                generation=settled.generation,
                dead=settled.dead,
                chief=settled.chief,
                meeting=job.pause.number,
            )
            actions += [SendControl(worker_id(each.worker), welcome), each]
            actions += job.pause.admit(each.worker)
        return actions

    def on_evicted(self, worker: int, job: Coordinator) -> Actions:
        self.on_died(worker)
        return []

    def on_membership_changed(self, job: Coordinator) -> Actions:
        return self._ask(job)

    def on_waiting_lost(self, worker: int, who: str, job: Coordinator) -> Actions:
        is_told_as_spare = self._takeovers is not None and worker not in self._asked
        if not self.on_lost(worker) or is_told_as_spare:
            return []
        return [SubstituteDeath(worker, who), *self._ask(job)]

    def _ask(self, job: Coordinator) -> Actions:
        """Ask substitutes to take places, if all servers have evicted the failed workers and the
        job is not done."""
        if job.membership.is_settling or job.done:
            return []
        if self._takeovers is None:
            return [*self.ask()]
        self.keep_idle({self._first + spare_of(each) for each in self._takeovers.idle_spares})
        asked = [(worker_of(each.peer) - self._first, each.message) for each in self.ask()]
        for spare, _ in asked:
            self._takeovers.lend(spare)
        return [SendControl(spare_id(spare), message) for spare, message in asked]

    def ask_again(self, server: int, job: Coordinator) -> Actions:
        return [
            SendControl(
                server_id(server), AdmitWorker(worker=each.worker, clocks=list(each.clocks))
            )
            for seq, admitted in self._admitted.items()
            if server not in job.collectives[seq].answered
            for each in admitted
        ]

    def to_stop(self, job: Coordinator) -> list[int]:
        waiting = job.membership.waiting
        if self._takeovers is not None:  # the others are stopped as spares
            waiting = waiting & self._asked.keys()
        return [*map(worker_id, waiting)]

    @property
    def num_idle_spares(self) -> int:
        return len(self._idle) if self._takeovers is None else 0

    @property
    def idle(self) -> list[int]:
        """Substitutes that were not asked."""
        return list(self._idle)

    @property
    def asked(self) -> frozenset[int]:
        """Substitutes that were asked and have not joined."""
        return frozenset(self._asked)

    @property
    def ready(self) -> list[int]:
        """Substitutes that wait to join, in the order in which they came."""
        return list(self._ready)

    def may_join(self, farthest: Sequence[int]) -> bool:
        """True if a live worker is as far as the failed workers were, and the chief may have a
        state by then. ``farthest``: the clocks of the farthest live worker, by set."""
        if max(farthest, default=0) < self._not_before:
            return False
        return len(self.reached) > 1 or max(self.reached, default=0) <= max(farthest, default=0)

    def on_died(self, worker: int) -> None:
        """A worker, or a substitute that had joined, is declared failed: its place is free."""
        self._free.append(self._place_of.get(worker, worker))

    def on_evict_ack(self, reached: Sequence[int]) -> None:
        pairs = zip_longest(self.reached, reached, fillvalue=0)
        self.reached = tuple(max(pair) for pair in pairs)

    def keep_idle(self, substitutes: Collection[int]) -> None:
        """Only these stay idle: the others have become servers."""
        self._idle = deque(each for each in self._idle if each in substitutes)

    def ask(self) -> list[SendControl]:
        """Ask idle substitutes to take free places. All servers have evicted the failed workers."""
        asked = []
        while self._idle and self._free:
            substitute, place = self._idle.popleft(), self._free.popleft()
            self._asked[substitute] = place
            asked.append(SendControl(worker_id(substitute), TakePlace(worker=place)))
        return asked

    def on_lost(self, substitute: int) -> bool:
        """A substitute failed before it joined. False if that was known already."""
        if substitute in self._lost:
            return False
        self._lost.add(substitute)
        if substitute in self._idle:
            self._idle.remove(substitute)
        self._ready.pop(substitute, None)
        place = self._asked.pop(substitute, None)
        if place is not None:
            self._free.append(place)
        return True

    def on_ready(self, peer: int, message: JoinReady) -> None:
        """A substitute can join."""
        if message.num_sets < 1 or message.worker not in self._asked:
            raise ProtocolError(
                f"the coordinator: {describe_peer(peer)} would join with {message.num_sets} "
                f"parameter sets; of substitutes {sorted(self._asked)} were asked to"
            )
        self._ready[message.worker] = message.num_sets

    def refuse(self, *, num_sets: int) -> list[int]:
        """Return the substitutes that have prepared another number of sets; they do not join.
        Their places stay empty, because another substitute would run the same script."""
        found = [worker for worker, num in self._ready.items() if num != num_sets]
        for worker in found:
            del self._ready[worker], self._asked[worker]
        return found

    def admit(self, seq: int, clocks: Sequence[tuple[int, ...]], *, state: str) -> list[Joined]:
        """Return the workers that join. All workers wait in collective ``seq`` at these clocks.
        ``state``: name of the state that the chief has written; "": none, and no worker joins."""
        farthest = tuple(map(max, zip(*clocks, strict=True)))
        if not state:  # wait longer each time: the workers must not hold at every step
            self._not_before = max(farthest, default=0) + self._patience
            self._patience = 2 * self._patience or FIRST_PATIENCE
            return []
        if not self.may_join(farthest):
            return []
        found = [Joined(each, self._asked.pop(each), farthest, state) for each in self._ready]
        self._ready.clear()
        self._place_of.update((each.worker, each.place) for each in found)
        if found:
            self._admitted[seq] = found
        return found

    def take_welcome(self, seq: int) -> list[Joined]:
        """Return the workers that have joined in this collective, once."""
        return self._admitted.pop(seq, [])
