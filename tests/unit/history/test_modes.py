"""Histories of runs whose mode changes: proved round by round, and refused where they are wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from psdist.commands.check import check, check_run
from psdist.config.modes import ModeFrom
from psdist.errors import HistoryError
from psdist.history import EventKind, History, Records
from psdist.history.rules.findings import Rule
from psdist.history.run_record import ModeSince
from psdist.mode_names import Mode
from psdist.servers.protocol.actions import ChangeMode
from psdist.servers.protocol.chunks import ChunkState
from psdist.servers.protocol.rules.switching import Switching
from tests.support.history.summaries import summary_of
from tests.support.rules import secretly, switching
from tests.support.virtual.job import Schedule, VirtualJob

SCHEDULE = Schedule(
    seed=1,
    mode="async",
    later=(ModeFrom(4, "sync"), ModeFrom(8, "ssp", 1)),
    group_sizes=(1, 1, 1),
    iterations=(12,) * 3,
    collectives=((), (), ()),
    compute_s=(1e-2, 1e-3, 1e-3),
    num_chunks=4,
    servers=2,
)
BY_SCRIPT = dataclasses.replace(
    SCHEDULE, mode="ssp", staleness=2, later=(), mode_rate=1.0, collectives=((4, 8),) * 3
)


@cache
def history_of(schedule: Schedule) -> History:
    job = VirtualJob(schedule)
    job.run()
    report = check(job.history(), summary=summary_of(job))
    assert report.proved, report.violations[:5]
    assert len(report.changes) == 2
    return job.history()


def broken(history: History) -> set[str]:
    return set(check(history).violations_by_rule)


Change = Callable[[Records, Records], Records]
"""From a server's events, and those that are MODE events, to the forged ones."""


def forged(history: History, change: Change, *, server: int = 0) -> History:
    log = history.servers[server]
    events = log.events.copy()
    (places,) = np.nonzero(events["kind"] == EventKind.MODE)
    logs = [*history.servers]
    logs[server] = dataclasses.replace(log, events=change(events, places))
    return dataclasses.replace(history, servers=tuple(logs))


def later_by(rounds: int) -> Change:
    def change(events: Records, places: Records) -> Records:
        events["clock"][places[0]] += rounds
        return events

    return change


def of_mode(code: int) -> Change:
    def change(events: Records, places: Records) -> Records:
        events["weight"][places[0]] = code
        return events

    return change


def without(events: Records, places: Records) -> Records:
    return np.delete(events, places[:1])


def at_the_end(events: Records, places: Records) -> Records:
    moved = events[places[0]]
    return np.append(np.delete(events, places[0]), moved)


def in_reverse(events: Records, places: Records) -> Records:
    events[places] = events[places[::-1]]
    return events


CHANGES = {
    "a change is not in the log": without,
    "a change is of a round later": later_by(1),
    "a change is of a round before": later_by(-1),
    "a change is to another mode": of_mode(7),
    "a change is to a bound": of_mode(0),
    "changes stand in the other order": in_reverse,
}


@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("fault", CHANGES)
@pytest.mark.parametrize("schedule", [SCHEDULE, BY_SCRIPT], ids=["schedule", "script"])
def test_a_log_that_tells_of_another_change_is_refused(
    schedule: Schedule, fault: str, server: int
) -> None:
    history = history_of(schedule)
    assert Rule.MODES.value in broken(forged(history, CHANGES[fault], server=server))


def test_a_change_that_stands_behind_what_it_rules_is_refused() -> None:
    history = history_of(BY_SCRIPT)
    report = check(forged(history, at_the_end))
    assert Rule.MODES.value in report.violations_by_rule
    assert any("was applied before" in line for line in report.violations)
    assert any("was sent before that" in line for line in report.violations)


def test_a_change_that_all_servers_tell_a_round_too_early_is_refused() -> None:
    """The parameters used in that round had been sent before."""
    history = history_of(BY_SCRIPT)
    for server in (0, 1):
        history = forged(history, later_by(-1), server=server)
    lines = check(history).violations
    assert any("was sent before that" in line for line in lines)


