"""Pauses: all workers hold at an iteration boundary without a call of the script; pure.

A worker with a reason (a checkpoint is due, a signal came) holds at its next boundary and reports
that. The other workers get a request to hold at theirs. A worker may be blocked: it waits in a
step, or in a collective, for a worker that holds. It reports what it waits in, and the workers in
its way proceed to their next boundary. When all hold, the pause begins. A worker whose script has
finished never holds again, so the pause is aborted.

    pauses = Pauses(num_workers=2, groups=((0,), (1,)), waits=[waits_within(0)])
    held = Held(worker=0, number=1, hold=1, what="checkpoint", clocks=[7])
    pauses.on_told(0, held, is_collecting=False)                        # PauseRequest for worker 1
    blocked = Blocked(worker=1, number=1, set_index=0, clock=7)
    pauses.on_told(1, blocked, is_collecting=False)                     # Proceed for worker 0
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, TypeAlias

from psdist.controller.snapshots import Fields, HasSnapshot
from psdist.errors import ProtocolError
from psdist.protocol.checkpoints import CHECKPOINT, WRITTEN
from psdist.protocol.collected import JOIN
from psdist.protocol.control import Blocked, Held, PauseAborted, Paused, PauseRequest, Proceed
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.snapshots import OnWire

REASONS = (JOIN, "checkpoint", "requeue", "end")
"""Purposes of a pause, the weakest first: a substitute joins; a checkpoint is made, and the job
then continues, is requeued or ends."""
_CALLED_FOR = {"": ""} | dict.fromkeys(REASONS, CHECKPOINT) | {JOIN: JOIN}
"""Purpose -> the collective that workers call for it after the pause."""

Waits: TypeAlias = Callable[[int, int], bool]
"""``waits(blocked, held)``: True if a worker in iteration ``blocked`` of a set may wait for one of
another group that holds after ``held`` iterations."""


def waits_within(staleness: int) -> Waits:
    """Return what waits in sync (0) and ssp: a group is at most ``staleness`` iterations ahead of
    every other group."""
    return lambda blocked, held: held <= blocked - staleness


class Pauses(HasSnapshot):
    TAKES = (Held, Blocked)
    STATE = Fields(
        {
            int: "number _what",
            str: "due",
            bool: "_is_open",
            dict[int, Annotated[Held, OnWire]]: "_held",
            dict[int, int]: "_last_hold",
            dict[int, tuple[int, int]]: "_blocked",
            set[int]: "_done _lost",
        }
    )

    def __init__(
        self,
        *,
        num_workers: int,
        groups: Sequence[Sequence[int]],
        waits: Sequence[Waits] = (),
        substitutes: Collection[int] = (),
    ) -> None:
        """``waits``: when workers of different groups wait for one another, nothing in async;
        ``substitutes``: workers that have still to join."""
        self._num_workers = num_workers
        self._group_of = {worker: index for index, each in enumerate(groups) for worker in each}
        self._waits = waits
        self.number = 0
        """Number of the last pause that has ended."""
        self.due = ""
        """Purpose of that pause until a worker enters its collective; "" after that, and after a
        pause that was aborted."""
        self._is_open = False
        self._what = 0
        self._held: dict[int, Held] = {}
        """By worker, those that hold now."""
        self._last_hold: dict[int, int] = {}
        self._blocked: dict[int, tuple[int, int]] = {}
        """By worker that has not held since: the set and the iteration in which it waits."""
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
        return self._on_blocked(message)

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
        self._blocked.pop(worker, None)
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

    def _on_blocked(self, message: Blocked) -> list[SendControl]:
        if message.clock < 0 or not self._is_open:
            raise ProtocolError(
                f"worker {message.worker} waits in iteration {message.clock} of a meeting that "
                f"{'is' if self._is_open else 'is not'} open"
            )
        self._held.pop(message.worker, None)
        self._blocked[message.worker] = message.set_index, message.clock
        return self._release(
            [each for each, held in sorted(self._held.items()) if self._is_in_the_way(held)]
        )

    def _is_in_the_way(self, held: Held) -> bool:
        """True if a blocked worker may wait for the next push of this one."""
        for worker, (index, clock) in self._blocked.items():
            if index >= len(held.clocks):
                continue
            mine, group = held.clocks[index], self._group_of.get(held.worker)
            is_of_group = group is not None and group == self._group_of.get(worker)
            if is_of_group and mine <= clock:
                return True
            if any(waits(clock, mine) for waits in self._waits):
                return True
        return False

    def _release(self, workers: Sequence[int]) -> list[SendControl]:
        return [
            SendControl(
                worker_id(each), Proceed(number=self.number + 1, hold=self._held.pop(each).hold)
            )
            for each in workers
        ]

    def on_called(self, name: str) -> bool:
        """The first worker has called a collective. Return True if psdist calls it in a pause."""
        is_due = name == _CALLED_FOR[self.due]
        if is_due:
            self.due = ""
        return is_due or name in (WRITTEN, JOIN)

    def on_entered(self) -> list[SendControl]:
        """A worker waits in a collective. Release those that hold, which must enter it."""
        return self._release(sorted(self._held)) if self._is_open else []

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
        self.due = message.what if isinstance(message, Paused) else ""
        self._is_open, self._what = False, 0
        self._held.clear()
        self._blocked.clear()
        return [
            SendControl(worker_id(each), message)
            for each in range(self._num_workers)
            if each not in self._done and each not in self._lost
        ]
