"""Which control messages are of now: what keeps one job of a process out of the next; pure.

A process may take part in several jobs, one after another, and all its ranks go the same way
through them: from waiting (generation 0) into job 1 (generation 1), back to waiting (2), into job 2
(3). They do so one by one, each when it is told. A control message carries the generation that its
sender was in: of an earlier one it is late and dropped, of a later one it waits until its receiver
has got there. Messages with payload are all accounted for when a job ends, so they carry none; one
that comes behind a message that waits, waits as well. The end of the job is of every generation,
and nobody decides anything about it: it is an error for whoever asks for messages from then on.

    generations = Generations()
    generations.admits(event, generation=header.generation)     # hand it out now?
    for event in generations.advance(): ...                     # what has waited for this
"""

from __future__ import annotations

from collections import deque

from psdist.errors import JobEndedError, ProtocolError
from psdist.protocol.control import Ended, Failure
from psdist.protocol.events import Arrived, ControlArrived, Event, Offered
from psdist.protocol.header import MOST_CREDITS
from psdist.protocol.ids import describe_peer


class Generations:
    def __init__(self) -> None:
        self.now = 0
        self.waiting: dict[int, deque[tuple[int, Event]]] = {}
        """By peer, in the order in which they came."""
        self._ended: Ended | None = None

    def admits(self, event: ControlArrived, *, generation: int) -> bool:
        """Whether the event is of now; otherwise it waits here, or is dropped. Raises
        :class:`JobEndedError`."""
        if isinstance(event.message, Ended):
            self._ended = event.message
            self.require_not_ended()
        # Why a job ends is never too late to be told, and never too early.
        if generation == self.now or isinstance(event.message, Failure):
            return True
        if generation > self.now:
            self._wait(event.peer, generation, event)
        return False

    def require_not_ended(self) -> None:
        """Raise :class:`JobEndedError` where somebody has ended the job, also if it was raised
        before and a script has caught it."""
        if self._ended is not None:
            raise JobEndedError(self._ended.exit_status)

    def admits_data(self, event: Offered | Arrived) -> bool:
        """As :meth:`admits`, for what carries no generation: it keeps its place."""
        if not self.waiting or event.peer not in self.waiting:
            return True
        generation, _ = self.waiting[event.peer][-1]
        self._wait(event.peer, generation, event)
        return False

    def _wait(self, peer: int, generation: int, event: Event) -> None:
        waiting = self.waiting.setdefault(peer, deque())
        if len(waiting) >= MOST_CREDITS:
            raise ProtocolError(
                f"{describe_peer(peer)} sent {MOST_CREDITS} messages of a job that has not begun"
            )
        waiting.append((generation, event))

    def advance(self) -> list[Event]:
        """Go on to the next generation; what has come of it already."""
        self.now += 1
        events: list[Event] = []
        for peer, waiting in list(self.waiting.items()):
            while waiting and waiting[0][0] <= self.now:
                events.append(waiting.popleft()[1])
            if not waiting:
                del self.waiting[peer]
        return events
