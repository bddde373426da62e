"""Proofs for a group that continues without one of its workers, and refusals.

sync, group 0 of workers 0 to 2 and group 1 of worker 3, chunks 0 to 5 on one server: two of each
worker's slice. Worker 1 fails in iteration 2: of its chunks (1 and 4) one update has arrived whole,
of the other its heir, worker 2, pushes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from psdist.commands.check import Report, check
from psdist.history import NO_CHUNK, EventKind, History
from psdist.history.rules.findings import Rule
from psdist.history.rules.log.reformed import Pushers, check_reforms, lost_workers, stamps_of
from psdist.history.run_record import RunRecord
from psdist.protocol.partition import slices_of_the_living
from tests.support.history.memory import ServerHistory, WorkerHistory, collect

REFORM, LEAVE, DEATH = EventKind.REFORM, EventKind.LEAVE, EventKind.DEATH
NUM_CHUNKS, NUM_ITERATIONS, DIES_IN, DEAD = 6, 4, 2, 1
GROUPS = ((0, 1, 2), (3,))
PLACES = tuple(chunk % 3 for chunk in range(NUM_CHUNKS))
WHOLE, NOTHING = 1, 4
"""Chunks of the failed worker: its last update came to the first, not to the second."""

Event = list[object]


def record() -> RunRecord:
    return RunRecord(
        psdist="test",
        mode="sync",
        groups=GROUPS,
        slices=((0,) * NUM_CHUNKS, (), PLACES),
        num_servers=1,
        num_chunks=NUM_CHUNKS,
        owners=(0,) * NUM_CHUNKS,
        checksum_every=0,
    )


def events_of() -> list[Event]:
    """Return the server's records: [kind, group or chunk, clock, weight of group 0 ...]."""
    events: list[Event] = [["member", EventKind.JOIN, 0, 0, 3], ["member", EventKind.JOIN, 1, 0, 1]]
    for clock in range(NUM_ITERATIONS):
        if clock == DIES_IN:
            events += [["inherit", WHOLE, 0, clock], ["member", REFORM, 0, clock, DEAD]]
        for chunk in range(NUM_CHUNKS):
            weight = 3.0 if clock < DIES_IN or (clock == DIES_IN and chunk != NOTHING) else 2.0
            weight = 0.0 if (clock, chunk) == (DIES_IN, NOTHING) else weight
            events.append(["step", chunk, clock, weight])
    return [
        *events,
        ["member", LEAVE, 0, NUM_ITERATIONS, 2],
        ["member", LEAVE, 1, NUM_ITERATIONS, 1],
    ]


def history_of(
    change: Callable[[list[Event]], None] = lambda _events: None,
    *,
    claims: dict[tuple[int, int], tuple[float, float]] | None = None,
    is_lost_late: bool = True,
) -> History:
    """``change`` alters what the server writes down; ``claims``: of (worker, iteration), what it
    says it brought, and pushed with; ``is_lost_late``: the dead one's record ends with its last
    iteration."""
    events = events_of()
    change(events)
    server, workers = ServerHistory(None, 0), [WorkerHistory(None, each) for each in range(4)]
    begun = 0

    def use() -> None:
        for worker, log in enumerate(workers):
            if worker == DEAD and begun > DIES_IN - (not is_lost_late):
                continue
            reply = max(0, begun - 1)
            log.uses(begun, list(range(NUM_CHUNKS)), 0, server.position, reply)
            group = 1.0 if worker == 3 else 3.0 if begun <= DIES_IN else 2.0
            own, weight = (claims or {}).get((worker, begun), (1.0, group))
            empty = () if weight else range(NUM_CHUNKS)
            log.push(begun, own, weight, empty, NUM_CHUNKS)

    for kind, *what in events:
        if kind == "member":
            server.member(*what)  # type: ignore[arg-type]
        elif kind == "inherit":
            server.inherit(*what)  # type: ignore[arg-type]
        else:
            chunk, clock, weight = what
            if chunk == 0 and clock == begun:
                use()
                begun += 1
            updates = [(0, clock, weight, not weight, 0), (1, clock, 1.0, False, 0)]
            server.step(chunk, updates)  # type: ignore[arg-type]
    server.close()
    for worker in (0, 2, 3):
        workers[worker].close()
    return collect(record(), [server], workers)


def at(events: Sequence[Event], *begin: object) -> int:
    return next(i for i, each in enumerate(events) if each[: len(begin)] == [*begin])


def rules(report: Report) -> set[str]:
    return set(report.violations_by_rule)


def test_updates_are_of_who_had_the_chunk_when_they_came() -> None:
    history = history_of()
    report = check(history)
    assert report.proved, (report.violations, report.notes)
    assert any("groups continue: 0 without [1]" in note for note in report.notes)
    assert any("worker 1 end early" in note and "it failed" in note for note in report.notes)
    assert lost_workers(history) == {0: [{DEAD}]}
    assert stamps_of(history) == {0: {DEAD: {DIES_IN}}}


def test_its_heirs_are_those_that_the_workers_have() -> None:
    slices = {worker: [c for c in range(NUM_CHUNKS) if PLACES[c] == worker] for worker in range(3)}
    for gone in ([1], [0], [2, 0], [1, 2]):
        pushers = Pushers(record(), {0: [(10 + each, each) for each in gone]})
        living = [each for each in range(3) if each not in gone]
        wanted = slices_of_the_living(slices, living)
        groups, chunks = np.zeros(NUM_CHUNKS, np.int64), np.arange(NUM_CHUNKS)
        found = pushers.of_rows(groups, chunks, np.full(NUM_CHUNKS, 99))
        assert {each: np.flatnonzero(found == each).tolist() for each in living} == wanted
        before = pushers.of_rows(groups, chunks, np.zeros(NUM_CHUNKS, np.int64))
        assert before.tolist() == list(PLACES)
    assert len(pushers.ever(0)) == 3
    assert [each.tolist() for each in pushers.ever(1)] == [[3] * NUM_CHUNKS]


