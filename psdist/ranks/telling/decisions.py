"""What psdist has observed and decided in a run, for its files and for people.

decisions = DecisionReports(config, run_directory)
decisions.on_action(action)          # keeps what is to be proved, and says what has changed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from psdist.config.codec_rounds import is_controlled
from psdist.config.settings import RunConfig
from psdist.controller.kept import Fidelity, KeptModes, Rollback
from psdist.history.rules.decisions import DECISION_LINES
from psdist.ranks.telling.codecs import CodecReports
from psdist.ranks.telling.modes import ModeReports
from psdist.report.run_directory import RunDirectory
from psdist.servers.protocol.checkpoints import KeepFidelity
from psdist.servers.protocol.losses import LossHeard
from psdist.servers.protocol.modes import ModeChanged
from psdist.servers.protocol.round_control import GroupCame, GroupGone, LevelsSized, ModeObserved

Decided = ModeChanged | ModeObserved | LevelsSized | GroupGone | GroupCame
_KINDS: dict[type, str] = {
    ModeObserved: "observed",
    ModeChanged: "changed",
    LevelsSized: "sized",
    GroupGone: "gone",
    GroupCame: "came",
    KeepFidelity: "kept",
    LossHeard: "reported",
}


class DecisionReports:
    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        *,
        levels: Sequence[tuple[int, int]] = ((0, 0),),
        kept: KeptModes | None = None,
        why: str = "auto",
    ) -> None:
        """``levels``: where psdist chooses the codecs, (round, level) as the job begins; ``kept``:
        the modes with which it goes on, where they are not those of the settings; and ``why``."""
        self._is_kept = config.record and is_controlled(config)
        self._directory = directory
        self.modes = ModeReports(config, kept=kept, why=why)
        self.codecs = CodecReports(config, levels=levels, why=why)

    @property
    def now(self) -> str:
        """The mode, and the codecs where they change, for displays."""
        return " ".join(filter(None, (self.modes.now, self.codecs.now)))

    @property
    def words(self) -> str:
        """Of the whole run."""
        return "; ".join(filter(None, (self.modes.words, self.codecs.words)))

    def on_action(self, action: Decided) -> None:
        """Of what a decision is made is kept with the history, and what has followed."""
        if self._is_kept:
            self._directory.append(DECISION_LINES, _line(action))
        if isinstance(action, ModeChanged):
            self._of(action).changed(action)

    def _of(self, change: ModeChanged) -> ModeReports | CodecReports:
        return self.modes if change.level < 0 else self.codecs

    # -- where the coordinator has a standby ------------------------------------------------------

    def note(self, action: Decided) -> None:
        """On the standby: the coordinator has done this."""
        if isinstance(action, ModeChanged):
            self._of(action).note(action)

    def num_kept(self, actions: Sequence[Decided | KeepFidelity | LossHeard]) -> int:
        """Of these, which another rank was to keep and may not have, how many it has."""
        if not self._is_kept:
            return 0
        lines = [_line(each) for each in actions]
        return len(lines) - len(self._directory.missing(DECISION_LINES, lines))

    def standing(self) -> list[list[Any]]:
        """All that this knows, for the coordinator's next standby: changes, in order of each
        kind."""
        changes = (*self.modes.changes, *self.codecs.changes)
        return [
            [list(each.rounds), each.mode, each.staleness, each.why, each.level] for each in changes
        ]

    def go_on(self, standing: list[list[Any]]) -> None:
        """With what the coordinator knew of it (:meth:`standing`)."""
        for rounds, mode, staleness, why, level in standing:
            self.note(ModeChanged(tuple(rounds), mode, staleness, why, level))

    def kept(self, action: KeepFidelity) -> None:
        """It is part of a checkpoint."""
        if self._is_kept:
            self._directory.append(DECISION_LINES, _line(action))

    def rolled_back(self, rollback: Rollback) -> None:
        """The loss has blown up, with which the job ends; a coordinator that has died since may
        have said so."""
        if self._is_kept:
            for line in self._directory.missing(
                DECISION_LINES, [{"rolled_back": asdict(rollback)}]
            ):
                self._directory.append(DECISION_LINES, line)

    def resumed(self, checkpoint: str, fidelity: Fidelity) -> None:
        """First of all: the job has gone on with this."""
        if self._is_kept:
            line = {"checkpoint": checkpoint, "fidelity": asdict(fidelity)}
            self._directory.append(DECISION_LINES, {"resumed": line})

    def heard(self, loss: LossHeard) -> None:
        """A script has reported losses by which codecs are chosen."""
        if self._is_kept:
            self._directory.append(DECISION_LINES, _line(loss))


def _line(action: Decided | KeepFidelity | LossHeard) -> dict[str, Any]:
    return {_KINDS[type(action)]: asdict(action)}
