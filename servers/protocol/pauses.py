"""Pauses: all workers hold at an iteration boundary without a call of the script; pure.

A worker with a reason (a checkpoint is due, a signal came) holds at its next boundary and reports
that. The others are asked to hold at theirs. A worker may be blocked: it waits in a step, or in a
collective, for a worker that holds. It reports what it waits in, and the workers in its way proceed
to their next boundary. When all hold, the pause begins. A worker whose script has finished never
holds again, so the pause is aborted. With backup groups a worker that has missed several rounds
waits for the open round to close (psdist.servers.protocol.rules.closing), so workers that hold
before that round are in its way.

    pauses = Pauses(num_workers=2, groups=((0,), (1,)), staleness=0)
    held = Held(worker=0, number=1, hold=1, what="checkpoint", clocks=[7])
    pauses.on_told(0, held, is_collecting=False)                        # PauseRequest for worker 1
    blocked = Blocked(worker=1, number=1, set_index=0, clock=7)
    pauses.on_told(1, blocked, is_collecting=False)                     # Proceed for worker 0
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

from psdist.controller.snapshots import Fields, HasSnapshot
from psdist.errors import ProtocolError
from psdist.protocol.checkpoints import CHECKPOINT, WRITTEN
from psdist.protocol.control import Blocked, Held, PauseAborted, Paused, PauseRequest, Proceed
from psdist.protocol.ids import worker_id
from psdist.protocol.substitutes import JOIN
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.snapshots import OnWire

REASONS = (JOIN, "checkpoint", "requeue", "end")
"""Purposes of a meeting, the weakest first: a substitute joins; a checkpoint is made, and the job
then continues, is requeued or ends."""


class Pauses(HasSnapshot):
    TAKES = (Held, Blocked)
    STATE = Fields(
        {
            int: "number _what",
            bool: "_is_met is_join_due _is_open",
            dict[int, Annotated[Held, OnWire]]: "_held",
            dict[int, int]: "_last_hold _busy",
            dict[tuple[int, int], int]: "_busy_in_group",
            dict[int, tuple[int, int]]: "_busy_at",
            set[int]: "_done _lost",
        }
    )

    def __init__(
        self,
        *,
        num_workers: int,
        groups: Sequence[Sequence[int]],
        staleness: int | None,
        substitutes: Collection[int] = (),
        may_miss: bool = False,
    ) -> None:
        """``staleness``: how many iterations a group may be ahead of another before it waits for
        it: 0 in sync, None in async; ``substitutes``: workers that have still to join;
        ``may_miss``: whether rounds may close without some groups."""
        self._num_workers = num_workers
        self._group_of = {worker: index for index, each in enumerate(groups) for worker in each}
        self._staleness = staleness
        self._may_miss = may_miss
        self.number = 0
        """Number of the last pause that has ended."""
        self._is_met = False
        """Whether that one was not cancelled, and what it is for has still to follow."""
        self.is_join_due = False
        """True if it was for a join, and no worker has entered that collective yet."""
        self._is_open = False
        self._what = 0
        self._held: dict[int, Held] = {}
        """By worker, those that hold now."""
        self._last_hold: dict[int, int] = {}
        self._busy: dict[int, int] = {}
        """By parameter set, the latest iteration in which a worker is blocked."""
        self._busy_in_group: dict[tuple[int, int], int] = {}
        self._busy_at: dict[int, tuple[int, int]] = {}
        """By worker that has not held since, the set and the iteration in which it waits."""
        self._done: set[int] = set()
        self._lost: set[int] = set(substitutes)
        """Workers that are not in the job: not any more, or not yet."""

    def on_told(
        self, worker: int, message: Held | Blocked, *, is_collecting: bool
    ) -> list[SendControl]:
        """``is_collecting``: a worker waits in a collective. Raises :class:`ProtocolError` for a
        message that cannot be."""
        if message.number <= self.number:
            return []  # it crossed the end of that one
        if message.number > self.number + 1 or worker in self._done:
            raise ProtocolError(
                f"worker {worker} speaks of meeting {message.number} after {self.number}"
                f"{', and its script has finished' if worker in self._done else ''}"
            )
        if isinstance(message, Held):
            return self._on_held(message, is_collecting=is_collecting)
        return self._on_busy(message)

    def _on_held(self, message: Held, *, is_collecting: bool) -> list[SendControl]:
        worker = message.worker
        if message.what not in REASONS or not message.clocks or min(message.clocks) < 0:
            raise ProtocolError(
                f"worker {worker} holds for {message.what[:40]!r} at clocks {message.clocks[:8]}"
            )
        if message.hold <= self._last_hold.get(worker, 0):
            return []  # a second delivery
        self._last_hold[worker] = message.hold
        self._held[worker] = message
        self._busy_at.pop(worker, None)
        if self._done:
            return self._end(PauseAborted(number=message.number))
        actions = [] if self._is_open else self._open(worker, message.number)
        self._what = max(self._what, REASONS.index(message.what))
        if len(self._held) + len(self._lost) == self._num_workers:
            return actions + self._end(Paused(number=message.number, what=REASONS[self._what]))
        if is_collecting or self._is_in_the_way(message):
            actions += self._release([worker])
        return actions

    def _open(self, worker: int, number: int) -> list[SendControl]:
        self._is_open = True
        others = (
            each for each in range(self._num_workers) if each != worker and each not in self._lost
        )
        return [SendControl(worker_id(each), PauseRequest(number=number)) for each in others]

    def call(self) -> list[SendControl]:
        """The coordinator itself has a reason, the weakest one."""
        if self._is_open or self._done:
            return []
        return self._open(-1, self.number + 1)

    def _on_busy(self, message: Blocked) -> list[SendControl]:
        if message.clock < 0 or not self._is_open:
            raise ProtocolError(
                f"worker {message.worker} waits in iteration {message.clock} of a meeting that "
                f"{'is' if self._is_open else 'is not'} open"
            )
        self._held.pop(message.worker, None)
        index = message.set_index
        self._busy_at[message.worker] = index, message.clock
        self._busy[index] = max(self._busy.get(index, -1), message.clock)
        key = self._group(message.worker), index
        self._busy_in_group[key] = max(self._busy_in_group.get(key, -1), message.clock)
        return self._release(
            [each for each, held in sorted(self._held.items()) if self._is_in_the_way(held)]
        )

    def _group(self, worker: int) -> int:
        return self._group_of.get(worker, -1 - worker)

    def _is_in_the_way(self, held: Held) -> bool:
        """True if a worker waits for the next push of this one."""
        group = self._group(held.worker)
        for index, clock in enumerate(held.clocks):
            if clock <= self._busy_in_group.get((group, index), -1):
                return True
            latest = self._busy.get(index, -1)
            if self._staleness is not None and clock <= latest - self._staleness:
                return True
        # Who has missed just the round in which it waits is told at once.
        return self._may_miss and any(
            held.clocks[index] > clock + 1 for index, clock in self._busy_at.values()
        )

    def _release(self, workers: Sequence[int]) -> list[SendControl]:
        return [
            SendControl(
                worker_id(each), Proceed(number=self.number + 1, hold=self._held.pop(each).hold)
            )
            for each in workers
        ]

    def on_called(self, name: str) -> bool:
        """The first worker has called a collective. True if it is called in a meeting."""
        if name == JOIN:
            self.is_join_due = False
        return name in (WRITTEN, JOIN) or (name == CHECKPOINT and self._take_met())

    def on_entered(self) -> list[SendControl]:
        """A worker waits in a collective. Release those that hold, which must enter it."""
        return self._release(sorted(self._held)) if self._is_open else []

    def _take_met(self) -> bool:
        """Whether the checkpoint that begins now is what all have met for; asked once of each."""
        is_met, self._is_met = self._is_met, False
        return is_met

    def on_done(self, worker: int) -> list[SendControl]:
        """A worker's script has finished."""
        self._done.add(worker)
        self._held.pop(worker, None)
        if not self._is_open:
            return []
        return self._end(PauseAborted(number=self.number + 1))

    def on_lost(self, workers: Collection[int]) -> list[SendControl]:
        """These are out of the job: no worker waits for them to hold."""
        self._lost.update(workers)
        for worker in workers:
            self._held.pop(worker, None)
        if not self._is_open or len(self._held) + len(self._lost) < self._num_workers:
            return []
        return self._end(Paused(number=self.number + 1, what=REASONS[self._what]))

    def admit(self, substitute: int) -> list[SendControl]:
        """It is in the job from now on."""
        self._lost.remove(substitute)
        if not self._is_open:
            return []
        return [SendControl(worker_id(substitute), PauseRequest(number=self.number + 1))]

    def _end(self, message: Paused | PauseAborted) -> list[SendControl]:
        self.number += 1
        self._is_met = isinstance(message, Paused)
        self.is_join_due = isinstance(message, Paused) and message.what == JOIN
        self._is_open, self._what = False, 0
        self._held.clear()
        self._busy.clear()
        self._busy_in_group.clear()
        self._busy_at.clear()
        return [
            SendControl(worker_id(each), message)
            for each in range(self._num_workers)
            if each not in self._done and each not in self._lost
        ]
