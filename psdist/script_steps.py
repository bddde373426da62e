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

from psdist.controller.steps import Term
from psdist.history.lines import HandLine, LengthLine, LineRecords, PassLine
from psdist.history.writers import history_folder
from psdist.prepared import ParameterSets
from psdist.protocol.control import RoundTook
from psdist.protocol.ids import COORDINATOR
from psdist.ranks.session import JobSession
from psdist.workers.data.assignments import Allocation, AssignedPart
from psdist.workers.loop import WorkerLoop
from psdist.workers.losses import Losses
from psdist.workers.rounds.lengths import PassSteps, StepsByLoss, StepsBySpeed
from psdist.workers.rounds.trainer import RoundTrainer
from psdist.workers.standing import tell_losses


class LossSteps:
    def __init__(
        self, context: JobSession, loop: WorkerLoop, losses: Losses, *, worker: int, group: int
    ) -> None:
        """``losses``: what the script has reported."""
        self._context = context
        self._losses = losses
        self._worker = worker
        self._lengths: LineRecords[LengthLine] | None = None
        if context.config.record:
            folder = history_folder(context.run_directory.path, 0)
            self._lengths = LineRecords(folder, worker, LengthLine)
            context.exit.flushes.append(self._lengths.flush)
        self.length = StepsByLoss(
            group=group, steps_of=loop.steps_of, tell=self._tell, on_round=self._end_round
        )

    def _tell(self, clock: int) -> None:
        tell_losses(self._losses, self._worker, clock, self._context.transport)

    def _end_round(self, clock: int, num_steps: int) -> None:
        if self._lengths is not None:
            self._lengths.add(round=clock, steps=num_steps)

    def close(self) -> None:
        if self._lengths is not None:
            self._lengths.close()


class SpeedSteps:
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
        """``is_leader``: this worker tells of its group's rounds; ``require_open(what)`` raises
        :class:`UsageError` behind the end of the job."""
        self._context = context
        self._loop = loop
        self._worker = worker
        self._is_leader = is_leader
        self._sets = sets
        self._is_training = is_training
        self._require_open = require_open
        self._hands: LineRecords[HandLine] | None = None
        if context.config.record:
            folder = history_folder(context.run_directory.path, 0)
            self._hands = LineRecords(folder, worker, HandLine)
            context.exit.flushes.append(self._hands.flush)
        self.length = StepsBySpeed(
            group=group, steps_of=loop.steps_of, tell=self._tell, now_s=context.rank.now_s
        )
        groups = context.roles.groups
        self.allocation = Allocation(
            sizes=tuple(map(len, groups)),
            group=group,
            place=groups[group].index(worker),
            steps_of=self._steps_of,
            on_batch=self._on_dealt,
        )

    def _tell(self, clock: int, step_us: int) -> None:
        if self._is_leader:
            took = RoundTook(worker=self._worker, round=clock, step_us=step_us)
            self._context.transport.send_control(COORDINATOR, took)

    def _clock(self) -> int:
        trainers = self._sets().trainers
        return trainers[0].clock if trainers else 0

    def _steps_of(self, term: Term) -> tuple[int, ...]:
        """Local steps of each group in a term, once the coordinator has said them."""
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

    def _on_dealt(self, dealt: AssignedPart | None) -> None:
        if self._is_training():
            self.length.deal(ends_hand=dealt is not None)
        if dealt is not None and self._hands is not None:
            clock = self._clock() if self._is_training() else -1
            self._hands.add(round=clock, **asdict(dealt))

    def close(self) -> None:
        if self._hands is not None:
            self._hands.close()


class ScriptPasses:
    def __init__(
        self,
        context: JobSession,
        *,
        worker: int,
        is_in_pass: Callable[[], bool],
        sets: Callable[[], ParameterSets],
    ) -> None:
        """``is_in_pass()``: whether a pass is under way in which steps were made."""
        self._sets = sets
        self._lengths: LineRecords[LengthLine] | None = None
        self._passes: LineRecords[PassLine] | None = None
        if context.config.record:
            folder = history_folder(context.run_directory.path, 0)
            self._lengths = LineRecords(folder, worker, LengthLine)
            self._passes = LineRecords(folder, worker, PassLine)
            context.exit.flushes += [self._lengths.flush, self._passes.flush]
        self.length = PassSteps(is_in_pass=is_in_pass, on_round=self._end_round)

    def _end_round(self, clock: int, num_steps: int) -> None:
        if self._lengths is not None:
            self._lengths.add(round=clock, steps=num_steps)

    def end(self, is_whole: bool, num_steps: int) -> None:
        """A pass that has trained is over, after so many steps of this worker in all; ``is_whole``:
        the script has had all of its batches."""
        sets = self._sets()
        sets.take_over()
        for trainer in sets.trainers:  # there is one
            assert isinstance(trainer, RoundTrainer)
            round_number = trainer.end_pass(is_whole=is_whole)
            if self._passes is not None:
                self._passes.add(steps=num_steps, round=round_number, is_whole=is_whole)
        sets.resume()

    def close(self) -> None:
        for records in (self._lengths, self._passes):
            if records is not None:
                records.close()
