"""Local steps by speed, for the run's files and for people: what groups' steps have taken, and what
was made of it.

steps = StepReports(config, run_directory)
steps.chosen(StepsChosen(...))       # says so in the log
"""

from __future__ import annotations

import logging
from typing import Any

from psdist.config.settings import RunConfig
from psdist.history.hands import STEP_LINES
from psdist.report.run_directory import RunDirectory
from psdist.servers.protocol.steps import StepsChosen, StepsObserved

logger = logging.getLogger("psdist")

_MOST_SHOWN = 16


class StepReports:
    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        self._config = config
        self._directory = directory

    def observed(self, seen: StepsObserved) -> None:
        line = {"group": seen.group, "round": seen.round, "step_us": seen.step_us}
        self._append("observed", line)

    def chosen(self, choice: StepsChosen) -> None:
        loader, number, block = choice.term
        line = {"loader": loader, "number": number, "block": block, "steps": list(choice.steps)}
        self._append("fixed", {**line, "why": choice.why})
        if choice.why:
            shown = ", ".join(map(str, choice.steps[:_MOST_SHOWN]))
            more = ", ..." * (len(choice.steps) > _MOST_SHOWN)
            logger.info("local steps by group: %s%s (%s)", shown, more, choice.why)

    def _append(self, key: str, line: dict[str, Any]) -> None:
        """Kept with the history."""
        if self._config.record:
            self._directory.append(STEP_LINES, {key: line})
