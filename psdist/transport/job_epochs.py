"""Job epochs: control messages of one job of a process never reach the next job. Pure.

A process may run several jobs in sequence. Its ranks pass the same epochs: waiting (0), job 1 (1),
waiting (2), job 2 (3). Each rank enters an epoch when the coordinator's message arrives. A control
message carries the epoch of its sender (``generation`` on the wire). A message of an earlier epoch
is dropped; one of a later epoch waits here. Messages with payload are all complete when a job ends
and carry no epoch; one that comes after a waiting message waits, too. The end of the job belongs to
every epoch: each later poll raises.

    epochs = JobEpochs()
    epochs.admits(event, epoch=header.generation)     # True: return it from poll
    for event in epochs.advance(): ...                # messages that have waited for this epoch
"""

from __future__ import annotations

from collections import deque

from psdist.errors import JobEndedError, ProtocolError
from psdist.protocol.control import Ended, Failure
from psdist.protocol.events import Arrived, ControlArrived, Event, Offered
from psdist.protocol.header import MOST_CREDITS
from psdist.protocol.ids import describe_peer


class JobEpochs:
    def __init__(self) -> None:
        self.now = 0
        self.waiting: dict[int, deque[tuple[int, Event]]] = {}
        """Peer -> (epoch, event), in order of arrival."""
        self._ended: Ended | None = None

    def admits(self, event: ControlArrived, *, epoch: int) -> bool:
        """True if the event is of the current epoch. Otherwise it waits here, or is dropped.
        Raises :class:`JobEndedError`."""
        if isinstance(event.message, Ended):
            self._ended = event.message
            self.require_not_ended()
        # The reason for the end of a job belongs to every epoch.
        if epoch == self.now or isinstance(event.message, Failure):
            return True
        if epoch > self.now:
            self._wait(event.peer, epoch, event)
        return False

    def require_not_ended(self) -> None:
        """Raise :class:`JobEndedError` if a rank has ended the job, again if a script has caught
        an earlier one."""
        if self._ended is not None:
            raise JobEndedError(self._ended.exit_status)

    def admits_data(self, event: Offered | Arrived) -> bool:
        """As :meth:`admits`, for a message without an epoch: it keeps its place."""
        if not self.waiting or event.peer not in self.waiting:
            return True
        epoch, _ = self.waiting[event.peer][-1]
        self._wait(event.peer, epoch, event)
        return False

    def _wait(self, peer: int, epoch: int, event: Event) -> None:
        waiting = self.waiting.setdefault(peer, deque())
        if len(waiting) >= MOST_CREDITS:
            raise ProtocolError(
                f"{describe_peer(peer)} sent {MOST_CREDITS} messages of a job that has not begun"
            )
        waiting.append((epoch, event))

    def advance(self) -> list[Event]:
        """Enter the next epoch; return its messages that have arrived already."""
        self.now += 1
        events: list[Event] = []
        for peer, waiting in list(self.waiting.items()):
            while waiting and waiting[0][0] <= self.now:
                events.append(waiting.popleft()[1])
            if not waiting:
                del self.waiting[peer]
        return events
