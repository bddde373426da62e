"""The modes of a run, for its files and for people: which ruled which rounds, and why.

modes = ModeReports(config)
modes.changed(ModeChanged(...))      # says so in the log
modes.now, modes.of_set(0)           # for displays; for summary.json
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from psdist.config.modes import (
    describe_mode,
    describe_modes,
    describe_now,
    first_mode,
    parts_of,
    schedule_of,
)
from psdist.config.settings import RunConfig
from psdist.controller.kept import KeptModes
from psdist.history.run_record import ModeSince
from psdist.mode_names import Mode
from psdist.servers.protocol.modes import ModeChanged

logger = logging.getLogger("psdist")


class ModeReports:
    def __init__(
        self, config: RunConfig, *, kept: KeptModes | None = None, why: str = "settings"
    ) -> None:
        """``kept``: the modes with which the job goes on, where they are not those of the settings,
        and ``why``."""
        self._config = config
        self._why = why if kept is not None else ""
        self._changes = [
            ModeChanged(each.rounds, each.mode, each.staleness, why)
            for each in (kept.starts[1:] if kept is not None else ())
        ]
        self.now = describe_now(config, 0)
        """In words, for displays."""
        if self._changes:
            self.now = _in_words(self._changes[-1])
        self._coming = deque(part.mode.round for part in parts_of(config)[1:])
        self.begins = _since(*first_mode(config))
        self.schedule: tuple[ModeSince, ...] = ()
        """Where the configuration has one."""
        if config.schedule is not None:
            self.schedule = tuple(_since(*each) for each in schedule_of(config))

    @property
    def words(self) -> str:
        """Of the whole run."""
        parts = [describe_modes(self._config)]
        parts += [
            f"{describe_mode(each.mode, each.staleness)} from {each.rounds[0]}"
            for each in self._changes
        ]
        return ", ".join(parts)

    @property
    def changes(self) -> Sequence[ModeChanged]:
        """In order."""
        return self._changes

    def note(self, change: ModeChanged) -> None:
        """People have been told of it."""
        self._changes.append(change)
        self.now = _in_words(change)

    def changed(self, change: ModeChanged) -> None:
        mode = describe_mode(change.mode, change.staleness)
        self.note(change)
        logger.info(
            "mode %s from iteration %s on (%s)",
            mode,
            ", ".join(map(str, change.rounds)),
            change.why,
        )

    def reached(self, clock: int, *, is_news: bool = True) -> None:
        """All groups have made so many iterations: says in the log what of a schedule began since,
        each part once; ``is_news``: it was not said by another rank."""
        while self._coming and self._coming[0] <= clock:
            start = self._coming.popleft()
            self.now = describe_now(self._config, start)
            if is_news:
                logger.info("%s from iteration %d on (schedule)", self.now, start)

    def of_set(self, index: int) -> list[dict[str, Any]]:
        """For summary.json: the mode of every round, in order, and why."""
        why = "schedule" if self.schedule else self._why or "settings"
        parts = [(each, why) for each in self.schedule or (self.begins,)]
        for change in self._changes:
            start = change.rounds[index] if index < len(change.rounds) else 0
            parts = [each for each in parts if each[0].round < start]
            parts.append((_since(start, change.mode, change.staleness), change.why))
        return [part.model_dump() | {"why": reason} for part, reason in parts]


def _in_words(change: ModeChanged) -> str:
    return f"ssp (staleness {change.staleness})" if change.mode == "ssp" else change.mode


def _since(start: int, mode: Mode, staleness: int) -> ModeSince:
    return ModeSince(
        round=start,
        mode=mode,
        staleness=staleness if mode == "ssp" else None,
    )
