"""Proofs for a group between the failures of its workers, and for servers together.

sync, one group of workers 0 to 3, chunks 0 to 7 on servers 0 and 1, four on each; server 2 owns
none. Worker 3 fails in iteration 2, worker 2 in iteration 6, each before anything of it was pushed.
The record of worker 3 lacks what it had not written yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from psdist.commands.check import Report, check
from psdist.history import EventKind, History
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.reformed import ToldDeaths, check_same_reforms
from psdist.history.rules.log.replay import ServerReplay
from psdist.history.rules.summaries import Shown, check_claims
from psdist.history.rules.values.pushes import Claims
from psdist.history.run_record import RunRecord
from psdist.history.summary import Summary
from psdist.protocol.partition import slices_of_the_living
from tests.support.history.memory import ServerHistory, WorkerHistory, collect

JOIN, LEAVE, REFORM = EventKind.JOIN, EventKind.LEAVE, EventKind.REFORM
NUM_CHUNKS, NUM_ITERATIONS = 8, 9
MEMBERS = (0, 1, 2, 3)
PLACES = tuple(chunk % 4 for chunk in range(NUM_CHUNKS))
OWNERS = (0, 0, 0, 0, 1, 1, 1, 1)
DEATHS = {3: 2, 2: 6}
"""By worker that fails the iteration."""
Key = tuple[int, int]
Told = tuple[int, int] | None


def record() -> RunRecord:
    return RunRecord(
        psdist="test",
        mode="sync",
        groups=(MEMBERS,),
        slices=((), (), (), PLACES),
        num_servers=3,
        num_chunks=NUM_CHUNKS,
        owners=OWNERS,
        checksum_every=0,
    )


def living(clock: int) -> list[int]:
    return [each for each in MEMBERS if clock < DEATHS.get(each, NUM_ITERATIONS)]


def pusher_of(clock: int) -> dict[int, int]:
    """By chunk."""
    first = {worker: [c for c in range(NUM_CHUNKS) if PLACES[c] == worker] for worker in MEMBERS}
    slices = slices_of_the_living(first, living(clock))
    return {chunk: worker for worker, chunks in slices.items() for chunk in chunks}


def history_of(
    said: dict[Key, tuple[float, float]] | None = None,
    *,
    told: Callable[[int, int, int], Told] = lambda _server, worker, clock: (
        worker,
        clock,
    ),
    unwritten: int = 1,
) -> History:
    """``said``: of (worker, iteration) what it brought and pushed with, which is applied;
    ``told(server, worker, clock)``: whose death the server tells, and its stamp; ``unwritten``:
    iterations that the record of a dead worker lacks."""
    servers = [ServerHistory(None, each) for each in range(3)]
    workers = [WorkerHistory(None, each) for each in MEMBERS]
    for server in servers:
        server.member(JOIN, 0, 0, 4)
    for clock in range(NUM_ITERATIONS):
        for dead, dies_in in DEATHS.items():
            for at, server in enumerate(servers):
                if clock == dies_in and (what := told(at, dead, clock if at < 2 else 0)):
                    server.member(REFORM, 0, what[1], what[0])
        weights = {
            each: (said or {}).get((each, clock), (1.0, float(len(living(clock)))))
            for each in living(clock)
        }
        positions = [servers[owner].position for owner in OWNERS]
        for each, (own, weight) in weights.items():
            if clock < DEATHS.get(each, NUM_ITERATIONS) - unwritten * (each in DEATHS):
                workers[each].uses(
                    clock, list(range(NUM_CHUNKS)), OWNERS, positions, max(0, clock - 1)
                )
                workers[each].push(clock, own, weight, (), NUM_CHUNKS)
        for chunk, worker in pusher_of(clock).items():
            servers[OWNERS[chunk]].step(chunk, [(0, clock, weights[worker][1], False, 0)])
    for server in servers:
        num_told = sum(told(server.server, each, 0) is not None for each in DEATHS)
        server.member(LEAVE, 0, NUM_ITERATIONS, 4 - num_told)
        server.close()
    for each in living(NUM_ITERATIONS - 1):
        workers[each].close()
    return collect(record(), servers, workers)


def broken(report: Report) -> set[str]:
    return set(report.violations_by_rule)


@pytest.mark.parametrize("unwritten", [0, 1, 2])
def test_two_deaths_are_proved(unwritten: int) -> None:
    report = check(history_of(unwritten=unwritten))
    assert report.proved, (report.violations, report.notes)


@pytest.mark.parametrize("clock", [3, 4, 5])
def test_between_deaths_those_who_live_push_with_one_weight(clock: int) -> None:
    """Worker 3 reports nothing for iterations 1 to 6, and worker 2 has not failed yet."""
    report = check(history_of({(1, clock): (1.0, 2.5)}))
    assert broken(report) == {Rule.PUSHES.value}, report.violations
    weights = [3.0, 2.5, 3.0] if clock < 4 else [3.0, 2.5]
    assert any(f"pushed with weights {weights}" in line for line in report.violations)


def test_in_front_of_a_death_as_well_where_the_dead_ones_record_has_ended() -> None:
    report = check(history_of({(1, 1): (1.0, 3.5)}))
    assert broken(report) == {Rule.PUSHES.value}, report.violations
    assert report.num_violations == 1


def test_between_deaths_the_weight_is_what_they_bring() -> None:
    said = {(each, 3): (1.0, 2.5) for each in (0, 1, 2)}
    report = check(history_of(said))
    assert broken(report) == {Rule.PUSHES.value}
    assert "weight 2.5, its workers brought [1.0, 1.0, 1.0]" in report.violations[0]


@pytest.mark.parametrize(("weight", "is_proved"), [(4.5, True), (3.0, True), (2.5, False)])
def test_where_a_dead_one_says_nothing_the_others_bring_no_more_than_the_weight(
    weight: float, is_proved: bool
) -> None:
    report = check(history_of({(each, 1): (1.0, weight) for each in MEMBERS}))
    assert report.proved == is_proved
    assert is_proved or broken(report) == {Rule.PUSHES.value}


def test_in_the_iteration_of_a_death_some_may_push_nothing_and_not_something_else() -> None:
    def of(weight: float) -> set[str]:
        return {
            line
            for line in check(history_of({(1, 6): (1.0, weight)})).violations
            if "pushed with weights" in line
        }

    assert not of(0.0)
    assert of(1.5)


def test_nobody_pushes_behind_its_death() -> None:
    findings = Findings(max_listed_per_rule=20)
    history = history_of(told=lambda _server, worker, clock: (worker, min(clock, 3)), unwritten=0)
    Claims.of(history, findings)
    assert "worker 2: pushed iteration 4, but it had failed in iteration 3" in findings.lines()
    assert not any("pushed iteration 3" in line for line in findings.lines())


def test_what_a_server_without_chunks_stamps_is_where_the_groups_clock_began() -> None:
    def far(server: int, worker: int, clock: int) -> Told:
        return worker, 2**31 - 2 if server == 2 else clock

    report = check(history_of(told=far))
    assert broken(report) == {Rule.MEMBERSHIP.value}
    assert any("the server owns no chunk: 0 belongs there" in line for line in report.violations)
    said = {(each, 8): (1.0, 2.5) for each in (0, 1)}
    report = check(history_of(said, told=far))
    assert broken(report) == {Rule.MEMBERSHIP.value, Rule.PUSHES.value}


@pytest.mark.parametrize("silent", [0, 1, 2])
@pytest.mark.parametrize("dead", [2, 3])
def test_all_servers_tell_of_the_same_deaths(silent: int, dead: int) -> None:
    def told(server: int, worker: int, clock: int) -> Told:
        return None if (server, worker) == (silent, dead) else (worker, clock)

    history = history_of(told=told)
    report = check(history)
    says = (
        f"server {int(not silent)} says that worker {dead} of group 0 has failed, server {silent} "
        "that the group had all its workers"
    )
    assert says in report.violations
    log = dataclasses.replace(history.servers[silent], is_complete=False)
    servers = (*history.servers[:silent], log, *history.servers[silent + 1 :])
    assert says not in check(dataclasses.replace(history, servers=servers)).violations


def test_servers_that_leave_nobody_between_them_are_refused() -> None:
    def told(server: int, worker: int, clock: int) -> Told:
        return 3 - worker if server == 1 else worker, clock

    report = check(history_of(told=told))
    assert sum("that the group had all its workers" in line for line in report.violations) == 6


def test_a_death_that_was_heard_behind_the_end_of_the_group_counts_for_no_iteration() -> None:
    def told(server: int, worker: int, clock: int) -> Told:
        return None if (server < 2, worker) == (True, 2) else (worker, clock)

    findings = Findings(max_listed_per_rule=20)
    Claims.of(history_of(told=told), findings)
    assert findings.lines() == ()


def test_of_a_server_without_chunks_a_stamp_says_nothing() -> None:
    history = history_of()
    told = [
        ToldDeaths.of(ServerReplay(history.run, log), left={0: 9}, dead=set())
        for log in history.servers
    ]
    assert [each.stamps for each in told] == [DEATHS, DEATHS, {3: None, 2: None}]


def told_by(
    stamps: dict[int, int | None], left: dict[int, int] | None = None, *, dead: bool = False
) -> ToldDeaths:
    return ToldDeaths(stamps=stamps, left=left or {}, dead={0} if dead else set())


@pytest.mark.parametrize(
    ("others", "is_right"),
    [
        ([told_by({2: 9}), told_by({}, {0: 9})], True),
        ([told_by({2: 8}), told_by({}, {0: 9})], False),
        ([told_by({2: 9}), told_by({2: 8}), told_by({}, {0: 9})], False),
        ([told_by({2: None}), told_by({}, {0: 9})], True),
        ([told_by({2: 6}), told_by({}, dead=True)], True),
        ([told_by({2: 6}), told_by({})], False),
        ([told_by({}, {0: 9}), told_by({2: 6}, {0: 9})], False),
        ([told_by({2: 6}, {0: 9}), told_by({2: 5}, {0: 9})], True),
    ],
)
def test_who_need_not_tell_of_a_death(others: list[ToldDeaths], *, is_right: bool) -> None:
    findings = Findings(max_listed_per_rule=20)
    check_same_reforms(record(), dict(enumerate(others)), findings)
    assert (findings.total == 0) == is_right, findings.lines()


def summary(most: int | None, seen: dict[str, int], **others: object) -> Summary:
    said = {
        "mode": "sync",
        "staleness": None,
        "servers": 3,
        "empty_servers": (2,),
        "workers": 4,
        "groups": 1,
        "chunks": NUM_CHUNKS,
        "clocks": (NUM_ITERATIONS,),
        "updates_applied": None,
        "max_staleness_seen": most,
        "staleness_seen": seen,
        "exit": "failed",
        "recorded": {"pipeline": 0, "checksum_every": 0},
        "per_server": (),
    }
    return Summary.model_validate(said | others)


@pytest.mark.parametrize(
    ("most", "num", "is_right"), [(0, 36, True), (0, 50, True), (0, 35, False), (1, 36, False)]
)
def test_the_summary_counts_at_least_what_the_living_had_from_the_first(
    most: int, num: int, *, is_right: bool
) -> None:
    """Two workers live, with two chunks each, for nine iterations."""
    report = check(history_of(), summary=summary(most, {"0": num}))
    assert report.proved == is_right, report.violations
    assert any("held between bounds only" in note for note in report.notes)


@pytest.mark.parametrize(
    ("most", "seen", "is_right"),
    [
        (2, {"0": 30, "2": 3}, True),
        (4, {"0": 33, "2": 5, "4": 1}, True),
        (1, {"0": 30, "2": 3}, False),
        (5, {"0": 30, "2": 3}, False),
        (2, {"0": 33, "2": 2}, False),
        (2, {"0": 33}, False),
        (None, {}, True),
    ],
)
def test_between_which_bounds_staleness_is_held(
    most: int | None, seen: dict[str, int], *, is_right: bool
) -> None:
    shown = Shown(
        servers=(), clocks=(9,), staleness={0: 30, 2: 3}, max_staleness=4, knows_staleness=False
    )
    findings = Findings(max_listed_per_rule=20)
    check_claims(summary(most, seen), shown, findings)
    assert (findings.total == 0) == is_right, findings.lines()


def test_a_run_that_completed_says_how_stale_its_uses_were() -> None:
    shown = Shown(servers=(), clocks=(9,), staleness={}, max_staleness=0, knows_staleness=False)
    findings = Findings(max_listed_per_rule=20)
    check_claims(summary(None, {}, exit="completed", updates_applied=0), shown, findings)
    assert findings.lines() == ("summary.json says max_staleness_seen None of a whole run",)
