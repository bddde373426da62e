"""Substitutes: workers that join a running job in place of those that have died; the registrar's
machine of who takes whose place; pure.

A substitute has a number and a group of its own, the last ones, which nobody counts before it has
joined: what the dead have sent is never taken for its own. When a death has been taken in by all
servers, a substitute that idles is asked to take the dead one's place (``Replace``): it runs the
script and says that it is ready (``Ready``).

It joins where nothing is under way, in a collective of all workers that is called for it
(``JOIN``), in two steps: every server is told (``Admit``) in front of the collective's ``Resume``,
and the substitute (``Welcome``) when all have answered that. So whoever hears that it has joined
finds no server that does not count it.

Its clock begins where the farthest of the living has come: none of them has made an update of that
round, so all servers have the same contributors of each round from there on, and nobody waits for
rounds that it will never make. A dead one may have come farther; then nobody joins until a living
one is there, so that of what the dead had brought from their parts of the data nothing is brought
again, and the substitute's script begins at a place where a living one's is. With several parameter
sets the dead may have died between the steps of two of them, which is no place of a script: then
the living alone say it. Nobody joins, either, where the chief has brought no state for the script.

    joins = Joins([3])
    joins.on_died(1)
    joins.on_buried([13])
    joins.ask()                                         # [SendControl(3, Replace(worker=1))]
    joins.on_ready(worker_id(3), Ready(worker=3, num_sets=1))
    clocks = [(12,), (14,)]                             # of the living, who all wait
    joins.admit(seq=7, clocks=clocks, state="state-12-1")     # [Joined(3, 1, (14,), "state-12-1")]
    joins.take_welcome(7)                               # the same, once: servers have answered
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from psdist.errors import ProtocolError
from psdist.protocol.control import Ready, Replace
from psdist.protocol.ids import describe_peer, worker_id
from psdist.servers.protocol.actions import SendControl

FIRST_PATIENCE: Final = 16
"""Iterations."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A substitute has joined, and its clocks stand here."""

    worker: int
    place: int
    """The worker whose part of the data it has: one that was there from the start."""
    clocks: tuple[int, ...]
    """By parameter set."""
    state: str
    """The name of what its script goes on with."""


@dataclass(frozen=True, slots=True)
class SubstituteDeath:
    """For people: a substitute has died before it had joined."""

    worker: int
    who: str


class Joins:
    TAKES = (Ready,)

    def __init__(self, substitutes: Iterable[int]) -> None:
        self._idle = deque(substitutes)
        """That were not asked, in the order in which they will be."""
        self._free: deque[int] = deque()
        """Places of those that have died, and that nobody was asked to take."""
        self._asked: dict[int, int] = {}
        """Substitute that has not joined -> the place that it is to take."""
        self._ready: dict[int, int] = {}
        """Those of them that can join, and how many parameter sets each has prepared."""
        self._lost: set[int] = set()
        """Those that have died before they had joined."""
        self.reached: tuple[int, ...] = ()
        """By parameter set, the most updates of a failed group that a chunk contains."""
        self._place_of: dict[int, int] = {}
        """Of substitutes that have joined."""
        self._admitted: dict[int, list[Joined]] = {}
        """By collective, whom servers have been told of that have not all answered."""
        self._not_before = 0
        """After how many iterations of a set anybody may join, where the chief had no state."""
        self._patience = 0
        """By so many more it was later."""

    @property
    def idle(self) -> list[int]:
        """Those that were not asked."""
        return list(self._idle)

    @property
    def asked(self) -> frozenset[int]:
        """Those that were, and have not joined."""
        return frozenset(self._asked)

    @property
    def ready(self) -> list[int]:
        """Substitutes that wait to join, in the order in which they came."""
        return list(self._ready)

    def may_join(self, farthest: Sequence[int]) -> bool:
        """Whether a living worker is where the dead have come, by set, and the chief may have a
        state by then."""
        if max(farthest, default=0) < self._not_before:
            return False
        return len(self.reached) > 1 or max(self.reached, default=0) <= max(farthest, default=0)

    def on_died(self, worker: int) -> None:
        """A worker, perhaps a substitute that had joined, is declared dead."""
        self._free.append(self._place_of.get(worker, worker))

    def on_buried(self, reached: Sequence[int]) -> None:
        """A server has told how far the dead have come, by set."""
        pairs = zip_longest(self.reached, reached, fillvalue=0)
        self.reached = tuple(max(pair) for pair in pairs)

    def keep_idle(self, substitutes: Collection[int]) -> None:
        """Of those that idle these alone do: others have come to be servers."""
        self._idle = deque(each for each in self._idle if each in substitutes)

    def ask(self) -> list[SendControl]:
        """All servers know who is dead: as many substitutes as there are take their places."""
        asked = []
        while self._idle and self._free:
            substitute, place = self._idle.popleft(), self._free.popleft()
            self._asked[substitute] = place
            asked.append(SendControl(worker_id(substitute), Replace(worker=place)))
        return asked

    def on_lost(self, substitute: int) -> bool:
        """It has died before it has joined; False if that is known."""
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

    def on_ready(self, peer: int, message: Ready) -> None:
        """A substitute can join."""
        if message.num_sets < 1 or message.worker not in self._asked:
            raise ProtocolError(
                f"the registrar: {describe_peer(peer)} would join with {message.num_sets} "
                f"parameter sets; of substitutes {sorted(self._asked)} were asked to"
            )
        self._ready[message.worker] = message.num_sets

    def refuse(self, *, num_sets: int) -> list[int]:
        """The job has so many parameter sets: who has prepared another number does not join, nor
        does anybody else in its place, whose script would do the same."""
        found = [worker for worker, num in self._ready.items() if num != num_sets]
        for worker in found:
            del self._ready[worker], self._asked[worker]
        return found

    def admit(self, seq: int, clocks: Sequence[tuple[int, ...]], *, state: str) -> list[Joined]:
        """All workers wait in collective ``seq``, at these clocks: who joins, and where. ``state``:
        the name of what the chief has brought for their scripts; "": nothing, and nobody joins."""
        farthest = tuple(map(max, zip(*clocks, strict=True)))
        if not state:  # twice running: whatever is in its way, all need not hold at every step
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

    def admitted_in(self, seq: int) -> list[Joined]:
        """Whom servers have been told of in collective ``seq``, which is not over."""
        return self._admitted.get(seq, [])

    def take_welcome(self, seq: int) -> list[Joined]:
        """The collective is over: who has joined in it. Once."""
        return self._admitted.pop(seq, [])
