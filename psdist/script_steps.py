"""Rounds whose number of local steps the run decides: by the loss that the script reports, by the
speed of each group, or by the script's passes; and their records.

    steps = LossSteps(context, loop, losses, worker=0, group=0)            # steps_by = loss
    steps = SpeedSteps(context, loop, worker=0, group=0, sets=..., ...)     # steps_by = speed
    steps.length                                   # of rounds
    steps.allocation                               # SpeedSteps: how loaders share out samples
    steps.close()

    passes = ScriptPasses(context, worker=0, is_in_pass=..., sets=...)      # local_steps = epoch
    passes.end(is_whole=True, num_steps=250)       # by the loaders
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from psdist.controller.steps import Term
from psdist.history.lines import HandLine, LengthLine, LineRecords, PassLine, WorkerLine
from psdist.history.writers import history_folder
from psdist.prepared import ParameterSets
from psdist.protocol.control import RoundTook
from psdist.protocol.ids import COORDINATOR
from psdist.ranks.session import JobSession
from psdist.workers.data.assignments import Allocation, AssignedPart
from psdist.workers.loop import WorkerLoop
from psdist.workers.progress_reports import Losses, tell_losses
from psdist.workers.rounds.lengths import PassSteps, StepsByLoss, StepsBySpeed

L = TypeVar("L", bound=WorkerLine)


class _Recorded:
    """Opens records of a worker, if the run is recorded, and closes them."""

    def __init__(self, context: JobSession, worker: int) -> None:
        self._context = context
        self._worker = worker
        self._open: list[LineRecords[Any]] = []
        self._lengths: LineRecords[LengthLine] | None = None

    def _records(self, kind: type[L]) -> LineRecords[L] | None:
        if not self._context.config.record:
            return None
        folder = history_folder(self._context.run_directory.path, 0)
        records = LineRecords(folder, self._worker, kind)
        self._context.exit.flushes.append(records.flush)
        self._open.append(records)
        return records

    def _end_round(self, clock: int, num_steps: int) -> None:
        if self._lengths is not None:
            self._lengths.add(round=clock, steps=num_steps)

    def close(self) -> None:
        for records in self._open:
            records.close()


class LossSteps(_Recorded):
    def __init__(
        self, context: JobSession, loop: WorkerLoop, losses: Losses, *, worker: int, group: int
    ) -> None:
        """``losses``: reported by the script."""
        super().__init__(context, worker)
        self._lengths = self._records(LengthLine)
        self.length = StepsByLoss(
            group=group,
            steps_of=loop.steps_of,
            tell=lambda clock: tell_losses(losses, worker, clock, context.transport),
            on_round=self._end_round,
        )


class SpeedSteps(_Recorded):
    def __init__(
        self,
        context: JobSession,
        loop: WorkerLoop,
        *,
        worker: int,
        group: int,
        is_leader: bool,
        sets: Callable[[], ParameterSets],
        is_training: Callable[[], bool],
        require_open: Callable[[str], None],
    ) -> None:
        """``is_leader``: this worker reports its group's rounds; ``require_open(what)`` raises
        :class:`UsageError` after the end of the job."""
        super().__init__(context, worker)
        self._loop = loop
        self._is_leader = is_leader
        self._sets = sets
        self._is_training = is_training
        self._require_open = require_open
        self._assignments = self._records(HandLine)
        self.length = StepsBySpeed(
            group=group, steps_of=loop.steps_of, tell=self._tell, now_s=context.rank.now_s
        )
        groups = context.roles.groups
        self.allocation = Allocation(
            sizes=tuple(map(len, groups)),
            group=group,
            place=groups[group].index(worker),
            steps_of=self._steps_of,
            on_batch=self._on_assigned,
        )

    def _tell(self, clock: int, step_us: int) -> None:
        if self._is_leader:
            took = RoundTook(worker=self._worker, round=clock, step_us=step_us)
            self._context.transport.send_control(COORDINATOR, took)

    def _clock(self) -> int:
        trainers = self._sets().trainers
        return trainers[0].clock if trainers else 0

    def _steps_of(self, term: Term) -> tuple[int, ...]:
        """Return the local steps of each group in a term, after the coordinator has sent them."""
        self._require_open("loader")
        sets = self._sets()
        sets.take_over()
        self._loop.begin_waiting(self._clock())
        asking = self._loop.steps_of(term)
        while True:
            try:
                self._loop.carry_on(next(asking))
            except StopIteration as done:
                steps: tuple[int, ...] = done.value
                sets.resume()
                return steps

    def _on_assigned(self, part: AssignedPart | None) -> None:
        if self._is_training():
            self.length.begin_batch(ends_assignment=part is not None)
        if part is not None and self._assignments is not None:
            clock = self._clock() if self._is_training() else -1
            self._assignments.add(round=clock, **asdict(part))


class ScriptPasses(_Recorded):
    def __init__(
        self,
        context: JobSession,
        *,
        worker: int,
        is_in_pass: Callable[[], bool],
        sets: Callable[[], ParameterSets],
    ) -> None:
        """``is_in_pass()``: True if a pass is under way in which steps were made."""
        super().__init__(context, worker)
        self._sets = sets
        self._lengths = self._records(LengthLine)
        self._passes = self._records(PassLine)
        self.length = PassSteps(
            is_in_pass=is_in_pass,
            on_round=self._end_round,
        )

    def end(self, is_whole: bool, num_steps: int) -> None:
        """End the round of a pass that has trained. ``num_steps``: of this worker in all passes;
        ``is_whole``: the script has had all batches of the pass."""
        sets = self._sets()
        sets.take_over()
        for trainer in sets.trainers:  # there is one
            round_number = trainer.end_round("the next batch", is_cut=not is_whole)
            if self._passes is not None:
                self._passes.add(steps=num_steps, round=round_number, is_whole=is_whole)
        sets.resume()
