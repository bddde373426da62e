"""What psdist has observed and decided in a run, for its files and for people.

decisions = DecisionReports(config, run_directory)
decisions.on_action(action)          # keeps what is to be proved, and says what has changed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from psdist.config.codec_rounds import is_controlled
from psdist.config.settings import RunConfig
from psdist.controller.kept import Fidelity, KeptModes, Rollback
from psdist.history.rules.decisions import DECISION_LINES
from psdist.ranks.telling.codecs import CodecReports
from psdist.ranks.telling.modes import ModeReports
from psdist.report.run_directory import RunDirectory
from psdist.servers.protocol.checkpoints import KeepFidelity
from psdist.servers.protocol.modes import (
    GroupCame,
    GroupGone,
    LevelsSized,
    ModeChanged,
    ModeObserved,
)
from psdist.servers.protocol.steps import LossHeard

Decided = ModeChanged | ModeObserved | LevelsSized | GroupGone | GroupCame
_KINDS: dict[type, str] = {
    ModeObserved: "observed",
    ModeChanged: "changed",
    LevelsSized: "sized",
    GroupGone: "gone",
    GroupCame: "came",
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
            self._directory.append(DECISION_LINES, {_KINDS[type(action)]: asdict(action)})
        if isinstance(action, ModeChanged):
            of = self.modes if action.level < 0 else self.codecs
            of.changed(action)

    def kept(self, action: KeepFidelity) -> None:
        """It is part of a checkpoint."""
        if self._is_kept:
            self._directory.append(DECISION_LINES, {"kept": asdict(action)})

    def rolled_back(self, rollback: Rollback) -> None:
        """The loss has blown up, with which the job ends."""
        if self._is_kept:
            self._directory.append(DECISION_LINES, {"rolled_back": asdict(rollback)})

    def resumed(self, checkpoint: str, fidelity: Fidelity) -> None:
        """First of all: the job has gone on with this."""
        if self._is_kept:
            line = {"checkpoint": checkpoint, "fidelity": asdict(fidelity)}
            self._directory.append(DECISION_LINES, {"resumed": line})

    def heard(self, loss: LossHeard) -> None:
        """A script has reported losses by which codecs are chosen."""
        if self._is_kept:
            self._directory.append(DECISION_LINES, {"reported": asdict(loss)})
