"""The coordinator's state machine that fixes the local steps of each group, term by term; pure.

Each worker sends one request per term (:class:`psdist.controller.steps.Term`), and all get the
same answer. So the coordinator announces no steps, and a worker always has the steps of every
group before it deals or makes a round.

The first request fixes a term, from the reports that have arrived until then. In sync, steps by the
loss are fixed later: when each worker has sent a request, is done, or waits in a collective. All
earlier reports have arrived by then, in whatever order messages come.

    steps = FixedSteps(control, num_workers=4, leaders={0: 0, 2: 1}, waits=False)
    steps.on_took(RoundTook(worker=2, round=0, step_us=900))
    steps.on_ask(AskSteps(worker=0, loader=1, number=0, block=1))       # StepsFixed for worker 0
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from psdist.controller.kept import (
    KeptPaces,
    KeptPass,
    KeptSteps,
    Rollback,
    TuningState,
    at_place,
    from_place,
    rolled_back,
)
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.observed import StepsObserved
from psdist.controller.rollback import Rise
from psdist.controller.snapshots import Fields, Nested
from psdist.controller.steps import StepControl, Term, window_of
from psdist.errors import ProtocolError
from psdist.protocol.control import AskSteps, Control, LossReported, RoundTook, StepsFixed
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.coordinator import Actions, Coordinator, CoordinatorPart


@dataclass(frozen=True, slots=True)
class StepsChosen:
    """Each group makes these steps in a round of the term. ``why``: reason for a change."""

    term: Term
    steps: tuple[int, ...]
    why: str


StepsAction = SendControl | StepsObserved | StepsChosen


@dataclass(slots=True)
class _Asked:
    steps: tuple[int, ...] | None = None
    """None until they are fixed."""
    workers: set[int] = field(default_factory=set)


class FixedSteps(CoordinatorPart):
    NAME = "steps"
    TAKES = (RoundTook, AskSteps)
    STATE = Fields(
        {
            Nested: "_control",
            dict[tuple[int, int], KeptPass]: "_passes",
            dict[int, dict[int, int]]: "_newest",
            dict[Term, _Asked]: "_terms",
            list[tuple[int, int]]: "_starts",
            int: "_num_fixed _num_before",
        }
    )

    def __init__(
        self,
        control: StepControl | LossStepControl,
        *,
        num_workers: int,
        leaders: Mapping[int, int],
        waits: bool = False,
        keeps_passes: bool = False,
    ) -> None:
        """``leaders``: worker -> the group that it leads; ``waits``: True if a term is fixed only
        when all workers that may still ask have asked; ``keeps_passes``: True if groups may be in
        different hands of a pass when a checkpoint is made (steps by speed)."""
        self._control = control
        self._num_workers = num_workers
        self._leaders = leaders
        self._waits = waits
        self._keeps_passes = keeps_passes
        self._passes: dict[tuple[int, int], KeptPass] = {}
        """By loader and number: the passes that some worker may be in."""
        self._newest: dict[int, dict[int, int]] = {}
        """By loader and worker: the pass of its last request."""
        self._terms: dict[Term, _Asked] = {}
        """Terms for which some worker has not asked yet."""
        self._starts: list[tuple[int, int]] = []
        """Steps by the loss, as (first block, steps)."""
        self._num_fixed = 0
        """The first block whose steps by the loss are not fixed yet."""
        self._num_before = 0
        """Number of blocks that were fixed before the checkpoint that the run resumes."""
        if isinstance(control, LossStepControl):
            self._starts.append((0, control.now))

    def handle(self, peer: int, message: Control, job: Coordinator) -> Actions:
        assert isinstance(message, RoundTook | AskSteps)
        job.require_worker(peer, message.worker, message)
        if isinstance(message, RoundTook):
            return [*self.on_took(message)]
        return [*self.on_ask(message, job.away)]

    def on_away(self, job: Coordinator) -> Actions:
        return [*self.fix(job.away)]

    on_membership_changed = on_away

    def keep(self, tuning_state: TuningState, clock: int) -> TuningState:
        return replace(tuning_state, steps=self.kept(clock), paces=self.kept_paces())

    def kept(self, clock: int) -> KeptSteps | None:
        """Return the steps for a checkpoint of ``clock`` rounds of the slowest group; None unless
        they are by the loss. Blocks that have begun continue in the resumed run."""
        if not isinstance(self._control, LossStepControl):
            return None
        starts = from_place(self._starts, window_of(clock))
        return self._control.kept(starts, self._num_fixed)

    def kept_paces(self) -> KeptPaces | None:
        """As :meth:`kept`, for steps by speed."""
        if not isinstance(self._control, StepControl):
            return None
        passes = tuple(each for _, each in sorted(self._passes.items()))
        return replace(self._control.kept(), passes=passes)

    def rolled_back(self, round_number: int, rise: Rise) -> Rollback:
        """Return what follows from a loss that has blown up in this round."""
        most = max(steps for _, steps in from_place(self._starts, window_of(rise.good)))
        return rolled_back(round_number, rise, most)

    def go_on(self, kept: KeptSteps) -> None:
        """Resume, before any request. Raises ValueError for choices of another kind of run."""
        if not isinstance(self._control, LossStepControl):
            raise ValueError("of local steps by the loss")
        self._control.go_on(kept)
        self._starts = [*kept.starts]
        self._num_fixed = self._num_before = kept.num_fixed

    def go_on_at_pace(self, kept: KeptPaces) -> None:
        """As :meth:`go_on`, for steps by speed."""
        if not isinstance(self._control, StepControl):
            raise ValueError("of local steps by speed")
        self._control.go_on(kept)
        if kept.sizes == self._control.sizes:
            self._passes = {(each.loader, each.number): each for each in kept.passes}

    def on_took(self, message: RoundTook) -> list[StepsAction]:
        group, control = self._leaders.get(message.worker), self._control
        is_damaged = group is None or min(message.round, message.step_us) < 0
        if not isinstance(control, StepControl) or group is None or is_damaged:
            raise ProtocolError(
                f"the coordinator: worker {message.worker} sent RoundTook of round "
                f"{message.round}, {message.step_us} us, which is unasked, damaged or of no leader"
            )
        control.observe(group, message.step_us)
        return [StepsObserved(group, message.round, message.step_us)]

    def report(self, message: LossReported) -> bool:
        """Take a reported loss. Return False if it is invalid, or steps are not by the loss."""
        if not isinstance(self._control, LossStepControl) or message.total < 0:
            return False
        self._control.report(message.worker, message.count, message.total)
        return True

    def on_ask(self, message: AskSteps, away: Collection[int] = ()) -> list[StepsAction]:
        """``away``: workers that are done, or wait in a collective."""
        term = Term(message.loader, message.number, message.block)
        asked = self._terms.setdefault(term, _Asked())
        if message.worker in asked.workers or min(term) < 0:
            raise ProtocolError(
                f"the coordinator: worker {message.worker} sent AskSteps of {term}, twice or "
                "damaged"
            )
        asked.workers.add(message.worker)
        if self._keeps_passes:
            self._note_asked(message.worker, term)
        if asked.steps is None and (known := self._passes.get((term.loader, term.number))):
            asked.steps = known.steps_of(term.block)
        if asked.steps is None:
            return self.fix(away)
        actions: list[StepsAction] = [_answer(term, asked.steps, message.worker)]
        self._drop_if_over(term)
        return actions

    def fix(self, away: Collection[int]) -> list[StepsAction]:
        """Fix the terms that no longer wait for any worker."""
        actions: list[StepsAction] = []
        for term, asked in tuple(self._terms.items()):
            control = self._control
            is_before = isinstance(control, LossStepControl) and term.block < self._num_before
            if asked.steps is None and is_before:
                assert isinstance(control, LossStepControl)
                asked.steps = control.of_all(at_place(tuple(self._starts), term.block))
                actions += [_answer(term, asked.steps, each) for each in sorted(asked.workers)]
                self._drop_if_over(term)
            is_awaited = self._waits and len(asked.workers.union(away)) < self._num_workers
            if asked.steps is not None or is_awaited:
                continue
            choice = control.choose()
            asked.steps = choice.steps
            if isinstance(control, LossStepControl):
                if choice.steps[0] != self._starts[-1][1]:
                    self._starts.append((term.block, choice.steps[0]))
                self._num_fixed = max(self._num_fixed, term.block + 1)
            elif self._keeps_passes:
                self._keep(term, choice.steps)
            actions.append(StepsChosen(term, choice.steps, choice.why))
            actions += [_answer(term, choice.steps, worker) for worker in sorted(asked.workers)]
            self._drop_if_over(term)
        return actions

    def _note_asked(self, worker: int, term: Term) -> None:
        """A worker that asks for a pass over a loader has left the passes before it: no worker
        begins one inside another (:mod:`psdist.workers.data.assignments`)."""
        newest = self._newest.setdefault(term.loader, {})
        if newest.get(worker, -1) == term.number:
            return
        newest[worker] = term.number
        if len(newest) == self._num_workers:
            oldest = min(newest.values())
            for loader, number in [*self._passes]:
                if loader == term.loader and number < oldest:
                    del self._passes[loader, number]

    def _keep(self, term: Term, steps: tuple[int, ...]) -> None:
        """Keep the fixed steps of the term with its pass."""
        loader, number, block = term
        known = self._passes.get((loader, number))
        if known is None or known.num_fixed != block:
            starts = ((block, steps),)
            known = KeptPass(loader=loader, number=number, starts=starts, num_fixed=block + 1)
        else:
            known = known.then(block, steps)
        self._passes[loader, number] = known

    def _drop_if_over(self, term: Term) -> None:
        if len(self._terms[term].workers) == self._num_workers:
            del self._terms[term]


def _answer(term: Term, steps: tuple[int, ...], worker: int) -> SendControl:
    loader, number, block = term
    fixed = StepsFixed(loader=loader, number=number, block=block, steps=list(steps))
    return SendControl(worker_id(worker), fixed)