def without(events: list[Event]) -> None:
    del events[at(events, "member", REFORM)]


def of_another_worker(events: list[Event]) -> None:
    events[at(events, "member", REFORM)][4] = 0


def of_a_stranger(events: list[Event]) -> None:
    events[at(events, "member", REFORM)][4] = 3


def of_the_last_one(events: list[Event]) -> None:
    events[at(events, "member", REFORM)][2] = 1
    events[at(events, "member", REFORM)][4] = 3


def twice(events: list[Event]) -> None:
    place = at(events, "member", REFORM)
    events.insert(place, [*events[place]])


def stamped_too_high(events: list[Event]) -> None:
    events[at(events, "member", REFORM)][3] = DIES_IN + 1


def stamped_too_low(events: list[Event]) -> None:
    events[at(events, "member", REFORM)][3] = DIES_IN - 1


def behind_its_leave(events: list[Event]) -> None:
    place = at(events, "member", REFORM)
    events.append(events.pop(place))


def with_all_workers_still(events: list[Event]) -> None:
    events[at(events, "member", LEAVE, 0)][4] = 3


def inherited_far_in_front(events: list[Event]) -> None:
    events.insert(3, events.pop(at(events, "inherit")))


def nothing_of_a_living_ones(events: list[Event]) -> None:
    """A server has dropped what worker 0 had pushed."""
    events[at(events, "step", 0, DIES_IN)][3] = 0.0


def nothing_once_more(events: list[Event]) -> None:
    """And the update that was pushed for the failed worker an iteration later."""
    events[at(events, "step", NOTHING, DIES_IN + 1)][3] = 0.0


def nothing_an_iteration_late(events: list[Event]) -> None:
    """In a chunk whose last update the failed worker had pushed: the first one pushed for it."""
    events[at(events, "step", WHOLE, DIES_IN + 1)][3] = 0.0


def the_weight_of_the_dead(events: list[Event]) -> None:
    events[at(events, "step", 2, DIES_IN + 1)][3] = 3.0


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (without, Rule.MEMBERSHIP),
        (of_a_stranger, Rule.MEMBERSHIP),
        (of_the_last_one, Rule.MEMBERSHIP),
        (twice, Rule.MEMBERSHIP),
        (stamped_too_high, Rule.MEMBERSHIP),
        (stamped_too_low, Rule.MEMBERSHIP),
        (behind_its_leave, Rule.MEMBERSHIP),
        (with_all_workers_still, Rule.MEMBERSHIP),
        (inherited_far_in_front, Rule.MEMBERSHIP),
        (nothing_of_a_living_ones, Rule.WEIGHTS),
        (nothing_once_more, Rule.WEIGHTS),
        (nothing_an_iteration_late, Rule.WEIGHTS),
        (the_weight_of_the_dead, Rule.WEIGHTS),
    ],
)
def test_what_cannot_be_is_refused(change: Callable[[list[Event]], None], rule: Rule) -> None:
    report = check(history_of(change))
    assert rule.value in rules(report), report.violations
    assert not report.proved


def test_a_run_in_which_another_one_is_said_to_have_died_is_not_proved() -> None:
    report = check(history_of(of_another_worker))
    assert not report.proved
    assert "the records of worker 1 end early, after 18 uses" in report.notes


def test_who_had_not_pushed_gives_its_iteration_up_and_nobody_else_does() -> None:
    def of_worker_2(events: list[Event]) -> None:
        for chunk in (2, 5):
            events[at(events, "step", chunk, DIES_IN)][3] = 0.0

    given_up = {(2, DIES_IN): (1.0, 0.0)}
    report = check(history_of(of_worker_2, claims=given_up))
    assert report.proved, report.violations

    def later(events: list[Event]) -> None:
        for chunk in range(NUM_CHUNKS):
            if chunk % 3 == 2 or chunk == NOTHING:
                events[at(events, "step", chunk, DIES_IN + 1)][3] = 0.0

    report = check(history_of(later, claims={(2, DIES_IN + 1): (1.0, 0.0)}))
    assert Rule.PUSHES.value in rules(report)


@pytest.mark.parametrize("weights", [(1.0, 2.5), (1.5, 2.0)])
def test_behind_it_the_groups_weight_is_that_of_who_is_left(weights: tuple[float, float]) -> None:
    own, weight = weights

    def change(events: list[Event]) -> None:
        for chunk in range(NUM_CHUNKS):
            events[at(events, "step", chunk, DIES_IN + 1)][3] = weight

    claims = {(worker, DIES_IN + 1): (own, weight) for worker in (0, 2)}
    report = check(history_of(change, claims=claims))
    assert Rule.PUSHES.value in rules(report)
    assert any("its workers brought" in line for line in report.violations), report.violations


def test_a_record_of_the_dead_that_ends_before_is_no_error() -> None:
    assert check(history_of(is_lost_late=False)).proved


def test_a_reform_event_names_no_chunk() -> None:
    events = history_of().servers[0].events
    (reform,) = events[events["kind"] == REFORM]
    assert (reform["chunk"], reform["clock"], reform["weight"]) == (NO_CHUNK, DIES_IN, DEAD)
    assert callable(check_reforms)
    assert DEATH not in events["kind"]
