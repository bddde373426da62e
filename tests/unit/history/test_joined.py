"""A substitute joins a run: recorded, recomputed, and refused where it is wrong.

Groups 0 and 1 of one worker each and a substitute's, group 2; chunk 0 on server 0, chunk 1 on
server 1. Group 1 fails in iteration 2, and the substitute joins at clock 3, after a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from psdist.commands.check import Report, check
from psdist.errors import HistoryError
from psdist.history import EventKind, History
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.summaries import check_promises
from psdist.history.run_record import RunRecord
from psdist.history.writers import history_folder, read_history, write_run
from tests.support.history.memory import ServerHistory, WorkerHistory, collect
from tests.support.history.summaries import summary_of_toy
from tests.support.history.toy_run import ToyRun

JOIN, DEATH = EventKind.JOIN, EventKind.DEATH
NUM_ITERATIONS, DIES_IN, JOINS_AT = 5, 2, 3

Events = list[tuple[object, ...]]
Change = Callable[[list[Events]], None]


def events_of_server(mode: str) -> Events:
    events: Events = [("member", JOIN, group, 0) for group in range(2)]
    for clock in range(NUM_ITERATIONS):
        if clock == DIES_IN:
            events.append(("member", DEATH, 1, DIES_IN))
        if clock == JOINS_AT:
            events += [("member", EventKind.SUSPEND, 0, JOINS_AT), ("member", JOIN, 2, JOINS_AT)]
            events.append(("member", EventKind.RESUME, 0, 0))
        groups = [0, 1] if clock < DIES_IN else [0]
        if clock >= JOINS_AT:
            groups = [0, 2]
        if mode == "sync":
            events.append(("step", groups, clock))
        else:
            events += [("step", [group], clock) for group in groups]
    events += [("member", EventKind.LEAVE, group, NUM_ITERATIONS) for group in (0, 2)]
    return events


def history_of(change: Change = lambda _events: None, *, mode: str = "sync") -> History:
    """``change`` may alter the lists of what the servers write down."""
    toy = ToyRun(
        seed=0, groups=((0,), (1,), (2,)), iterations=(5, 5, 5), num_servers=2, num_chunks=2
    )
    changed = {"mode": mode, "staleness": None, "checksum_every": 0, "num_substitutes": 1}
    run = toy.record.model_copy(update=changed)
    events = [events_of_server(mode) for _ in range(2)]
    change(events)

    servers = [ServerHistory(None, server) for server in range(2)]
    workers = [WorkerHistory(None, worker) for worker in range(3)]
    begins = [0, 0, JOINS_AT]

    def use(clock: int) -> None:
        for worker, log in enumerate(workers):
            if clock < begins[worker] or (worker == 1 and clock > DIES_IN):
                continue
            reply = max(begins[worker], clock - 1)
            for server in range(2):
                log.uses(clock, [server], server, servers[server].position, reply)
            log.push(clock, 1.0, 1.0, (), 2)

    for clock in range(NUM_ITERATIONS + 1):
        if clock < NUM_ITERATIONS:
            use(clock)
        for server, its in zip(servers, events, strict=True):
            while its and (its[0][0] == "member" or its[0][2] == clock):
                kind, *what = its.pop(0)
                if kind == "member":
                    event, group, at = what
                    server.member(event, group, at, 1.0)  # type: ignore[arg-type]
                else:
                    groups: list[int] = what[0]  # type: ignore[assignment]
                    scale = 1.0 if mode == "sync" or clock == DIES_IN else 0.5
                    server.step(
                        server.server, [(each, clock, 1.0, False, 0) for each in groups], scale
                    )
    for server in servers:
        server.close()
    for worker in (0, 2):
        workers[worker].close()
    return collect(run, servers, workers)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_substitute_that_has_joined_is_proved_from_its_clock_on(mode: str) -> None:
    history = history_of(mode=mode)
    report = check(history)
    assert report.proved, report.violations
    assert history.first.tolist() == [0, 0, JOINS_AT]
    assert report.max_staleness == 0


def test_a_substitute_that_never_joined_is_missed_by_nobody() -> None:
    def without(events: list[Events]) -> None:
        for its in events:
            its[:] = [
                ("step", [0], each[2]) if each[0] == "step" and 2 in each[1] else each  # type: ignore[operator]
                for each in its
                if each[:1] + each[2:3] != ("member", 2)
            ]

    history = history_of(without)
    workers = (*history.workers[:2], WorkerHistory(None, 2).log())
    whole = History(run=history.run, servers=history.servers, workers=workers)
    report = check(whole)
    assert report.proved, (report.violations, report.notes)
    assert whole.first.tolist() == [0, 0, 0]
    assert "worker 2" in " ".join(check(history).violations)  # whose records say otherwise


def place(events: Events, event: EventKind, group: int) -> int:
    return next(i for i, each in enumerate(events) if each[:3] == ("member", event, group))


def another_clock_on_one_server(events: list[Events]) -> None:
    events[1][place(events[1], JOIN, 2)] = ("member", JOIN, 2, JOINS_AT - 1)


def before_anybody_has_died(events: list[Events]) -> None:
    for its in events:
        death = its.pop(place(its, DEATH, 1))
        its.insert(place(its, JOIN, 2) + 1, death)


def never_anybody_died(events: list[Events]) -> None:
    for its in events:
        del its[place(its, DEATH, 1)]


def in_a_round_that_is_over(events: list[Events]) -> None:
    for its in events:
        its[place(its, JOIN, 2)] = ("member", JOIN, 2, JOINS_AT - 1)


def later_than_it_pushes(events: list[Events]) -> None:
    for its in events:
        its[place(its, JOIN, 2)] = ("member", JOIN, 2, JOINS_AT + 1)


def twice(events: list[Events]) -> None:
    for its in events:
        at = place(its, JOIN, 2)
        its.insert(at, its[at])


def without_joining(events: list[Events]) -> None:
    for its in events:
        del its[place(its, JOIN, 2)]


def without_it_in_a_step(events: list[Events]) -> None:
    its = events[0]
    its[its.index(("step", [0, 2], JOINS_AT))] = ("step", [0], JOINS_AT)


def without_its_leave(events: list[Events]) -> None:
    del events[0][place(events[0], EventKind.LEAVE, 2)]


@pytest.mark.parametrize(
    ("change", "rule", "words"),
    [
        (another_clock_on_one_server, Rule.MEMBERSHIP, "joined server 0 at clock 3, server 1 at"),
        (before_anybody_has_died, Rule.MEMBERSHIP, "substitute number 1, but 0 groups had failed"),
        (never_anybody_died, Rule.MEMBERSHIP, "substitute number 1, but 0 groups had failed"),
        (in_a_round_that_is_over, Rule.MEMBERSHIP, "at clock 2, but a chunk contains update 2"),
        (later_than_it_pushes, Rule.APPLIES, "applied twice or out of order"),
        (twice, Rule.MEMBERSHIP, "the group had joined already"),
        (without_joining, Rule.MEMBERSHIP, "the group has not joined"),
        (without_it_in_a_step, Rule.STEPS, "made of groups [0] where [0, 2] belong"),
        (without_its_leave, Rule.MEMBERSHIP, "group 2 has neither left nor failed"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_what_is_wrong_about_it_is_refused(change: Change, rule: Rule, words: str) -> None:
    report: Report = check(history_of(change))
    assert rule.value in report.violations_by_rule, report.violations
    assert words in "\n".join(report.violations)


@pytest.mark.parametrize("num_substitutes", [3, 2], ids=["all", "one of two workers"])
def test_substitutes_are_groups_of_one_behind_others(num_substitutes: int) -> None:
    groups = ((0,), (1, 2), (3,)) if num_substitutes == 2 else ((0,), (1,), (2,))
    run = ToyRun(seed=0, groups=groups, iterations=(1, 1, 1)).record.model_dump()
    with pytest.raises(ValueError, match=f"{num_substitutes} substitutes are groups of one worker"):
        RunRecord.model_validate(run | {"num_substitutes": num_substitutes})


def test_records_of_groups_that_there_are_not_are_refused_as_ever() -> None:
    with pytest.raises(HistoryError, match="has group 7"):
        history_of(lambda events: events[0].append(("member", EventKind.LEAVE, 7, 5)))


def test_what_it_uses_first_is_of_a_reply_to_its_first_round() -> None:
    history = history_of()
    uses = history.workers[2].uses
    assert uses["reply"][0] == JOINS_AT
    uses["reply"][:2] = JOINS_AT - 1
    report = check(history)
    assert "the last one is to one of 3 to 3" in "\n".join(report.violations)


def test_files_of_a_substitute_that_has_not_joined_are_not_missed(tmp_path: Path) -> None:
    toy = ToyRun(seed=0, groups=((0,), (1,)), iterations=(2, 2), num_servers=1, num_chunks=1)
    run = RunRecord.model_validate(toy.record.model_dump() | {"num_substitutes": 1})
    folder = history_folder(tmp_path, 0)
    write_run(folder, run)
    for log in (ServerHistory(folder, 0), WorkerHistory(folder, 0)):
        log.close()
    history = read_history(tmp_path)
    never = history.workers[1]
    assert (never.worker, len(never.uses), len(never.pushes)) == (1, 0, 0)
    assert never.is_complete
    assert (run.num_workers, run.num_beginning, run.first_substitute) == (2, 1, 1)
    (folder / "worker-0.uses").unlink()
    with pytest.raises(HistoryError, match=r"worker-0\.uses"):
        read_history(tmp_path)


def test_a_summary_counts_those_who_begin() -> None:
    toy = ToyRun(seed=0, groups=((0,), (1,)), iterations=(2, 2), num_servers=1, num_chunks=1)
    run = RunRecord.model_validate(toy.record.model_dump() | {"num_substitutes": 1})
    summary = summary_of_toy(toy)
    findings = Findings(max_listed_per_rule=9)
    check_promises(summary.of_set(0), run, findings)
    told = " ".join(findings[Rule.SUMMARY].lines)
    assert "says workers 2, run.json says 1" in told
    assert "says groups 2, run.json says 1" in told
    right = summary.model_copy(update={"workers": 1, "groups": 1})
    findings = Findings(max_listed_per_rule=9)
    check_promises(right.of_set(0), run, findings)
    told = " ".join(findings[Rule.SUMMARY].lines)
    assert "workers" not in told
    assert "groups" not in told
