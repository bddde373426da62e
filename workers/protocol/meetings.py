"""A worker's side of a meeting (psdist.servers.protocol.pauses): hold at a boundary of
iterations until all workers do, or continue to the next boundary; pure.

    meetings = Meetings(worker=3)
    meetings.hold("checkpoint", clocks=[17])    # Held, for the coordinator
    meetings.is_held                            # until an answer has come:
    meetings.take()                             # "checkpoint": all hold; None: continue
"""

from __future__ import annotations

from collections.abc import Sequence

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Blocked, Held, PauseAborted, Paused, PauseRequest, Proceed
from psdist.protocol.ids import COORDINATOR, describe_peer
from psdist.workers.protocol.actions import Action, SendControl


class Meetings:
    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._number = 0
        """Number of the last meeting that has ended."""
        self.is_open = False
        """Whether another worker, or this one, holds."""
        self.is_held = False
        self._hold = 0
        self._committed: str | None = None
        self._doing: tuple[int, int] | None = None
        """The parameter set and iteration of the last step that was begun."""
        self.duplicates = 0

    def go_on(self, number: int) -> None:
        """A substitute has joined after ``number`` meetings of the job."""
        self._number = number

    def hold(self, what: str, *, clocks: Sequence[int]) -> list[Action]:
        """This worker is at a boundary after ``clocks`` iterations of each set."""
        if self.is_held:
            raise InvariantError(f"worker {self._worker} holds already")
        self.is_open = self.is_held = True
        self._hold += 1
        self._committed = None
        message = Held(
            worker=self._worker,
            number=self._number + 1,
            hold=self._hold,
            what=what,
            clocks=list(clocks),
        )
        return [SendControl(COORDINATOR, message)]

    def begin(self, set_index: int, clock: int) -> list[Action]:
        """A step begins, or something else that may wait for others."""
        self._doing = set_index, clock
        return self._busy()

    def _busy(self) -> list[Action]:
        if not self.is_open or self.is_held or self._doing is None:
            return []
        index, clock = self._doing
        message = Blocked(
            worker=self._worker, number=self._number + 1, set_index=index, clock=clock
        )
        return [SendControl(COORDINATOR, message)]

    def take(self) -> str | None:
        """Return what all workers hold for; None if this worker continues."""
        committed, self._committed = self._committed, None
        return committed

    def on_propose(self, peer: int, message: PauseRequest) -> list[Action]:
        if self._is_over(peer, message):
            return []
        if self.is_open:
            return []  # this worker holds, or has held, for the same one
        self.is_open = True
        return self._busy()

    def on_release(self, peer: int, message: Proceed) -> list[Action]:
        if self._is_over(peer, message):
            return []
        if message.hold > self._hold:
            self._refuse(peer, message)
        if message.hold < self._hold or not self.is_held:
            self.duplicates += 1
            return []
        self.is_held = False
        return []

    def on_commit(self, peer: int, message: Paused) -> list[Action]:
        if self._is_over(peer, message):
            return []
        if not self.is_held:
            self._refuse(peer, message)
        self._committed = message.what
        self._end()
        return []

    def on_cancel(self, peer: int, message: PauseAborted) -> list[Action]:
        if not self._is_over(peer, message):
            self._end()
        return []

    def _end(self) -> None:
        self._number += 1
        self.is_open = self.is_held = False

    def _is_over(self, peer: int, message: PauseRequest | Proceed | Paused | PauseAborted) -> bool:
        if peer != COORDINATOR or message.number > self._number + 1:
            self._refuse(peer, message)
        is_over = message.number <= self._number
        self.duplicates += is_over
        return is_over

    def _refuse(self, peer: int, message: object) -> None:
        raise ProtocolError(
            f"worker {self._worker}: {describe_peer(peer)} sent {type(message).__name__} about "
            f"what is no meeting of this worker's"
        )
