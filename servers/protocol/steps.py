"""Local steps of each group, fixed term by term: the registrar's machine; pure.

Workers ask when they come to a term (:class:`psdist.controller.steps.Term`), each once; the first
one that asks fixes it, by what groups' rounds have taken until then, and all get the same answer.
So nobody has to be told beforehand, and no worker ever deals or makes rounds of which it does not
know every group's steps.

    steps = FixedSteps(control, num_workers=4, leaders={0: 0, 2: 1})
    steps.on_took(RoundTook(worker=2, round=0, step_us=900))
    steps.on_ask(AskSteps(worker=0, loader=1, number=0, block=1))       # StepsFixed for worker 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from psdist.controller.steps import StepControl, Term
from psdist.errors import ProtocolError
from psdist.protocol.control import AskSteps, RoundTook, StepsFixed
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.actions import SendControl


@dataclass(frozen=True, slots=True)
class StepsObserved:
    """A local step of a group has taken so long in a round: for the record."""

    group: int
    round: int
    step_us: int


@dataclass(frozen=True, slots=True)
class StepsChosen:
    """Each group makes these steps in a round of the term. ``why``: of a change, for people."""

    term: Term
    steps: tuple[int, ...]
    why: str


@dataclass(slots=True)
class _Fixed:
    steps: tuple[int, ...]
    asked: set[int] = field(default_factory=set)


class FixedSteps:
    TAKES = (RoundTook, AskSteps)

    def __init__(
        self, control: StepControl, *, num_workers: int, leaders: Mapping[int, int]
    ) -> None:
        """``leaders``: worker -> the group that it leads."""
        self._control = control
        self._num_workers = num_workers
        self._leaders = leaders
        self._fixed: dict[Term, _Fixed] = {}
        """Terms for which some worker has still to ask."""

    def on_took(self, message: RoundTook) -> list[SendControl | StepsObserved | StepsChosen]:
        group = self._leaders.get(message.worker)
        if group is None or min(message.round, message.step_us) < 0:
            raise ProtocolError(
                f"the registrar: worker {message.worker} sent RoundTook of round {message.round}, "
                f"{message.step_us} us, which is damaged or of no leader"
            )
        self._control.observe(group, message.step_us)
        return [StepsObserved(group, message.round, message.step_us)]

    def on_ask(self, message: AskSteps) -> list[SendControl | StepsObserved | StepsChosen]:
        term = Term(message.loader, message.number, message.block)
        actions: list[SendControl | StepsObserved | StepsChosen] = []
        fixed = self._fixed.get(term)
        if fixed is None:
            choice = self._control.choose()
            fixed = self._fixed[term] = _Fixed(choice.steps)
            actions.append(StepsChosen(term, choice.steps, choice.why))
        if message.worker in fixed.asked or min(term) < 0:
            raise ProtocolError(
                f"the registrar: worker {message.worker} sent AskSteps of {term}, twice or damaged"
            )
        fixed.asked.add(message.worker)
        if len(fixed.asked) == self._num_workers:
            del self._fixed[term]
        answer = StepsFixed(
            loader=term.loader, number=term.number, block=term.block, steps=list(fixed.steps)
        )
        return [*actions, SendControl(worker_id(message.worker), answer)]
