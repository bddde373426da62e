"""The codecs of a run, for its files and for people: which ruled which rounds, and why.

codecs = CodecReports(config)
codecs.changed(ModeChanged(...))     # says so in the log
codecs.now, codecs.told()            # for displays; for summary.json
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from psdist.config.codec_rounds import is_auto, ladder_of
from psdist.config.codec_specs import text_of_both
from psdist.config.settings import RunConfig
from psdist.history.run_record import CodecsSince
from psdist.ranks.wire import codecs_of_ladder, codecs_of_rounds
from psdist.servers.protocol.modes import ModeChanged

logger = logging.getLogger("psdist")


class CodecReports:
    def __init__(
        self,
        config: RunConfig,
        *,
        levels: Sequence[tuple[int, int]] = ((0, 0),),
        why: str = "auto",
    ) -> None:
        """``levels``: where psdist chooses, (round, level) as the job begins, and ``why``."""
        self.begins = codecs_of_rounds(config, levels)
        """For run.json, with ``ladder``."""
        self.ladder = codecs_of_ladder(config)
        self._names = [text_of_both(each) for each in ladder_of(config)] if is_auto(config) else []
        self._levels, self._why = levels, why
        self._changes: list[ModeChanged] = []

    @property
    def now(self) -> str:
        """In words, for displays; "" where psdist does not choose."""
        if not self._names:
            return ""
        return self._names[self._changes[-1].level if self._changes else self._levels[-1][1]]

    @property
    def words(self) -> str:
        """Of the whole run; "" where psdist has not chosen."""
        if not self._names:
            return ""
        (_, first), *later = self._levels
        parts = [f"codec auto, {self._names[first]}"]
        parts += [f"{self._names[level]} from {start}" for start, level in later]
        parts += [f"{self._names[each.level]} from {each.rounds[0]}" for each in self._changes]
        return ", ".join(parts)

    @property
    def changes(self) -> Sequence[ModeChanged]:
        """In order."""
        return self._changes

    def note(self, change: ModeChanged) -> None:
        """People have been told of it."""
        self._changes.append(change)

    def changed(self, change: ModeChanged) -> None:
        self.note(change)
        logger.info("codec %s from iteration %d on (%s)", self.now, change.rounds[0], change.why)

    def told(self) -> list[dict[str, Any]]:
        """For summary.json: those of every round, in order, and why."""
        why = "settings"
        if self.ladder:
            why = self._why
        elif len(self.begins) > 1:
            why = "schedule"
        parts = [(each, why) for each in self.begins]
        for change in self._changes:
            codecs = self.ladder[change.level].model_dump()
            parts.append((CodecsSince(round=change.rounds[0], **codecs), change.why))
        fields = {"round", "push", "pull"}
        return [each.model_dump(include=fields) | {"why": reason} for each, reason in parts]
