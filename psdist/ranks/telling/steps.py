"""Local steps by speed or by the loss, for the run's files and for people: what groups' steps have
taken or scripts reported, and what was made of it.

steps = StepReports(config, run_directory)
steps.chosen(StepsChosen(...))       # says so in the log
steps.words, steps.told()            # of steps by the loss: at the end, and for summary.json
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any, Final

from psdist.config.outer import counted_steps
from psdist.config.settings import RunConfig
from psdist.controller.kept import Fidelity, KeptSteps, Rollback
from psdist.controller.steps import first_of
from psdist.history.hands import STEP_LINES
from psdist.report.run_directory import RunDirectory
from psdist.servers.protocol.checkpoints import KeepFidelity
from psdist.servers.protocol.losses import LossHeard
from psdist.servers.protocol.steps import StepsChosen, StepsObserved

logger = logging.getLogger("psdist")

_MOST_SHOWN = 16
_SILENT_BLOCKS: Final = 3
"""When so many blocks have begun without a loss, people hear of it."""


class StepReports:
    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        *,
        kept: KeptSteps | None = None,
        why: str = "settings",
    ) -> None:
        """``kept``: what the job goes on with of steps by the loss, and ``why``."""
        self._config = config
        self._directory = directory
        self._has_loss = False
        self._by_loss: list[dict[str, Any]] = []
        """How many steps all groups have made, from which round on, and why."""
        if config.steps_by == "loss":
            starts = ((0, counted_steps(config)),) if kept is None else kept.starts
            for block, steps in starts:
                self._by_loss.append({"round": first_of(block), "steps": steps, "why": why})

    def kept(self, action: KeepFidelity) -> None:
        """It is part of a checkpoint."""
        self._append("kept", asdict(action))

    def rolled_back(self, rollback: Rollback) -> None:
        """The loss has blown up, with which the job ends."""
        self._append("rolled_back", asdict(rollback))

    def resumed(self, checkpoint: str, fidelity: Fidelity) -> None:
        """First of all: the job has gone on with this."""
        self._append("resumed", {"checkpoint": checkpoint, "fidelity": asdict(fidelity)})

    def observed(self, seen: StepsObserved) -> None:
        line = {"group": seen.group, "round": seen.round, "step_us": seen.step_us}
        self._append("observed", line)

    def heard(self, loss: LossHeard) -> None:
        self._has_loss = True
        line = {"worker": loss.worker, "round": loss.round}
        self._append("reported", {**line, "count": loss.count, "total": loss.total})

    def chosen(self, choice: StepsChosen) -> None:
        loader, number, block = choice.term
        line = {"loader": loader, "number": number, "block": block, "steps": list(choice.steps)}
        self._append("fixed", {**line, "why": choice.why})
        if choice.why and self._config.steps_by == "loss":
            change = {"round": first_of(block), "steps": choice.steps[0], "why": choice.why}
            self._by_loss.append(change)
            logger.info("local steps: %d (%s)", choice.steps[0], choice.why)
        elif choice.why:
            shown = ", ".join(map(str, choice.steps[:_MOST_SHOWN]))
            more = ", ..." * (len(choice.steps) > _MOST_SHOWN)
            logger.info("local steps by group: %s%s (%s)", shown, more, choice.why)
        if self._config.steps_by == "loss" and block == _SILENT_BLOCKS and not self._has_loss:
            logger.warning(
                "local.steps_by = loss: no loss was reported in the first %d rounds; rounds stay "
                "at %d local steps until the script calls job.report(loss)",
                first_of(_SILENT_BLOCKS),
                choice.steps[0],
            )

    def told(self) -> list[dict[str, Any]]:
        """Nothing where the loss decides nothing."""
        return self._by_loss

    @property
    def words(self) -> str:
        """Of the whole run."""
        if not self._by_loss:
            return ""
        first, *others = self._by_loss
        changes = [f"{each['steps']} from {each['round']}" for each in others]
        return ", ".join([f"local steps {first['steps']}", *changes])

    def _append(self, key: str, line: dict[str, Any]) -> None:
        """Kept with the history."""
        if self._config.record:
            self._directory.append(STEP_LINES, {key: line})
