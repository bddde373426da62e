"""The history of a shard that was made anew: what is lost, and what a forged one is refused for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from psdist.commands.check import check
from psdist.errors import HistoryError
from psdist.history.joining import rebuilt
from psdist.history.records import EventKind, History, ServerLog
from psdist.history.rules.applies import check_steps
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.rebuilt import check_rebuilt
from psdist.history.rules.replay import ServerReplay
from psdist.history.rules.uses import Uses
from psdist.history.summary import Summary
from psdist.history.writers import ServerHistory
from tests.support.history.summaries import summary_of
from tests.support.virtual.job import VirtualJob
from tests.support.virtual.server_deaths import play_until

SERVER = 1


@pytest.fixture(scope="module")
def job() -> VirtualJob:
    """A run in async, in which some updates were lost with server 1."""
    return play_until(200, mode="async")


@pytest.fixture(scope="module")
def history(job: VirtualJob) -> History:
    return job.history()


def with_events(history: History, change: Callable[[Any], None], server: int = SERVER) -> History:
    log = history.servers[server]
    events = log.events.copy()
    change(events)
    logs = list(history.servers)
    logs[server] = replace(log, events=events)
    return replace(history, servers=tuple(logs))


def of_kind(events: Any, kind: EventKind) -> list[int]:
    return [int(each) for each in np.flatnonzero(events["kind"] == kind)]


def test_what_is_lost_is_listed_and_all_else_is_proved(history: History) -> None:
    report = check(history)
    assert report.proved, report.violations
    replay = ServerReplay(history.run, history.servers[SERVER])
    assert len(replay.lost_position) > 1
    assert not replay.is_contained_after_all.any()
    assert replay.is_lost.sum() == len(replay.lost_position)
    (note,) = [each for each in report.notes if "anew" in each]
    first = history.servers[SERVER].events[replay.lost_position[0]]
    assert note.startswith(
        f"server 1 died, and its shard was made anew of what workers held: "
        f"{len(replay.lost_position)} updates are lost ({first['clock']} of group {first['group']} "
        f"in chunk {first['chunk']}, "
    )
    assert note.endswith("; what its optimizer's state was, no record says")


def test_an_update_that_was_contained_after_all_is_not_lost() -> None:
    history = play_until(300, mode="async").history()
    replay = ServerReplay(history.run, history.servers[SERVER])
    assert replay.is_contained_after_all.tolist().count(True) == 1
    uses, _ = Uses.of(history).of_server(replay, Findings(max_listed_per_rule=1))
    findings = Findings(max_listed_per_rule=1)
    lost = check_rebuilt(replay, history.servers[SERVER].events, uses, findings)
    assert len(lost) == len(replay.lost_position) - 1
    assert not findings.total
    assert check(history).proved


def test_in_sync_nothing_is_lost() -> None:
    report = check(play_until(200, mode="sync").history())
    assert report.proved
    assert any("anew of what workers held: no update is lost;" in each for each in report.notes)


def test_a_step_in_sync_is_made_without_what_is_lost() -> None:
    """Where groups had come to a collective at different clocks."""
    run = play_until(200, mode="sync").history().run
    chunk = run.owners.index(SERVER)
    log = ServerHistory(None, SERVER)
    for group in range(3):
        log.member(EventKind.JOIN, group, 0, 1.0)
    log.rebuilt(0)
    log.held(chunk, 0, 1, 3)
    log.lost(chunk, 2, 0)
    log.step(chunk, [(0, 0, 1.0, False, 0), (1, 0, 1.0, False, 0)])
    findings = Findings(max_listed_per_rule=9)
    check_steps(ServerReplay(run, log.log()), findings)
    assert not findings.total, findings.lines()


def test_of_what_the_dead_server_had_counted_nothing_is_compared(job: VirtualJob) -> None:
    summary = summary_of(job)
    assert check(job.history(), summary=summary).proved

    def with_more(server: int, name: str) -> Summary:
        told = list(summary.per_server)
        told[server] = told[server].model_copy(update={name: getattr(told[server], name) + 1})
        return summary.model_copy(update={"per_server": tuple(told)})

    for name in ("pushes", "steps"):
        assert check(job.history(), summary=with_more(1, name)).proved
        assert not check(job.history(), summary=with_more(0, name)).proved
    assert not check(job.history(), summary=with_more(1, "updates")).proved


def test_what_is_lost_with_one_server_is_not_lost_again_with_the_next(history: History) -> None:
    """Of whom nobody had received anything about the chunk."""
    run, chunk = history.run, history.run.owners.index(SERVER)
    log = ServerHistory(None, SERVER)
    for group in range(3):
        log.member(EventKind.JOIN, group, 0, 1.0)
    log.apply(chunk, 0, 0, lr_scale=1 / 3)
    first = log.position
    log.apply(chunk, 1, 0, lr_scale=1 / 3)  # of which nobody has heard
    log.rebuilt(0)
    log.held(chunk, 0, 2, first)
    log.lost(chunk, 2, 0)
    log.apply(chunk, 1, 0, lr_scale=1 / 3)
    second = log.position
    log.rebuilt(0)
    log.held(chunk, 0, 3, second)
    log.lost(chunk, 1, 0)
    log.lost(chunk, 1, 1)
    log.lost(chunk, 2, 0)
    replay = ServerReplay(run, log.log())
    assert replay.group.tolist() == [0, 2, 1, 1]
    assert replay.clock.tolist() == [0, 0, 0, 1]
    assert replay.is_contained_after_all.tolist() == [False, True, False, True]


# -- forged ----------------------------------------------------------------------------------------


def make_lost(events: Any, at: int) -> None:
    events["kind"][at], events["flags"][at] = EventKind.LOST, 0
    events["weight"][at], events["lr_scale"][at] = 0, 1


def hide_a_loss(events: Any) -> None:
    """It names the update before, which is contained."""
    events["clock"][of_kind(events, EventKind.LOST)[0]] -= 1


def lose_a_later_one(events: Any) -> None:
    events["clock"][of_kind(events, EventKind.LOST)[0]] += 1


def lose_one_twice(events: Any) -> None:
    first, second, *_ = of_kind(events, EventKind.LOST)
    events[second] = events[first]


def lose_an_applied_one(events: Any) -> None:
    """In place of an apply behind the death."""
    make_lost(events, of_kind(events, EventKind.APPLY)[-1])


def go_on_with_older_values(events: Any) -> None:
    at = of_kind(events, EventKind.HELD)[0]
    events["weight"][at] = 0


def go_on_with_older_values_of_that_version(events: Any) -> None:
    at = of_kind(events, EventKind.HELD)[0]
    events["weight"][at], events["clock"][at] = 0, 1


def go_on_with_another_version(events: Any) -> None:
    events["clock"][of_kind(events, EventKind.HELD)[0]] += 1


def forget_a_chunk(events: Any) -> None:
    first, second, *_ = of_kind(events, EventKind.HELD)
    events[second] = events[first]


@pytest.mark.parametrize(
    ("forge", "rule", "words"),
    [
        (hide_a_loss, Rule.APPLIES, "are missing before it: lost"),
        (lose_a_later_one, Rule.REBUILT, "is said to be lost for chunk"),
        (lose_one_twice, Rule.REBUILT, "are lost twice, or they stand in another order"),
        (lose_an_applied_one, Rule.REBUILT, ", and no server had died"),
        (go_on_with_older_values, Rule.REBUILT, "where it was in version 1"),
        (go_on_with_older_values_of_that_version, Rule.REBUILT, "newer than position 0"),
        (go_on_with_another_version, Rule.REBUILT, "goes on in version"),
        (forget_a_chunk, Rule.REBUILT, "the shard goes on with values of chunks"),
    ],
)
def test_what_is_said_otherwise_is_refused(
    forge: Callable[[Any], None], rule: Rule, words: str, history: History
) -> None:
    report = check(with_events(history, forge))
    assert report.violations_by_rule.get(rule.value), report.violations[:3]
    assert any(words in line for line in report.violations), report.violations[:5]


def test_a_loss_on_a_server_that_lives_is_refused(history: History) -> None:
    def forge(events: Any) -> None:
        make_lost(events, of_kind(events, EventKind.APPLY)[3])

    report = check(with_events(history, forge, server=0))
    assert any("no server had died" in line for line in report.violations)


@pytest.mark.parametrize("kind", [EventKind.REBUILT, EventKind.HELD])
def test_positions_that_cannot_be_are_damage(kind: EventKind, history: History) -> None:
    def forge(events: Any) -> None:
        at = of_kind(events, kind)[0]
        events["weight"][at] = at + 1

    with pytest.raises(HistoryError, match=r"server-1\.events is damaged: .* has weight"):
        with_events(history, forge)


# -- two files -------------------------------------------------------------------------------------


def parts_of(history: History) -> tuple[ServerLog, ServerLog]:
    """What the dead server had written, and who made its shard anew."""
    log = history.servers[SERVER]
    begin = of_kind(log.events, EventKind.REBUILT)[0]
    is_before = log.checksums["position"] <= begin
    before = replace(
        log,
        events=log.events[:begin],
        checksums=log.checksums[is_before],
        is_complete=False,
    )
    later = replace(log, events=log.events[begin:], checksums=log.checksums[~is_before])
    return before, later


def test_the_later_log_goes_on_where_somebody_knew_of_last(history: History) -> None:
    before, later = parts_of(history)
    whole = rebuilt(before, later, name="rebuilt-1")
    assert (whole.events == history.servers[SERVER].events).all()
    assert whole.is_complete
    # What the dead one logged behind that nobody has seen.
    longer = replace(before, events=np.concatenate([before.events, before.events[-2:]]))
    assert (rebuilt(longer, later, name="rebuilt-1").events == whole.events).all()
    assert len(whole.checksums) == len(history.servers[SERVER].checksums)


def test_replies_that_nobody_has_received_have_no_checksums(history: History) -> None:
    """The dead server had made one behind what a chunk went on with: of that chunk alone."""
    before, later = parts_of(history)
    (first, *_) = of_kind(later.events, EventKind.HELD)
    chunk, position = int(later.events["chunk"][first]), int(later.events["weight"][first])
    is_of_last = (before.checksums["chunk"] == chunk) & (before.checksums["position"] == position)
    assert is_of_last.any()
    events = later.events.copy()
    events["weight"][first] -= 1
    whole = rebuilt(before, replace(later, events=events), name="rebuilt-1")
    expected = np.concatenate([before.checksums[~is_of_last], later.checksums])
    assert (whole.checksums == expected).all()


def test_without_its_beginning_or_behind_a_gap_it_is_damage(history: History) -> None:
    before, later = parts_of(history)
    with pytest.raises(HistoryError, match="does not begin with REBUILT"):
        rebuilt(before, replace(later, events=later.events[1:]), name="rebuilt-1")
    short = replace(before, events=before.events[:-1])
    begin = len(before.events)
    with pytest.raises(
        HistoryError, match=rf"rebuilt-1\.events begins at position {begin}, .* ends at {begin - 1}"
    ):
        rebuilt(short, later, name="rebuilt-1")
    cut = rebuilt(before, replace(later, events=later.events[:0]), name="rebuilt-1")
    assert (len(cut.events), cut.is_complete) == (begin, False)
