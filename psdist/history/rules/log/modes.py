"""The mode of each round, and the rules on its changes.

Owns :class:`ModeRules`, by which uses and steps are judged round by round, and rule 8 of
docs/reference/history.md. Pure.

    rules = ModeRules.of(run, mode_events)
    rules.is_gathered(rounds), rules.bounds(rounds)          # [n] each
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from psdist.history import ASYNC, SYNC, Ints, Records, code_of
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import RunRecord

if TYPE_CHECKING:
    from psdist.history.rules.log.replay import ServerReplay
    from psdist.history.rules.values.uses import Uses

NO_BOUND = 2**31
"""Bound of async, in rounds: more than there are."""


@dataclass(frozen=True)
class ModeRules:
    starts: Ints
    """First round of each mode, ascending from 0."""
    codes: Ints
    """The bound of ssp, or SYNC, or ASYNC."""

    @classmethod
    def of(cls, run: RunRecord, changes: Records) -> ModeRules:
        """``changes``: the MODE events of a log. As on the server, a change replaces those that do
        not begin before it."""
        parts = [(0, code_of(run.mode, run.staleness))]
        for start, code in zip(changes["clock"].tolist(), changes["weight"].tolist(), strict=True):
            parts = [part for part in parts if part[0] < start]
            parts.append((start, int(code)))
        starts, codes = zip(*parts, strict=True)
        return cls(np.asarray(starts, np.int64), np.asarray(codes, np.int64))

    def _codes(self, rounds: Ints) -> Ints:
        codes: Ints = self.codes[np.searchsorted(self.starts, rounds, side="right") - 1]
        return codes

    def is_gathered(self, rounds: Ints) -> Ints:
        """Return True for rounds in which all groups make one step."""
        is_gathered: Ints = self._codes(rounds) == SYNC
        return is_gathered

    def bounds(self, rounds: Ints) -> Ints:
        """Return the iterations that a use in these rounds may lag the slowest active group."""
        codes = self._codes(rounds)
        bounds: Ints = np.where(codes == ASYNC, NO_BOUND, np.maximum(codes, 0))
        return bounds

    def in_words(self) -> tuple[tuple[int, str], ...]:
        """Return (first round, mode) of each mode."""
        codes = map(describe_code, self.codes.tolist())
        return tuple(zip(self.starts.tolist(), codes, strict=True))

    @property
    def may_gather(self) -> bool:
        return bool((self.codes == SYNC).any())


def describe_mode(mode: str, staleness: int | None) -> str:
    return describe_code(code_of(mode, staleness))


def describe_code(code: int) -> str:
    return {SYNC: "sync", ASYNC: "async"}.get(code, f"ssp:{code}")


def changes_of(replay: ServerReplay) -> tuple[tuple[int, int], ...]:
    """Return (round, code) of each MODE event of the log."""
    changes = replay.changes
    return tuple(zip(changes["clock"].tolist(), map(int, changes["weight"].tolist()), strict=True))


def check_modes(replay: ServerReplay, uses: Uses, findings: Findings) -> None:
    """Require that the mode changes only as run.json allows, each time from a later round on, and
    before any use or update of that round."""
    broken = findings[Rule.MODES]
    run, changes = replay.run, changes_of(replay)
    promised = tuple((each.round, code_of(each.mode, each.staleness)) for each in run.schedule)
    if changes and run.mode_by == "run":
        broken.add(
            f"server {replay.server}: the mode changes at round {changes[0][0]}; run.json says "
            "that it is one for the whole run"
        )
    if run.mode_by == "schedule" and changes != promised[1:] and (changes or replay.num_rows):
        broken.add(
            f"server {replay.server}: changes to {_words(changes)}; run.json says "
            f"{_words(promised[1:])}"
        )
    before = -1
    for position, (start, code) in zip(replay.change_position.tolist(), changes, strict=True):
        where = (
            f"server {replay.server}, position {position}: {describe_code(code)} from round {start}"
        )
        if start < before:
            broken.add(f"{where}, after a change from round {before}")
        before = start
        applied = replay.clock[replay.position < position]
        if len(applied) and applied.max() >= start:
            broken.add(f"{where}, but an update of round {applied.max()} was applied before")
        early = (uses.iteration >= start) & (uses.position < position)
        broken.add_where(early, partial(_sent_early, where, uses))


def _sent_early(where: str, uses: Uses, use: int) -> str:
    return f"{where}, but {uses.line(use)}: was sent before that"


def check_same_modes(
    changes: Mapping[int, tuple[tuple[int, int], ...]], findings: Findings
) -> None:
    """Require the same changes on all servers with closed logs."""
    (first, expected), *others = changes.items()
    for server, seen in others:
        if seen != expected:
            findings[Rule.MODES].add(
                f"server {server} changed to {_words(seen)}, server {first} to {_words(expected)}"
            )


def _words(changes: tuple[tuple[int, int], ...]) -> str:
    return "; ".join(f"{start}: {describe_code(code)}" for start, code in changes) or "nothing"
