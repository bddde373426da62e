"""Whether attempts of a run have resumed the modes of their checkpoint.

Owns the part of rule 7 of docs/reference/history.md on modes. A checkpoint has the modes that
servers had logged before it; an attempt that resumes it logs the same modes first. Pure.

    check_modes_went_on("attempt 2, set 0", history, made, 100, findings)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psdist.controller.kept import KeptModes
from psdist.history import ASYNC, SYNC, EventKind, History, Records, ServerLog
from psdist.history.rules.choices.resumed import begins_with, may_go_on_with_modes
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.modes import ModeRules, describe_code
from psdist.history.run_record import RunRecord
from psdist.mode_names import Mode

_Changes = tuple[tuple[int, int], ...]
"""(round, code), in the order of a log."""


def judging_mode(run: RunRecord) -> str:
    """Return the mode; ssp if it may change to another one."""
    if run.mode_by == "script":
        return "ssp"
    coming = {run.mode, *(each.mode for each in run.schedule)}
    if run.mode_by == "auto":
        coming.add("ssp")
    return coming.pop() if len(coming) == 1 else "ssp"


def are_apart_in_sync(history: History, cut: Sequence[int]) -> bool:
    """Return True if only some of these groups have made a round that all make together."""
    of_run = [_leading(log) for log in history.servers]
    rules = ModeRules.of(history.run, max(of_run, key=len))
    return bool(rules.is_gathered(np.arange(min(cut), max(cut))).any())


def check_modes_went_on(
    where: str, history: History, made: History, number: int, findings: Findings
) -> None:
    """Require that each server's log begins with the modes at checkpoint ``number`` of the attempt
    that ``made`` it, if this attempt has the settings for them."""
    run = history.run
    if run.mode_by not in ("script", "auto"):
        return
    due = _due(run, made, number)
    for log in history.servers:
        leading = _leading(log)
        found = _changes(leading)
        is_cut = not log.is_complete and len(_begins(log)) == len(log.events)
        if found != (due[: len(found)] if is_cut else due):
            findings[Rule.KEPT].add(
                f"{where}, server {log.server}: begins with the modes {_words(found)}; those of "
                f"{run.restored} are {_words(due)}"
            )


def _due(run: RunRecord, made: History, number: int) -> _Changes:
    ruled = _changes(_before(made, number))
    modes = begins_with(made.run)
    if modes is None:
        return ()
    for start, code in ruled:
        modes = _then(modes, start, code)
    return ruled if may_go_on_with_modes(run, modes) else ()


def _then(modes: KeptModes, start: int, code: int) -> KeptModes:
    unbounded: dict[int, Mode] = {SYNC: "sync", ASYNC: "async"}
    return modes.then((start,), unbounded.get(code, "ssp"), max(code, 0))


def _before(made: History, number: int) -> Records:
    """Return the MODE events of a log up to this checkpoint."""
    for log in made.servers:
        events = log.events
        is_it = (events["kind"] == EventKind.SNAPSHOT) & (events["clock"] == number)
        if is_it.any():
            before = events[: int(np.flatnonzero(is_it)[-1])]
            found: Records = before[before["kind"] == EventKind.MODE]
            return found
    return made.servers[0].events[:0]


def _begins(log: ServerLog) -> Records:
    """Return the events before any group joins."""
    is_first = np.isin(log.events["kind"], (EventKind.RESTORE, EventKind.MODE))
    others = np.flatnonzero(~is_first)
    return log.events[: int(others[0])] if len(others) else log.events


def _leading(log: ServerLog) -> Records:
    begins = _begins(log)
    found: Records = begins[begins["kind"] == EventKind.MODE]
    return found


def _changes(events: Records) -> _Changes:
    return tuple(zip(events["clock"].tolist(), map(int, events["weight"].tolist()), strict=True))


def _words(changes: _Changes) -> str:
    return "; ".join(f"{start}: {describe_code(code)}" for start, code in changes) or "none"
