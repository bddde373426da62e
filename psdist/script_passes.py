"""Rounds of local steps that end with the script's passes over its loaders (``local_steps =
epoch``), and what is recorded of both.

    passes = ScriptPasses(context, worker=0, is_in_pass=..., sets=...)
    passes.length                                  # of rounds
    passes.end(is_whole=True, num_steps=250)       # by the loaders
    passes.close()
"""

from __future__ import annotations

from collections.abc import Callable

from psdist.history.lengths import LengthRecords, PassRecords
from psdist.history.writers import history_folder
from psdist.prepared import ParameterSets
from psdist.ranks.context import RankContext
from psdist.workers.rounds.lengths import PassSteps
from psdist.workers.rounds.trainer import RoundTrainer


class ScriptPasses:
    def __init__(
        self,
        context: RankContext,
        *,
        worker: int,
        is_in_pass: Callable[[], bool],
        sets: Callable[[], ParameterSets],
    ) -> None:
        """``is_in_pass()``: whether a pass is under way in which steps were made."""
        self._sets = sets
        self._lengths: LengthRecords | None = None
        self._passes: PassRecords | None = None
        if context.config.record:
            folder = history_folder(context.run_directory.path, 0)
            self._lengths = LengthRecords(folder, worker)
            self._passes = PassRecords(folder, worker)
            context.flushes += [self._lengths.flush, self._passes.flush]
        self.length = PassSteps(is_in_pass=is_in_pass, on_round=self._end_round)

    def _end_round(self, clock: int, num_steps: int) -> None:
        if self._lengths is not None:
            self._lengths.add(clock, num_steps)

    def end(self, is_whole: bool, num_steps: int) -> None:
        """A pass that has trained is over, after so many steps of this worker in all; ``is_whole``:
        the script has had all of its batches."""
        sets = self._sets()
        sets.take_over()
        for trainer in sets.trainers:  # there is one
            assert isinstance(trainer, RoundTrainer)
            round_number = trainer.end_pass(is_whole=is_whole)
            if self._passes is not None:
                self._passes.add(num_steps, round_number=round_number, is_whole=is_whole)
        sets.resume()

    def close(self) -> None:
        for records in (self._lengths, self._passes):
            if records is not None:
                records.close()
