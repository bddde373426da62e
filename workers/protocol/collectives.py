"""The collectives of the job, as one worker takes part in them: prepare, save, mean, barrier.

Every worker counts its collectives; the number tells the coordinator which ones belong together.
One is under way at a time. An answer to an earlier one is a duplicate, an answer to one that this
worker has not entered is an error.

    collectives = Collectives(seat)
    collectives.begin("mean", b"", values)  # Enter, for the coordinator
    collectives.on_collected(COORDINATOR, answer)
    collectives.take().of(3)              # what worker 3 brought
"""

from __future__ import annotations

from psdist.controller.steps import Term
from psdist.errors import CollectiveError, InvariantError, ProtocolError
from psdist.protocol.collected import Brought
from psdist.protocol.control import Absent, AskSteps, Collected, Enter, StepsFixed, WhoIsAbsent
from psdist.protocol.ids import COORDINATOR, describe_peer
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import Action, SendControl, Warn


class Collectives:
    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self.seq = 0
        """Number of the last collective that was entered."""
        self.name = ""
        """The name of that collective."""
        self._num_answered = 0
        self._answer: Collected | None = None
        self.duplicates = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a collective was entered and its answer has not come."""
        return self._num_answered < self.seq

    @property
    def is_answered(self) -> bool:
        """Whether the answer is here and was not taken."""
        return self._answer is not None

    def begin(self, name: str, payload: bytes, values: bytes) -> Enter:
        """Enter the next collective; see :class:`psdist.protocol.control.Enter`."""
        if self.is_waiting or self.is_answered:
            raise InvariantError(
                f"worker {self._seat.worker}: {name} began before {self.name}, collective "
                f"{self.seq}, was over"
            )
        self.seq += 1
        self.name = name
        worker = self._seat.worker
        return Enter(worker=worker, seq=self.seq, name=name, payload=payload, values=values)

    def go_on(self, seq: int) -> None:
        """A substitute has joined after ``seq`` collectives of the job."""
        self.seq = self._num_answered = seq

    def on_collected(self, peer: int, message: Collected) -> list[Action]:
        self._check_answer(peer, "Collected", message.seq)
        if message.seq <= self._num_answered:
            self.duplicates += 1
            return []
        self._num_answered = message.seq
        self._answer = message
        return []

    def take(self) -> Brought:
        """Return the contributions of every worker. Raises :class:`CollectiveError`."""
        if self._answer is None:
            raise InvariantError(
                f"worker {self._seat.worker}: collective {self.seq} was taken before its answer"
            )
        answer, self._answer = self._answer, None
        if answer.error:
            raise CollectiveError(answer.error)
        return Brought.decode(answer)

    def ask_who_is_absent(self) -> SendControl:
        return SendControl(COORDINATOR, WhoIsAbsent(worker=self._seat.worker, seq=self.seq))

    def on_absent(self, peer: int, message: Absent) -> list[Action]:
        self._check_answer(peer, "Absent", message.seq)
        if message.seq <= self._num_answered:
            return []  # late: whom it names has come since
        noun = "worker" if len(message.workers) == 1 else "workers"
        names = ", ".join(str(worker) for worker in message.workers)
        more = message.num_absent - len(message.workers)
        names += f" and {more} more" if more > 0 else ""
        return [Warn(f"the collective waits for {noun} {names or 'that are on their way'}")]

    def _check_answer(self, peer: int, name: str, seq: int) -> None:
        if peer != COORDINATOR or not 1 <= seq <= self.seq:
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} sent {name} of collective "
                f"{seq}; this worker has entered {self.seq}, and server {COORDINATOR} answers them"
            )

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself."""
        if not self.seq - 1 <= self._num_answered <= self.seq:
            raise InvariantError(
                f"{self._num_answered} collectives answered, {self.seq} entered: one is under way "
                "at most"
            )
        if self._answer is not None and self._answer.seq != self.seq:
            raise InvariantError(
                f"holds the answer to collective {self._answer.seq}, not to {self.seq}"
            )


class FixedSteps:
    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._answers: dict[Term, tuple[int, ...] | None] = {}
        """By term that was requested and not taken; None: the answer is on its way."""

    def ask(self, term: Term) -> SendControl:
        """Once for each term."""
        if term in self._answers:
            raise InvariantError(f"worker {self._seat.worker} asked for {term} twice")
        self._answers[term] = None
        loader, number, block = term
        return SendControl(
            COORDINATOR,
            AskSteps(worker=self._seat.worker, loader=loader, number=number, block=block),
        )

    def on_fixed(self, peer: int, message: StepsFixed) -> list[Action]:
        term = Term(message.loader, message.number, message.block)
        is_asked = term in self._answers and self._answers[term] is None
        is_whole = len(message.steps) > self._seat.group and min(message.steps) > 0
        if peer != COORDINATOR or not is_asked or not is_whole:
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} sent StepsFixed of {term}, "
                f"{message.steps[:8]}, which is unasked or damaged"
            )
        self._answers[term] = tuple(message.steps)
        return []

    def is_known(self, term: Term) -> bool:
        """Whether the answer is here, and was not taken."""
        return self._answers.get(term) is not None

    def take(self, term: Term) -> tuple[int, ...]:
        """[groups], once."""
        steps = self._answers.get(term)
        if steps is None:
            raise InvariantError(f"worker {self._seat.worker}: {term} was taken before its answer")
        del self._answers[term]
        return steps
