"""The history's lines on psdist's own choices, as the coordinator writes them.

    lines = ChoiceLines(config, run_directory)
    lines.append(ModeChanged(...))            # decisions.jsonl or steps.jsonl, in a recorded run

psdist.history.lines declares what a line contains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from psdist.config.codec_rounds import is_controlled
from psdist.config.settings import RunConfig
from psdist.controller.kept import Rollback, TuningState
from psdist.controller.observed import (
    GroupCame,
    GroupGone,
    LevelsSized,
    LossHeard,
    ModeObserved,
    StepsObserved,
)
from psdist.history.lines import DECISION_LINES, STEP_LINES
from psdist.report.run_directory import RunDirectory
from psdist.servers.protocol.checkpoints import KeepTuningState
from psdist.servers.protocol.modes import ModeChanged
from psdist.servers.protocol.steps import StepsChosen

_KINDS: Final[dict[type, str]] = {
    ModeObserved: "observed",
    ModeChanged: "changed",
    LevelsSized: "sized",
    GroupGone: "gone",
    GroupCame: "came",
    KeepTuningState: "kept",
    LossHeard: "reported",
    Rollback: "rolled_back",
    StepsObserved: "observed",
    StepsChosen: "fixed",
}


class ChoiceLines:
    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        self._directory = directory
        self._files = {
            DECISION_LINES: config.record and is_controlled(config),
            STEP_LINES: config.record,
        }
        """Name -> True if this run has the file."""
        self._losses_file = STEP_LINES if config.steps_by == "loss" else DECISION_LINES

    def append(self, fact: object) -> None:
        """Write the line of a fact, if it has one, once if it ends the run."""
        if type(fact) in _KINDS:
            lines = [_line(fact)]
            if isinstance(fact, Rollback):  # an earlier coordinator may have written it
                lines = [*self._directory.missing(self._file_of(fact), lines)]
            self._append(self._file_of(fact), lines)

    def resume(self, checkpoint: str, tuning_state: TuningState) -> None:
        """The first line: the job begins with these choices of ``checkpoint``."""
        name = STEP_LINES if tuning_state.is_of_steps else DECISION_LINES
        line = {"resumed": {"checkpoint": checkpoint, "fidelity": asdict(tuning_state)}}
        self._append(name, [line])

    def written(self, facts: Iterable[object]) -> Sequence[object]:
        """Return those of ``facts``, in the order in which a failed coordinator had to write them,
        that are in decisions.jsonl."""
        mine = [each for each in facts if type(each) in _KINDS]
        mine = [each for each in mine if self._file_of(each) == DECISION_LINES]
        if not self._files[DECISION_LINES]:
            return []
        missing = self._directory.missing(DECISION_LINES, [*map(_line, mine)])
        return mine[: len(mine) - len(missing)]

    def _append(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        if self._files[name]:
            for line in lines:
                self._directory.append(name, line)

    def _file_of(self, fact: Any) -> str:
        match fact:
            case LossHeard():
                return self._losses_file
            case StepsObserved() | StepsChosen() | Rollback(names=()):
                return STEP_LINES
            case KeepTuningState(fidelity=tuning_state) if tuning_state.is_of_steps:
                return STEP_LINES
        return DECISION_LINES


def _line(fact: Any) -> dict[str, Any]:
    line = asdict(fact)
    if isinstance(fact, StepsChosen):
        line = {**fact.term._asdict(), "steps": list(fact.steps), "why": fact.why}
    return {_KINDS[type(fact)]: line}
