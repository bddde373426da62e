"""What a chunk inherits of a group that failed: recorded, recomputed, and refused where it is
wrong.

sync, groups 0 to 2 of one worker each, chunks 0 and 1 on one server. Group 1 fails in iteration 2:
its update of chunk 0 has arrived whole, that of chunk 1 has not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from psdist.commands.check import Report, check
from psdist.history import EventKind, History, Records
from psdist.history.rules.findings import Rule
from tests.support.history.memory import ServerHistory, WorkerHistory, collect
from tests.support.history.toy_run import ToyRun

APPLY, DEATH, INHERIT = EventKind.APPLY, EventKind.DEATH, EventKind.INHERIT
NUM_ITERATIONS, DIES_IN = 4, 2


def history_of(
    change: Callable[[list[tuple[object, ...]]], None] = lambda _events: None,
) -> History:
    """``change`` may alter the list of what the server writes down."""
    toy = ToyRun(
        seed=0, groups=((0,), (1,), (2,)), iterations=(4, 4, 4), num_servers=1, num_chunks=2
    )
    run = toy.record.model_copy(update={"mode": "sync", "staleness": None, "checksum_every": 0})
    events: list[tuple[object, ...]] = [("member", EventKind.JOIN, g, 0) for g in range(3)]
    for clock in range(NUM_ITERATIONS):
        for chunk in range(2):
            groups = [0, 2]
            if clock < DIES_IN or (clock, chunk) == (DIES_IN, 0):
                groups = [0, 1, 2]
            events.append(("step", chunk, groups, clock))
        if clock == DIES_IN - 1:
            events += [("inherit", 0, 1, DIES_IN), ("member", DEATH, 1, DIES_IN)]
    events += [("member", EventKind.LEAVE, g, NUM_ITERATIONS) for g in (0, 2)]
    change(events)

    server = ServerHistory(None, 0)
    workers = [WorkerHistory(None, worker) for worker in range(3)]
    iterations = [0, 0, 0]

    def use() -> None:
        """A worker whose last update is in both chunks begins the next iteration."""
        for worker, log in enumerate(workers):
            clock = iterations[worker]
            if clock < NUM_ITERATIONS and not (worker == 1 and clock > DIES_IN):
                log.uses(clock, [0, 1], 0, server.position, max(0, clock - 1))
                log.push(clock, 1.0, 1.0, (), 2)
                iterations[worker] += 1

    is_open = False
    for kind, *what in events:
        if kind == "member":
            event, group, clock = what
            server.member(event, group, clock, 1.0)  # type: ignore[arg-type]
        elif kind == "inherit":
            server.inherit(*what)  # type: ignore[arg-type]
        elif kind == "taken over":
            server.taken_over(1)
        else:
            chunk, groups, clock = what
            if chunk == 0 and not is_open:
                is_open = True
                use()
            steps: Sequence[int] = groups  # type: ignore[assignment]
            server.step(chunk, [(g, clock, 1.0, False, 0) for g in steps])  # type: ignore[arg-type,misc]
            is_open = is_open and chunk == 0
    server.close()
    for worker in (0, 2):
        workers[worker].close()
    return collect(run, [server], workers)


def broken(report: Report) -> set[str]:
    return set(report.violations_by_rule)


def test_each_chunk_has_the_contributors_that_were_recorded() -> None:
    report = check(history_of())
    assert report.proved, report.violations
    events = history_of().servers[0].events
    of_group_1 = events[(events["kind"] == APPLY) & (events["group"] == 1)]
    assert of_group_1["clock"].tolist() == [0, 0, 1, 1, 2]


def place(events: Sequence[tuple[object, ...]], kind: object) -> int:
    return next(i for i, each in enumerate(events) if kind in each[:2])


def without(events: list[tuple[object, ...]]) -> None:
    del events[place(events, "inherit")]


def of_another_clock(events: list[tuple[object, ...]]) -> None:
    events[place(events, "inherit")] = ("inherit", 0, 1, DIES_IN + 1)


def of_another_chunk(events: list[tuple[object, ...]]) -> None:
    events[place(events, "inherit")] = ("inherit", 1, 1, DIES_IN)


def of_another_group(events: list[tuple[object, ...]]) -> None:
    events[place(events, "inherit")] = ("inherit", 0, 2, DIES_IN)


def twice(events: list[tuple[object, ...]]) -> None:
    events.insert(place(events, "inherit"), ("inherit", 0, 1, DIES_IN))


def behind_its_death(events: list[tuple[object, ...]]) -> None:
    at = place(events, "inherit")
    events[at], events[at + 1] = events[at + 1], events[at]


def far_in_front(events: list[tuple[object, ...]]) -> None:
    at = place(events, "inherit")
    events.insert(3, events.pop(at))


def never_applied(events: list[tuple[object, ...]]) -> None:
    events[events.index(("step", 0, [0, 1, 2], DIES_IN))] = ("step", 0, [0, 2], DIES_IN)


def one_more_of_the_dead(events: list[tuple[object, ...]]) -> None:
    events[events.index(("step", 1, [0, 2], DIES_IN))] = ("step", 1, [0, 1, 2], DIES_IN)


def without_the_death(events: list[tuple[object, ...]]) -> None:
    del events[place(events, DEATH)]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (without, Rule.APPLIES),
        (of_another_clock, Rule.MEMBERSHIP),
        (of_another_chunk, Rule.STEPS),
        (of_another_group, Rule.MEMBERSHIP),
        (twice, Rule.MEMBERSHIP),
        (behind_its_death, Rule.MEMBERSHIP),
        (far_in_front, Rule.MEMBERSHIP),
        (never_applied, Rule.STEPS),
        (one_more_of_the_dead, Rule.APPLIES),
        (without_the_death, Rule.MEMBERSHIP),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_server_that_says_otherwise_is_refused(
    change: Callable[[list[tuple[object, ...]]], None], rule: Rule
) -> None:
    report = check(history_of(change))
    assert rule.value in broken(report), report.violations


def test_what_is_inherited_and_lost_is_named() -> None:
    report = check(history_of(never_applied))
    assert any(
        "chunk 0: update 2 of group 1 is inherited: it was never applied: lost" in line
        for line in report.violations
    ), report.violations


def at_its_death(events: list[tuple[object, ...]]) -> None:
    """Another server continues before the chunk contains what it was to inherit."""
    events.insert(place(events, DEATH) + 1, ("taken over",))


def without_what_was_lost(events: list[tuple[object, ...]]) -> None:
    at_its_death(events)
    never_applied(events)


def behind_its_apply(events: list[tuple[object, ...]]) -> None:
    events.insert(events.index(("step", 1, [0, 2], DIES_IN)), ("taken over",))


@pytest.mark.parametrize("change", [without_what_was_lost, behind_its_apply])
def test_what_a_server_had_inherited_and_not_applied_dies_with_it(
    change: Callable[[list[tuple[object, ...]]], None],
) -> None:
    report = check(history_of(change))
    assert not report.violations, report.violations


def test_who_goes_on_applies_nothing_that_died_with_the_server() -> None:
    assert Rule.APPLIES.value in broken(check(history_of(at_its_death)))


def test_a_step_before_the_takeover_contains_what_was_inherited() -> None:
    def left_out(events: list[tuple[object, ...]]) -> None:
        never_applied(events)
        events.insert(events.index(("step", 1, [0, 2], DIES_IN)), ("taken over",))

    assert Rule.STEPS.value in broken(check(history_of(left_out)))


def test_an_inherited_update_is_waited_for_by_those_who_use_the_chunk() -> None:
    """A use of iteration 3 whose chunk 0 lacks what it was to inherit."""
    history = history_of()
    uses: Records = history.workers[0].uses
    events = history.servers[0].events
    inherited = np.flatnonzero((events["kind"] == APPLY) & (events["clock"] == DIES_IN))[0]
    late = (uses["iteration"] == DIES_IN + 1) & (uses["chunk"] == 0)
    uses["position"][late] = inherited
    assert Rule.BOUND.value in broken(check(history))
