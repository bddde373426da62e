"""The local steps of each group: this worker's requests to the coordinator; pure.

steps = FixedSteps(seat)
steps.ask(Term(1, 0, 3))             # AskSteps for the coordinator
steps.on_fixed(COORDINATOR, StepsFixed(loader=1, number=0, block=3, steps=[11, 11, 32]))
steps.take(Term(1, 0, 3))            # (11, 11, 32)
"""

from __future__ import annotations

from psdist.controller.steps import Term
from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import AskSteps, StepsFixed
from psdist.protocol.ids import COORDINATOR, describe_peer
from psdist.workers.protocol.actions import Action, SendControl
from psdist.workers.protocol.seat import Seat


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
