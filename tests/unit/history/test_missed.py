"""Histories of runs with backup groups: proved, and refused where who was left out is wrong."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from psdist.commands.check import Report, check
from psdist.history import EventKind, History, Records
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.missed import check_same_missed
from psdist.history.rules.values.uses import check_worker
from psdist.history.run_record import RunRecord
from tests.support.history.memory import WorkerHistory
from tests.support.history.summaries import summary_of
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.virtual_worker import VirtualWorker

SCHEDULE = Schedule(
    seed=1,
    backup=1,
    backup_every=6,
    group_sizes=(1, 1, 1),
    iterations=(30,) * 3,
    collectives=((), (), ()),
    compute_s=(1e-2, 1e-3, 1e-3),
    num_chunks=4,
    servers=2,
    jitter_s=1e-5,
)


@cache
def job() -> VirtualJob:
    made = VirtualJob(SCHEDULE, make_worker=VirtualWorker)
    made.run()
    report = check(made.history(), summary=summary_of(made))
    assert report.proved, report.violations[:5]
    return made


def broken(history: History) -> set[str]:
    return set(check(history).violations_by_rule)


def with_events(change: Callable[[Records], Records], *, servers: tuple[int, ...]) -> History:
    history = job().history()
    logs = [*history.servers]
    for server in servers:
        log = logs[server]
        logs[server] = dataclasses.replace(log, events=change(log.events.copy()))
    return dataclasses.replace(history, servers=tuple(logs))


def kinds(events: Records, kind: EventKind) -> list[int]:
    return np.flatnonzero(events["kind"] == kind).tolist()


def test_who_has_missed_what_is_proved_of_the_run() -> None:
    summary = summary_of(job())
    assert summary.rounds_missed is not None
    assert summary.rounds_missed[0] > 20
    assert summary.rounds_missed[1:] == (0, 0)


def test_a_share_that_the_summary_makes_up_is_refused() -> None:
    summary = summary_of(job()).model_copy(update={"rounds_missed": (3, 0, 0)})
    report: Report = check(job().history(), summary=summary)
    assert report.violations_by_rule == {Rule.SUMMARY.value: 1}


def test_in_a_run_without_backup_groups_nobody_misses_a_round() -> None:
    history = job().history()
    run = history.run.model_copy(update={"backup": 0, "backup_every": 0})
    assert Rule.MISSED.value in broken(dataclasses.replace(history, run=run))


def test_more_groups_than_backup_says_are_refused() -> None:
    def change(events: Records) -> Records:
        place = kinds(events, EventKind.MISSED)[2]
        behind = place + 1  # the first that has contributed; the next one completes the step
        events["kind"][behind], events["flags"][behind] = EventKind.MISSED, 0
        events["weight"][behind] = 0.0
        return events

    assert Rule.MISSED.value in broken(with_events(change, servers=(0, 1)))


def test_a_group_that_is_never_waited_for_is_refused() -> None:
    history = job().history()
    run = history.run.model_copy(update={"backup_every": 4})
    report = check(dataclasses.replace(history, run=run))
    assert set(report.violations_by_rule) == {Rule.MISSED.value}
    assert "missed, the 4th round running of group 0" in report.violations[0]


def test_a_group_that_is_left_out_without_a_word_is_refused() -> None:
    def change(events: Records) -> Records:
        return np.delete(events, kinds(events, EventKind.MISSED)[:1])

    assert Rule.STEPS.value in broken(with_events(change, servers=(0,)))


def test_who_has_missed_a_round_stands_in_front_of_who_has_contributed() -> None:
    def change(events: Records) -> Records:
        place = kinds(events, EventKind.MISSED)[0]
        events[[place, place + 1]] = events[[place + 1, place]]
        return events

    assert Rule.STEPS.value in broken(with_events(change, servers=(0,)))


def test_another_group_on_another_server_is_refused() -> None:
    """Server 1 has left out group 1 in a round, and not group 0, as server 0 has."""

    def change(events: Records) -> Records:
        place = kinds(events, EventKind.MISSED)[0]
        events["group"][place], events["group"][place + 1] = 1, 0
        return events

    assert Rule.MISSED.value in broken(with_events(change, servers=(1,)))


def test_an_update_that_was_summed_although_it_was_late_is_refused() -> None:
    """It was computed on parameters of its own round, which others had left; then its group has
    used those of a later one, and its next update is said to be of that round."""
    history = job().history()
    report = check(history)
    assert report.proved
    logs = [*history.workers]
    uses = logs[0].uses.copy()
    contributed = [
        int(each["clock"])
        for each in history.servers[history.run.owners[0]].events
        if each["kind"] == EventKind.APPLY and each["group"] == 0 and each["chunk"] == 0
    ]
    late = contributed[-1]
    mine = (uses["iteration"] == late) & (uses["chunk"] == 0)
    uses["position"][mine] = len(history.servers[history.run.owners[0]].events)
    logs[0] = dataclasses.replace(logs[0], uses=uses)
    assert Rule.MISSED.value in broken(dataclasses.replace(history, workers=tuple(logs)))


def test_an_iteration_that_was_not_missed_needs_a_use() -> None:
    history = job().history()
    logs = [*history.workers]
    uses = logs[1].uses
    logs[1] = dataclasses.replace(logs[1], uses=uses[uses["iteration"] != 7])
    assert Rule.COVERAGE.value in broken(dataclasses.replace(history, workers=tuple(logs)))


@pytest.mark.parametrize("field", ["weight", "lr_scale"])
def test_what_was_missed_weighs_nothing(field: str) -> None:
    def change(events: Records) -> Records:
        events[field][kinds(events, EventKind.MISSED)[0]] = 0.5
        return events

    assert broken(with_events(change, servers=(0,)))


def test_missed_rounds_that_chunks_do_not_share_are_listed_in_order() -> None:
    findings = Findings(max_listed_per_rule=99)
    few, more = {(1, 5)}, {(group, clock) for group in range(9, 0, -1) for clock in (7, 3, 9)}
    check_same_missed({0: few, 2: more, 1: few}, findings)
    found = [re.findall(r"\d+", line) for line in findings.lines()]
    assert [(int(group), int(clock)) for group, clock, *_ in found] == sorted(few | more)
    assert [chunks for _, _, *chunks in found][:3] == [["2", "0"], ["0", "2"], ["2", "0"]]


def test_a_missed_round_after_the_last_one_stands_for_no_other() -> None:
    log = WorkerHistory(None, 0)
    for clock in (0, 2):
        log.uses(clock, [0], 0, 0, 0)
    log.close()
    findings = Findings(max_listed_per_rule=9)
    run = RunRecord(
        psdist="1", mode="sync", groups=((0,),), slices=((0,),), num_servers=1, num_chunks=1,
        owners=(0,),
    )  # fmt: skip
    check_worker(run, log.log(), {0: 3}, findings, begin=0, missed={3})
    assert findings.lines() == ("worker 0: iteration 1 used no parameters; there are 1 such",)
