"""Checkpoints as logs have them: one cut of all chunks, with which a resumed attempt begins.

sync, two groups of one worker. Server 0 has chunks 0 and 1, server 1 has chunk 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psdist.history import EventKind, History, Records
from psdist.history.rules.choices.resumed_modes import judging_mode
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.kept import (
    Kept,
    KeptByServer,
    check_attempts,
    check_kept,
    check_same_cut,
)
from psdist.history.rules.log.replay import ServerReplay
from psdist.history.run_record import ModeSince, RunRecord
from tests.support.history.memory import ServerHistory, WorkerHistory, collect

JOIN, LEAVE = EventKind.JOIN, EventKind.LEAVE
SNAPSHOT, RESTORE = EventKind.SNAPSHOT, EventKind.RESTORE
STEP, NAME = 2, "step-00000002"
RUN = RunRecord(
    psdist="1",
    mode="sync",
    groups=((0,), (1,)),
    slices=((0, 0, 0),),
    num_servers=2,
    num_chunks=3,
    owners=(0, 0, 1),
)
RESUMED: dict[str, Any] = {
    "attempt": 2,
    "restored": NAME,
    "restored_attempt": 1,
    "first_clocks": (STEP, STEP),
}
Mode = tuple[int, str, int]
"""Round, mode and staleness of a change."""


def crc_of(chunk: int) -> int:
    return 0x1000 + chunk


def history_of(
    *,
    modes: tuple[Mode, ...] = (),
    missed: int = 0,
    crc: Callable[[int], int | None] = crc_of,
    ends_early: bool = False,
    **changed: Any,
) -> History:
    """A run of four rounds with a checkpoint after the second one, or of the two after it.
    ``missed``: rounds before the checkpoint that group 1 misses, from the last one back."""
    run = RUN.model_copy(update=changed)
    begin = STEP if run.restored else 0
    logs = [ServerHistory(None, server) for server in range(run.num_servers)]
    for server, log in enumerate(logs):
        mine = [chunk for chunk, owner in enumerate(run.owners) if owner == server]
        for chunk in mine if begin else ():
            log.kept(RESTORE, chunk, STEP, crc(chunk))
        for change in modes:
            log.mode(*change)
        if ends_early:
            continue
        for group in range(2):
            log.member(JOIN, group, begin, 1.0)
        for clock in range(begin, 4):
            for chunk in mine if clock == STEP and not begin else ():
                log.kept(SNAPSHOT, chunk, STEP, crc(chunk))
            is_missed = STEP - missed <= clock < STEP
            for chunk in mine:
                if is_missed:
                    log.missed(chunk, clock, [1])
                groups = [0] if is_missed else [0, 1]
                log.step(chunk, [(group, clock, 1.0, False, 0) for group in groups])
        for group in range(2):
            log.member(LEAVE, group, 4)
        log.close()
    return collect(run, logs, [WorkerHistory(None, worker) for worker in range(2)])


def kept(history: History, findings: Findings, server: int = 0) -> KeptByServer:
    return check_kept(ServerReplay(history.run, history.servers[server]), findings)


def resumed(first: History, second: History) -> list[str]:
    findings = Findings(max_listed_per_rule=9)
    assert check_attempts({1: [first], 2: [second]}, findings) == []
    assert set(findings.counts) <= {Rule.KEPT, Rule.MISSED}
    return [*findings.lines()]


def test_a_checkpoint_has_every_chunk_at_one_cut() -> None:
    findings, history = Findings(max_listed_per_rule=9), history_of()
    both = [kept(history, findings, server) for server in range(2)]
    check_same_cut(history.run, both, findings)
    assert not findings.total
    assert both[0].snapshots == {
        chunk: (Kept(number=STEP, cut=(2, 2), crc=crc_of(chunk), running=(0, 0)),)
        for chunk in range(2)
    }
    assert both[0].restored == {}


@pytest.mark.parametrize("missed", [1, 2])
def test_a_checkpoint_counts_the_rounds_that_a_group_has_just_missed(missed: int) -> None:
    findings = Findings(max_listed_per_rule=9)
    history = history_of(missed=missed, backup=1, backup_every=8)
    for server, chunks in enumerate(((0, 1), (2,))):
        its = kept(history, findings, server).snapshots
        assert {chunk: each[0].running for chunk, each in its.items()} == dict.fromkeys(
            chunks, (0, missed)
        )
    assert not findings.total


def test_a_chunk_without_a_checksum_is_kept_without_one() -> None:
    findings = Findings(max_listed_per_rule=9)
    its = kept(history_of(crc=lambda _: None), findings).snapshots
    assert [each.crc for (each,) in its.values()] == [None, None]


def _with(field: str, value: object) -> Callable[[Records], Records]:
    def change(events: Records) -> Records:
        events[field][np.flatnonzero(events["kind"] == SNAPSHOT)[0]] = value
        return events

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_with("group", 1), "chunk 0: SNAPSHOT of step 2: it is of no group, and scaled by"),
        (_with("lr_scale", 2.0), "chunk 0: SNAPSHOT of step 2: it is of no group, and scaled by"),
        (_with("chunk", 2), "chunk 2: SNAPSHOT of step 2: server 1 owns the chunk"),
        (_with("clock", 3), "kept for steps [2], chunk 0 for steps [3]"),
    ],
)
def test_what_is_wrong_with_a_kept_chunk_is_found(
    change: Callable[[Records], Records], words: str
) -> None:
    history, findings = history_of(), Findings(max_listed_per_rule=9)
    log = history.servers[0]
    changed = type(log)(
        server=0,
        events=change(log.events.copy()),
        checksums=log.checksums,
        is_complete=log.is_complete,
    )
    check_kept(ServerReplay(history.run, changed), findings)
    assert any(words in each for each in findings.lines()), findings.lines()


def test_an_attempt_begins_with_its_checkpoint() -> None:
    assert resumed(history_of(), history_of(**RESUMED)) == []
    unknown = history_of(**RESUMED, crc=lambda _: None)
    assert resumed(history_of(), unknown) == []


def test_other_values_than_were_kept_are_found_for_each_chunk_in_turn() -> None:
    second = history_of(**RESUMED, crc=lambda chunk: 0x2000 + chunk)
    lines = resumed(history_of(), second)
    chunks = [re.search(r"server (\d), chunk (\d)", each) for each in lines]
    assert [each.groups() for each in chunks if each] == [("0", "0"), ("0", "1"), ("1", "2")]
    assert "the checksum 00002000, step-00000002 of attempt 1 has kept 00001000" in lines[0]


def test_an_attempt_that_begins_elsewhere_is_found() -> None:
    second = history_of(**{**RESUMED, "first_clocks": (STEP, 1)})
    (line,) = resumed(history_of(), second)
    assert "its groups begin at clocks [2, 1]; step-00000002 of attempt 1 contains [2, 2]" in line


# -- modes -----------------------------------------------------------------------------------------

CHANGE: Mode = (1, "ssp", 3)


def test_an_attempt_begins_with_the_modes_before_its_checkpoint() -> None:
    first = history_of(modes=(CHANGE,), mode_by="script")
    assert resumed(first, history_of(**RESUMED, modes=(CHANGE,), mode_by="script")) == []
    for wrong in (), ((1, "ssp", 4),), ((0, "ssp", 3),):
        lines = resumed(first, history_of(**RESUMED, modes=wrong, mode_by="script"))
        assert len(lines) == 2, "each server"
        assert all("those of step-00000002 are 1: ssp" in each for each in lines)


def test_a_log_that_ends_before_its_first_modes_is_no_error() -> None:
    first = history_of(modes=(CHANGE,), mode_by="script")
    assert resumed(first, history_of(**RESUMED, mode_by="script", ends_early=True)) == []
    first = history_of(modes=(CHANGE, (2, "async", 0)), mode_by="script")
    cut: dict[str, Any] = {"mode_by": "script", "ends_early": True, **RESUMED}
    assert resumed(first, history_of(modes=(CHANGE,), **cut)) == []
    assert len(resumed(first, history_of(modes=((1, "ssp", 4),), **cut))) == 2


@pytest.mark.parametrize(
    ("changed", "mode"),
    [
        ({}, "sync"),
        ({"mode_by": "script"}, "ssp"),
        ({"mode_by": "auto", "auto_staleness": 4}, "ssp"),
        ({"mode_by": "schedule", "schedule": (ModeSince(round=0, mode="sync"),)}, "sync"),
        (
            {
                "mode_by": "schedule",
                "schedule": (
                    ModeSince(round=0, mode="sync"),
                    ModeSince(round=5, mode="async"),
                ),
            },
            "ssp",
        ),
    ],
)
def test_a_run_whose_mode_may_change_is_judged_as_ssp(changed: dict[str, Any], mode: str) -> None:
    assert judging_mode(RUN.model_copy(update=changed)) == mode