def test_a_run_of_one_mode_changes_nothing() -> None:
    history = history_of(SCHEDULE)
    run = history.run.model_copy(update={"mode_by": "run", "schedule": ()})
    assert broken(dataclasses.replace(history, run=run)) == {Rule.MODES.value}


def test_what_psdist_has_decided_is_read_where_it_decides(tmp_path: Path) -> None:
    (tmp_path / "decisions.jsonl").write_text("damaged\n")
    history = history_of(SCHEDULE)
    assert check_run(tmp_path, [history]).violations == ()
    by_psdist = {"mode_by": "auto", "auto_staleness": 8, "schedule": ()}
    chosen = history.run.model_copy(update=by_psdist)
    with pytest.raises(HistoryError, match=r"decisions.jsonl is damaged"):
        check_run(tmp_path, [dataclasses.replace(history, run=chosen)])


def test_run_json_that_promises_another_schedule_is_refused() -> None:
    history = history_of(SCHEDULE)
    begins, first, last = history.run.schedule
    other = (begins, ModeSince(round=first.round, mode="ssp", staleness=0), last)
    run = history.run.model_copy(update={"schedule": other})
    assert broken(dataclasses.replace(history, run=run)) == {Rule.MODES.value}
    with pytest.raises(ValueError, match="with a schedule of 2 parts that begins otherwise"):
        type(run).model_validate({**run.model_dump(), "schedule": (first, last)})


def test_a_summary_that_tells_of_other_modes_is_refused() -> None:
    job = VirtualJob(SCHEDULE)
    job.run()
    summary = summary_of(job)
    for modes in ((), summary.modes[:-1], (summary.modes[0], *summary.modes[2:])):
        wrong = summary.model_copy(update={"modes": modes, "sets": ()})
        assert check(job.history(), summary=wrong).violations_by_rule == {Rule.SUMMARY.value: 1}


@pytest.mark.parametrize(
    ("kept", "rule"),
    [
        (((0, "async", 0), (5, "sync", 0), (8, "ssp", 1)), Rule.BOUND),
        (((0, "async", 0), (4, "sync", 0), (8, "ssp", 3)), Rule.BOUND),
        (((0, "async", 0), (4, "ssp", 0), (8, "ssp", 1)), Rule.SCALES),
        (((0, "async", 0), (4, "sync", 0), (9, "ssp", 1)), Rule.SCALES),
        (((0, "ssp", 0), (3, "sync", 0), (8, "ssp", 1)), Rule.STEPS),
    ],
)
def test_a_server_that_keeps_another_rule_in_some_round_is_caught(
    kept: tuple[tuple[int, Mode, int], ...], rule: Rule
) -> None:
    """Its log says what the run's schedule does."""
    job = VirtualJob(SCHEDULE, rule=lambda _server: secretly(*kept, logged=SCHEDULE.later))
    job.run()
    assert rule.value in broken(job.history())


class TooEarly(Switching):
    """The mode rules one round before the committed one."""

    def change_mode(self, change: ChangeMode) -> None:
        super().change_mode(change._replace(round=max(0, change.round - 1)))


class KeepsNothingBack(Switching):
    """Between the two phases parameters leave as before."""

    def hold_rounds(self, highest: int, chunks: Iterable[ChunkState]) -> None:
        pass


@pytest.mark.parametrize("kind", [TooEarly, KeepsNothingBack])
def test_a_server_that_takes_a_change_in_otherwise_is_caught(kind: type[Switching]) -> None:
    """In some of the runs in which it makes a difference."""
    caught = 0
    for seed in range(12):
        proposals = tuple(range(150, 900, 150))
        schedule = dataclasses.replace(
            SCHEDULE, seed=seed, mode="async", later=(), proposals=proposals, jitter_s=1e-3
        )
        rule = switching((0, "async", 0), kind=kind)
        job = VirtualJob(schedule, rule=lambda _server, rule=rule: rule, is_watched=False)
        try:
            job.run()
        except AssertionError:
            caught += 1
            continue
        caught += bool(broken(job.history()))
    assert caught
