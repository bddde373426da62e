"""`psdist check`: honest runs pass, and every rule broken on purpose is caught.

Longer than other modules: every broken rule starts from the same honest history.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.commands.check import Report, Verdict, check, check_sets_of, main
from psdist.history import HEADER, EventFlag, Records
from psdist.history.rules.findings import Rule
from psdist.history.rules.log import replay
from psdist.history.summary import Recorded, ServerSummary
from psdist.history.writers import EventKind, History
from tests.support.history.memory import ServerHistory, WorkerHistory, collect
from tests.support.history.summaries import summary_of_toy
from tests.support.history.toy_run import Fault, ToyRun, crc_of

MODES = ("sync", "ssp", "async")


def honest(**settings: object) -> History:
    history = ToyRun(**({"seed": 1} | settings)).run()  # type: ignore[arg-type]
    assert history is not None
    return history


def faulty(fault: Fault, **settings: object) -> Report:
    """The check of the first seed whose run gave an occasion for the fault."""
    for seed in range(100):
        run = ToyRun(seed=seed, fault=fault, **settings)  # type: ignore[arg-type]
        history = run.run()
        if run.is_fault_made:
            assert history is not None
            return check(history)
    raise AssertionError(f"no seed gave an occasion for {fault}")


def with_events(history: History, server: int, events: Records) -> History:
    servers = list(history.servers)
    servers[server] = dataclasses.replace(servers[server], events=events)
    return dataclasses.replace(history, servers=tuple(servers))


def with_checksums(history: History, server: int, checksums: Records) -> History:
    servers = list(history.servers)
    servers[server] = dataclasses.replace(servers[server], checksums=checksums)
    return dataclasses.replace(history, servers=tuple(servers))


def with_uses(history: History, worker: int, uses: Records) -> History:
    workers = list(history.workers)
    workers[worker] = dataclasses.replace(workers[worker], uses=uses)
    return dataclasses.replace(history, workers=tuple(workers))


def broken(report: Report) -> set[Rule]:
    assert (report.verdict == Verdict.VIOLATED) == (report.num_violations > 0)
    assert report.num_violations == sum(report.violations_by_rule.values())
    assert all("\n" not in line for line in report.violations)
    return {rule for rule in Rule if rule.value in report.violations_by_rule}


def the_use(history: History, worker: int, iteration: int, chunk: int) -> int:
    uses = history.workers[worker].uses
    return int(np.flatnonzero((uses["iteration"] == iteration) & (uses["chunk"] == chunk))[0])


# ---------------------------------------------------------------------------------------------
# Honest runs


@pytest.mark.parametrize("mode", MODES)
def test_honest_runs_in_which_values_are_set_are_proved(mode: str) -> None:
    for seed in range(25):
        run = ToyRun(seed=seed, mode=mode, collectives=(0, 3, 3, 5), sets_values=True)
        history = run.run()
        assert history is not None
        report = check(history, summary=summary_of_toy(run))
        assert (report.violations, report.notes) == ((), ())
        assert report.proved
        loads = sum((log.events["kind"] == EventKind.LOAD).sum() for log in history.servers)
        assert loads == 4 * 3


@pytest.mark.parametrize(
    ("mode", "pipeline"), [("sync", 0), ("ssp", 0), ("ssp", 1), ("async", 0), ("async", 1)]
)
def test_honest_runs_are_proved_complete(mode: str, pipeline: int) -> None:
    for seed in range(25):
        collectives = (0, 3, 5) if seed % 2 else ()
        run = ToyRun(seed=seed, mode=mode, pipeline=pipeline, collectives=collectives)
        history = run.run()
        assert history is not None
        report = check(history, summary=summary_of_toy(run))
        assert (report.violations, report.notes) == ((), ())
        assert report.proved
        assert report.is_complete
        assert report.num_uses == sum(report.staleness.values()) == (8 * 2 + 8 + 6) * 3
        assert report.num_applies == (8 + 8 + 6) * 3
        assert report.num_checksums == report.num_uses


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checksum_every", [2, 3, 16])
def test_runs_that_sample_some_replies_are_proved(mode: str, checksum_every: int) -> None:
    for seed in range(10):
        report = check(honest(seed=seed, mode=mode, checksum_every=checksum_every))
        assert report.proved, report.violations
        # The first reply of chunk 0 is stamped with clock 0: something is always compared.
        assert 0 < report.num_checksums < report.num_uses


@pytest.mark.parametrize("mode", MODES)
def test_a_run_with_servers_that_hold_nothing_is_proved(mode: str) -> None:
    run = ToyRun(seed=1, mode=mode, num_servers=5)
    history = run.run()
    assert history is not None
    summary = summary_of_toy(run)
    assert summary.empty_servers == (3, 4)
    assert check(history, summary=summary).proved


def test_every_wrong_count_of_the_summary_is_told_in_order() -> None:
    run = ToyRun(seed=1)
    history = run.run()
    assert history is not None
    right = summary_of_toy(run)
    wrong = {
        "updates_applied": 1,
        "max_staleness_seen": 9,
        "staleness_seen": {"9": 1},
        "clocks": (1, 2, 3),
        "per_server": right.per_server[:1],
    }
    told = dict.fromkeys(right.per_server[0].model_dump(), 1)
    first = right.per_server[0].model_copy(update=told | {"copies_on_write": 2})
    wrong["per_server"] = (first, right.per_server[1].model_copy(update={"position": 1}))
    report = check(history, summary=right.model_copy(update=wrong), max_listed_per_rule=99)
    seen = check(history).staleness
    assert [line.partition(", ")[0] for line in report.violations] == [
        "summary.json says updates_applied 1",
        "summary.json says max_staleness_seen 9",
        *(f"summary.json says staleness_seen of {value} 0" for value in sorted(seen)),
        "summary.json says staleness_seen of 9 1",
        "summary.json says clock of group 0 1",
        "summary.json says clock of group 1 2",
        "summary.json says clock of group 2 3",
        "summary.json says of server 0: num_chunks 1",
        "summary.json says of server 0: position 1",
        "summary.json says of server 0: checksums 1",
        "summary.json says of server 0: pushes 1",
        "summary.json says of server 0: steps 1",
        "summary.json says of server 0: updates 1",
        "summary.json says of server 0: replies 1; it answered 44 pushes",
        "summary.json says of server 0: copies_on_write 2 of 1 steps",
        "summary.json says of server 1: position 1",
    ]


@pytest.mark.parametrize("exit_said", ["completed", "ended by SIGTERM"])
def test_only_a_run_that_failed_may_not_know_its_counts(exit_said: str) -> None:
    run = ToyRun(seed=1)
    history = run.run()
    assert history is not None
    unknown = {"updates_applied": None, "max_staleness_seen": None, "per_server": ()}
    unknown |= {"staleness_seen": {}, "exit": exit_said}
    report = check(history, summary=summary_of_toy(run).model_copy(update=unknown))
    if exit_said != "completed":
        assert report.proved
        return
    assert [line.partition(", ")[0] for line in report.violations] == [
        "summary.json says updates_applied None",
        "summary.json says max_staleness_seen None",
        "summary.json says number of servers 0",
    ]


def test_a_run_without_iterations_is_proved_and_says_that_nothing_was() -> None:
    report = check(honest(iterations=(0, 0, 0), collectives=()))
    assert report.proved
    assert report.share_stale == 0.0
    assert report.notes == ("no use was recorded: there is nothing to prove",)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_one_iteration_is_proved_by_the_first_reply_of_chunk_0(mode: str) -> None:
    history = honest(mode=mode, iterations=(1, 1, 1), collectives=(), checksum_every=16)
    report = check(history)
    assert report.proved
    assert report.num_checksums == 4  # one of each worker


@pytest.mark.parametrize("mode", MODES)
def test_groups_with_different_numbers_of_iterations_are_proved(mode: str) -> None:
    assert check(honest(mode=mode, iterations=(12, 1, 4), collectives=(4,))).proved


def slow_staleness(history: History) -> Counter[int]:
    """The same by plain loops, one use at a time."""
    found: Counter[int] = Counter()
    for worker in history.workers:
        for use in worker.uses:
            done = [0] * len(history.run.groups)
            limit = [0] * len(history.run.groups)
            for event in history.servers[use["server"]].events[: use["position"]]:
                if event["kind"] == EventKind.APPLY:
                    done[event["group"]] += event["chunk"] == use["chunk"]
                elif event["kind"] in (EventKind.JOIN, EventKind.RESUME):
                    limit[event["group"]] = 10**9
                else:
                    limit[event["group"]] = event["clock"]
            counted = [n for n, most in zip(done, limit, strict=True) if n < most]
            found[max(0, int(use["iteration"]) - int(min(counted, default=10**9)))] += 1
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_cells", [1, 7, 2**18])
def test_staleness_equals_a_recount_by_plain_loops(
    mode: str, block_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "BLOCK_CELLS", block_cells)
    for seed in range(4):
        history = honest(seed=seed, mode=mode, collectives=(2, 5), num_chunks=4)
        report = check(history)
        assert report.proved
        assert report.staleness == slow_staleness(history)
        assert report.max_staleness == max(report.staleness)


def test_async_is_stale_beyond_the_bound_that_ssp_would_keep() -> None:
    history = honest(mode="async", iterations=(40, 40, 6), collectives=(), pace=(1, 1, 0.1))
    assert check(history).proved
    assert check(history).max_staleness > 2
    as_ssp = history.run.model_copy(update={"mode": "ssp", "staleness": 2})
    assert broken(check(dataclasses.replace(history, run=as_ssp))) == {Rule.BOUND}


def test_share_stale_counts_uses_above_zero() -> None:
    report = check(honest())
    num_stale = sum(num for value, num in report.staleness.items() if value)
    assert report.share_stale == pytest.approx(num_stale / report.num_uses)
    assert dataclasses.replace(report, staleness={2: 5}).share_stale == 1.0


# ---------------------------------------------------------------------------------------------
# Runs of broken servers


@pytest.mark.parametrize(
    ("fault", "mode", "rule"),
    [
        (Fault.REPLY_BEFORE_STEP, "sync", Rule.BOUND),
        (Fault.BOUND_OFF_BY_ONE, "ssp", Rule.BOUND),
        (Fault.OWN_UPDATES_NOT_AWAITED, "ssp", Rule.OWN),
        (Fault.OWN_UPDATES_NOT_AWAITED, "async", Rule.OWN),
        (Fault.UPDATE_LOST, "sync", Rule.APPLIES),
        (Fault.UPDATE_LOST, "ssp", Rule.APPLIES),
        (Fault.UPDATE_LOST, "async", Rule.APPLIES),
        (Fault.LAST_UPDATE_LOST, "ssp", Rule.APPLIES),
        (Fault.LAST_UPDATE_LOST, "async", Rule.APPLIES),
        (Fault.UPDATE_TWICE, "sync", Rule.APPLIES),
        (Fault.UPDATE_TWICE, "ssp", Rule.APPLIES),
        (Fault.UPDATE_TWICE, "async", Rule.APPLIES),
        (Fault.HALF_STEP_SEEN, "sync", Rule.WHOLE_STEPS),
        (Fault.ARRIVAL_ORDER, "sync", Rule.STEPS),
        (Fault.GROUP_LEFT_OUT, "sync", Rule.STEPS),
        (Fault.SUSPENDED_TOO_EARLY, "ssp", Rule.MEMBERSHIP),
        (Fault.RESUME_FORGOTTEN, "ssp", Rule.APPLIES),
    ],
)
def test_a_run_with_a_broken_server_is_caught(fault: Fault, mode: str, rule: Rule) -> None:
    report = faulty(fault, mode=mode, staleness=1)
    assert not report.proved
    assert rule in broken(report)


def test_a_bound_exceeded_by_one_is_told_with_everything_that_names_it() -> None:
    report = faulty(Fault.BOUND_OFF_BY_ONE, mode="ssp", staleness=1)
    assert broken(report) == {Rule.BOUND}
    line = report.violations[0]
    for word in ("worker", "group", "iteration", "chunk", "server", "position"):
        assert word in line
    assert "needs" in line
    assert "contains" in line
    assert report.max_staleness == 2


def test_violations_beyond_the_listed_ones_are_counted() -> None:
    history = honest(mode="async", iterations=(40, 40, 6), collectives=(), pace=(1, 1, 0.1))
    run = history.run.model_copy(update={"mode": "ssp", "staleness": 0})
    history = dataclasses.replace(history, run=run)
    report = check(history, max_listed_per_rule=3)
    assert len(report.violations) == 3
    assert report.num_violations > 100
    assert len(check(history).violations) == 20


def test_violations_of_a_runs_sets_are_counted_together_and_told_by_set() -> None:
    first = honest()
    second = dataclasses.replace(first, run=first.run.model_copy(update={"set_index": 1}))
    uses = second.workers[0].uses.copy()
    uses["crc"][uses["has_crc"] == 1] ^= 1
    second = with_uses(second, 0, uses)
    alone = check(second)
    assert alone.num_violations > 20
    report = check_sets_of([first, second], None)
    assert report.num_violations == alone.num_violations
    assert report.violations == tuple(f"set 1: {line}" for line in alone.violations)
    assert broken(report) == broken(alone)
    # A fault between them counts as well.
    other = dataclasses.replace(second, run=second.run.model_copy(update={"psdist": "0.0"}))
    report = check_sets_of([first, other], None)
    assert report.num_violations == alone.num_violations + 1
    assert report.violations[0] == "run.json of set 1 is of another job than that of set 0"
    assert broken(report) == {*broken(alone), Rule.SUMMARY}


@pytest.mark.parametrize("own", [{"begins_with_state": True}, {"cut": 77}])
def test_what_each_set_has_of_its_own_makes_no_other_job(own: dict[str, object]) -> None:
    first = honest()
    second = dataclasses.replace(first, run=first.run.model_copy(update={"set_index": 1, **own}))
    report = check_sets_of([first, second], None)
    assert not any("of another job" in line for line in report.violations), report


# ---------------------------------------------------------------------------------------------
# Single records changed by hand


def test_an_old_buffer_used_is_caught_by_its_checksum() -> None:
    history = honest(empty_rate=0.0)
    uses = history.workers[2].uses.copy()
    use, before = the_use(history, 2, 5, 1), the_use(history, 2, 4, 1)
    assert uses["crc"][use] != uses["crc"][before]
    uses["crc"][use] = uses["crc"][before]
    report = check(with_uses(history, 2, uses))
    assert broken(report) == {Rule.CHECKSUM}
    assert "worker 2 (group 1), iteration 5, chunk 1" in report.violations[0]


def test_a_reply_overwritten_in_flight_is_caught_by_its_checksum() -> None:
    history = honest()
    uses = history.workers[3].uses.copy()
    use = the_use(history, 3, 2, 0)
    newer = [crc_of(0, version) for version in range(23)]
    uses["crc"][use] = newer[newer.index(int(uses["crc"][use])) + 1]
    assert broken(check(with_uses(history, 3, uses))) == {Rule.CHECKSUM}


def test_a_sampled_use_without_a_checksum_of_the_server_is_caught() -> None:
    history = honest()
    report = check(with_checksums(history, 1, history.servers[1].checksums[:0]))
    assert broken(report) == {Rule.CHECKSUM, Rule.SAMPLING}
    assert any("recorded no checksum" in line for line in report.violations)


def test_bytes_that_change_without_an_apply_are_caught() -> None:
    history = honest()
    checksums = history.servers[0].checksums.copy()
    other = np.insert(checksums, 1, checksums[0])
    other["crc"][0] ^= 1
    report = check(with_checksums(history, 0, other))
    assert broken(report) == {Rule.CHECKSUM}
    assert "no gradient was applied between" in report.violations[0]


def test_a_checksum_beyond_the_end_of_a_whole_log_is_caught() -> None:
    history = honest()
    checksums = history.servers[0].checksums.copy()
    checksums["position"][-1] = 10**6
    report = check(with_checksums(history, 0, checksums))
    assert Rule.CHECKSUM in broken(report)
    assert any("1 checksums lie beyond the end" in line for line in report.violations)


def without_crcs(history: History) -> History:
    for log in history.workers:
        uses = log.uses.copy()
        uses["has_crc"] = uses["crc"] = 0
        history = with_uses(history, log.worker, uses)
    return history


def test_runs_that_promised_no_checksum_are_proved_with_a_note() -> None:
    report = check(honest(checksum_every=0))
    assert report.proved
    assert report.num_checksums == 0
    assert report.notes == ("no bytes were compared: no reply had a checksum",)


@pytest.mark.parametrize("checksum_every", [1, 16])
def test_a_run_that_promised_checksums_is_no_proof_without_any(checksum_every: int) -> None:
    history = honest(checksum_every=checksum_every)
    report = check(without_crcs(history))
    assert broken(report) == {Rule.SAMPLING}
    assert "carries no checksum; with checksum_every" in report.violations[0]


def test_a_position_that_goes_back_is_caught() -> None:
    history = honest(mode="async", collectives=())
    uses = history.workers[2].uses.copy()
    a, b = the_use(history, 2, 4, 2), the_use(history, 2, 5, 2)
    for name in ("position", "crc"):
        uses[name][a], uses[name][b] = uses[name][b], uses[name][a]
    report = check(with_uses(history, 2, uses))
    assert Rule.BACKWARDS in broken(report)
    assert any(
        line.startswith("worker 2, iteration 5, chunk 2: uses position")
        for line in report.violations
    )


def test_a_worker_with_another_version_than_its_group_is_caught() -> None:
    history = honest(mode="async", collectives=())
    uses = history.workers[1].uses.copy()
    a, b = the_use(history, 1, 5, 0), the_use(history, 1, 6, 0)
    for name in ("position", "crc"):
        uses[name][a] = uses[name][b]
    report = check(with_uses(history, 1, uses))
    # The server made that reply to another clock.
    assert broken(report) == {Rule.SAME_VERSION, Rule.CHECKSUM}
    assert "group 0, iteration 5, chunk 0: worker 0 used" in report.violations[0]


def test_a_second_use_in_an_iteration_may_be_of_another_version_until_the_last() -> None:
    history = honest(mode="async", collectives=())
    uses = history.workers[1].uses
    begin, earlier = the_use(history, 1, 5, 0), the_use(history, 1, 4, 0)
    again = np.insert(uses, begin, uses[earlier : earlier + 3])
    again["iteration"][begin : begin + 3] = 5
    # All that is wrong with it: replies so old may not be used any more.
    report = check(with_uses(history, 1, again))
    assert broken(report) == {Rule.OWN, Rule.SAMPLING}
    assert report.num_violations == 6


def test_a_missing_iteration_is_caught() -> None:
    history = honest()
    uses = history.workers[3].uses
    report = check(with_uses(history, 3, uses[uses["iteration"] != 4]))
    assert broken(report) == {Rule.COVERAGE}
    assert report.violations == ("worker 3: iteration 4 used no parameters; there are 1 such",)


def test_a_missing_last_iteration_is_caught() -> None:
    history = honest()
    uses = history.workers[3].uses
    report = check(with_uses(history, 3, uses[uses["iteration"] != 5]))
    assert broken(report) == {Rule.COVERAGE}
    assert (
        "used parameters in 5 iterations, its group left server 0 after 6" in (report.violations[0])
    )


def test_a_missing_chunk_is_caught() -> None:
    history = honest()
    report = check(
        with_uses(history, 0, np.delete(history.workers[0].uses, the_use(history, 0, 3, 2)))
    )
    assert broken(report) == {Rule.COVERAGE}
    assert report.violations == (
        "worker 0: record 11 of its uses, of chunk 0 in iteration 4, stands where chunk 2 of a "
        "forward pass belongs",
    )


def test_more_iterations_than_the_group_finished_are_caught() -> None:
    history = honest()
    uses = history.workers[3].uses
    more = uses[uses["iteration"] == 5].copy()
    more["iteration"] = 6
    assert Rule.COVERAGE in broken(check(with_uses(history, 3, np.concatenate([uses, more]))))


def test_iterations_recorded_out_of_order_are_caught() -> None:
    history = honest()
    report = check(with_uses(history, 3, history.workers[3].uses[::-1].copy()))
    assert Rule.BACKWARDS in broken(report)
    assert "worker 3: iteration 4 recorded after iteration 5" in report.violations


def test_a_use_of_a_chunk_from_a_server_that_does_not_own_it_is_caught() -> None:
    history = honest()
    uses = history.workers[3].uses.copy()
    uses["server"][the_use(history, 3, 2, 0)] = 1
    report = check(with_uses(history, 3, uses))
    assert broken(report) == {Rule.KNOWN_VERSION}
    assert "server 0 owns the chunk" in report.violations[0]


def test_a_position_beyond_the_end_of_a_whole_log_is_caught() -> None:
    history = honest()
    uses = history.workers[3].uses.copy()
    uses["position"][the_use(history, 3, 5, 0)] = 10**6
    assert broken(check(with_uses(history, 3, uses))) == {Rule.KNOWN_VERSION}


def change_event(
    history: History, which: Callable[[Records], np.ndarray], **values: int
) -> History:
    events = history.servers[0].events.copy()
    index = int(np.flatnonzero(which(events))[0])
    for name, value in values.items():
        events[name][index] = value
    return with_events(history, 0, events)


@pytest.mark.parametrize(
    ("kind", "values", "rule", "words"),
    [
        (EventKind.JOIN, {"clock": 4}, Rule.MEMBERSHIP, "begins with 0"),
        (EventKind.JOIN, {"group": 2}, Rule.MEMBERSHIP, "had joined already"),
        (EventKind.JOIN, {"group": 2}, Rule.APPLIES, "not joined"),
        (EventKind.JOIN, {"kind": EventKind.SUSPEND}, Rule.MEMBERSHIP, "has not joined"),
        (EventKind.LEAVE, {"clock": 7}, Rule.MEMBERSHIP, "its update 7 was applied before"),
        (EventKind.LEAVE, {"clock": 9}, Rule.APPLIES, "lost"),
        (EventKind.LEAVE, {"clock": 9}, Rule.MEMBERSHIP, "left different servers"),
        (EventKind.APPLY, {"chunk": 1}, Rule.APPLIES, "server 1 owns it"),
        (EventKind.APPLY, {"flags": 0}, Rule.STEPS, "not a whole step"),
    ],
)
def test_a_changed_event_is_caught(
    kind: EventKind, values: dict[str, int], rule: Rule, words: str
) -> None:
    history = honest(iterations=(8, 8, 8))
    report = check(change_event(history, lambda events: events["kind"] == kind, **values))
    assert rule in broken(report)
    assert any(words in line for line in report.violations)


@pytest.mark.parametrize("kind", [EventKind.RESUME, EventKind.SUSPEND, EventKind.JOIN])
def test_a_group_that_comes_back_after_it_left_is_caught(kind: EventKind) -> None:
    history = honest()
    events = history.servers[0].events
    back = events[-1:].copy()
    assert back["kind"] == EventKind.LEAVE
    back["kind"] = kind
    report = check(with_events(history, 0, np.concatenate([events, back])))
    assert Rule.MEMBERSHIP in broken(report)


def test_an_update_after_the_group_left_is_caught() -> None:
    history = honest()
    server = ServerHistory(None, 0)
    left = history.servers[0].events[-1]
    server.apply(0, int(left["group"]), int(left["clock"]))
    events = np.concatenate([history.servers[0].events, server.log().events])
    report = check(with_events(history, 0, events))
    assert Rule.APPLIES in broken(report)
    assert "(not joined, suspended, left or dead)" in report.violations[0]


def test_a_lost_update_is_told_where_the_next_one_came() -> None:
    report = faulty(Fault.UPDATE_LOST, mode="async")
    assert any("its updates 2 to 2 are missing before it" in line for line in report.violations)


def test_a_step_that_other_events_interrupt_is_caught() -> None:
    history = honest(mode="sync", collectives=())
    events = history.servers[0].events
    first = int(np.flatnonzero(events["kind"] == EventKind.APPLY)[0])
    event = ServerHistory(None, 0)
    event.member(EventKind.RESUME, 0, 0)
    report = check(with_events(history, 0, np.insert(events, first + 1, event.log().events)))
    assert Rule.STEPS in broken(report)
    assert any("other events stand between" in line for line in report.violations)


def test_a_step_of_two_iterations_is_caught() -> None:
    history = honest(mode="sync", collectives=())
    events = history.servers[0].events.copy()
    last = np.flatnonzero((events["flags"] & EventFlag.LAST) != 0)
    events["flags"][last[0]] = 0
    report = check(with_events(history, 0, events))
    assert any(
        "never completed" in line or "in one step with" in line for line in report.violations
    )


def test_a_step_that_is_never_completed_is_caught() -> None:
    history = honest(mode="sync", collectives=())
    events = history.servers[0].events.copy()
    last = np.flatnonzero((events["flags"] & EventFlag.LAST) != 0)
    events["flags"][last[-1]] = 0
    report = check(with_events(history, 0, events))
    assert any("never completed" in line for line in report.violations)


# ---------------------------------------------------------------------------------------------
# Runs that did not complete


def cut(history: History, shares: list[float]) -> History:
    """Cut a prefix of every record, as a crash does."""
    count = iter(shares)
    return dataclasses.replace(
        history,
        servers=tuple(
            dataclasses.replace(
                log,
                events=log.events[: int(next(count) * len(log.events))],
                checksums=log.checksums[: int(next(count) * len(log.checksums))],
                is_complete=False,
            )
            for log in history.servers
        ),
        workers=tuple(
            dataclasses.replace(
                log,
                uses=log.uses[: int(next(count) * len(log.uses))],
                pushes=log.pushes[: int(next(count) * len(log.pushes))],
                is_complete=False,
            )
            for log in history.workers
        ),
    )


@given(
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 5),
    shares=st.lists(st.floats(0, 1), min_size=12, max_size=12),
)
def test_every_prefix_of_an_honest_run_is_incomplete_and_breaks_no_rule(
    mode: str, seed: int, shares: list[float]
) -> None:
    report = check(cut(honest(mode=mode, seed=seed), shares))
    assert report.violations == ()
    assert report.verdict == Verdict.INCOMPLETE
    for name in ("server 0", "server 1", "worker 0", "worker 1", "worker 2", "worker 3"):
        assert any(name in note and "early" in note for note in report.notes)


def test_uses_beyond_a_log_that_ends_early_are_counted_not_proved() -> None:
    history = cut(honest(), [0.5] + [1.0] * 11)
    report = check(history)
    assert report.verdict == Verdict.INCOMPLETE
    assert any("uses of later versions are not proved" in note for note in report.notes)
    assert sum(report.staleness.values()) < report.num_uses


def test_groups_that_had_not_left_before_the_crash_are_named() -> None:
    report = check(cut(honest(), [0.5] + [1.0] * 11))
    assert "on server 0 these groups never left: [0, 1, 2]" in report.notes
    assert not any("on server 1 these groups" in note for note in report.notes)


def test_updates_whose_weight_nobody_has_recorded_are_counted() -> None:
    history = honest()
    (num,) = {sum(events["chunk"] == 1) for events in [history.servers[1].events]}
    history = cut(history, [1.0] * 9 + [0.0] + [1.0] * 2)  # the pushes of worker 2
    report = check(history)
    assert report.verdict == Verdict.INCOMPLETE
    assert num == 22
    line = "updates on server {} it is not proved what they weighed"
    # All of worker 2's, and the last iteration of the others, whose records are open, too.
    assert any(("of 20 " + line).format(0) in note for note in report.notes), report.notes
    assert any(("of 10 " + line).format(1) in note for note in report.notes), report.notes


def test_a_broken_rule_before_the_crash_is_caught() -> None:
    history = honest(mode="async", iterations=(40, 40, 6), collectives=(), pace=(1, 1, 0.1))
    run = history.run.model_copy(update={"mode": "ssp", "staleness": 0})
    history = cut(dataclasses.replace(history, run=run), [0.7] * 12)
    assert Rule.BOUND in broken(check(history))


def test_a_step_cut_off_inside_the_log_is_caught_also_after_a_crash() -> None:
    history = cut(honest(mode="sync", collectives=()), [1.0] * 12)
    events = history.servers[0].events.copy()
    chunk_0 = np.flatnonzero((events["kind"] == EventKind.APPLY) & (events["chunk"] == 0))
    events["flags"][chunk_0[-1]] = 0
    assert Rule.STEPS in broken(check(with_events(history, 0, events)))


def dead_group_history(*, is_declared: bool, is_closed: bool = False) -> History:
    """Groups 0 and 1; group 1 fails after 2 iterations, group 0 continues to 6 with bound 1."""
    toy = ToyRun(seed=0, groups=((0,), (1,)), iterations=(6, 2), num_servers=1, num_chunks=1)
    run = toy.record.model_copy(update={"staleness": 1, "checksum_every": 0})
    server, workers = ServerHistory(None, 0), [WorkerHistory(None, 0), WorkerHistory(None, 1)]
    active = 2
    for group in (0, 1):
        server.member(EventKind.JOIN, group, 0, 1.0)
    for clock in range(6):
        for group in (0, 1):
            if group == 0 or clock < 2:
                workers[group].uses(clock, [0], 0, server.position, max(0, clock - 1))
                workers[group].push(clock, 1.0, 1.0, (), 1)
                server.apply(0, group, clock, 1.0, 1 / active)
            elif clock == 2 and is_declared:
                server.member(EventKind.DEATH, 1, 2, 1.0)
                active = 1
    server.member(EventKind.LEAVE, 0, 6, 1.0)
    server.close()
    workers[0].close()
    if is_closed:
        workers[1].close()
    return collect(run, [server], workers)


@pytest.mark.parametrize("is_closed", [False, True])
def test_nobody_waits_for_a_dead_group_and_the_run_may_still_be_complete(is_closed: bool) -> None:
    report = check(dead_group_history(is_declared=True, is_closed=is_closed))
    assert report.proved, report.violations
    note = "the records of worker 1 end early, after 2 uses: its group failed"
    assert (note in report.notes) != is_closed
    assert "server 0 evicted these groups: [1]" in report.notes


def test_a_server_counts_the_pushes_of_a_dead_group_and_may_not_have_answered_them() -> None:
    history = dead_group_history(is_declared=True)
    counts = {"num_chunks": 1, "updates": 8, "pushes": 8, "steps": 8, "replies": 6}
    counts |= {"copies_on_write": 0, "position": 12, "checksums": 0}
    told = summary_of_toy(ToyRun(seed=0)).model_copy(
        update={
            "staleness": 1,
            "servers": 1,
            "workers": 2,
            "groups": 2,
            "chunks": 1,
            "clocks": (6, 2),
            "updates_applied": 8,
            "max_staleness_seen": 0,
            "staleness_seen": {"0": 6},  # the failed worker's uses were not reported
            "recorded": Recorded(pipeline=0, checksum_every=0),
            "per_server": (ServerSummary.model_validate(counts),),
        }
    )
    assert check(history, summary=told).violations == ()
    too_few = (told.per_server[0].model_copy(update={"replies": 5}),)
    report = check(history, summary=told.model_copy(update={"per_server": too_few}))
    assert report.violations == (
        "summary.json says of server 0: replies 5; it answered 6 pushes, and 0 replies have a "
        "checksum",
    )


def test_the_open_file_of_a_dead_group_is_judged_to_its_last_record() -> None:
    history = dead_group_history(is_declared=True)
    uses = history.workers[1].uses.copy()
    uses["position"][-1] = 10**6
    assert broken(check(with_uses(history, 1, uses))) == {Rule.KNOWN_VERSION}


def test_without_its_recorded_death_the_dead_group_is_waited_for() -> None:
    report = check(dead_group_history(is_declared=False))
    assert broken(report) == {Rule.BOUND, Rule.MEMBERSHIP}
    assert not report.is_complete
    assert any("group 1 has neither left nor failed" in line for line in report.violations)


# ---------------------------------------------------------------------------------------------
# The command


def recorded(tmp_path: Path, **settings: object) -> Path:
    run = ToyRun(**({"seed": 1} | settings), path_dir=tmp_path / "history")  # type: ignore[arg-type]
    assert run.run() is None
    return tmp_path


def test_the_command_proves_a_recorded_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(tmp_path)
    assert main(run_dir) == 0
    out = capsys.readouterr().out
    assert "proved: the run kept the rules of ssp, staleness <= 2" in out
    assert "█" in out
    assert main(run_dir, as_json=True) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["verdict"] == "proved"
    assert body["proved"] is True
    assert body["num_violations"] == 0
    assert sum(body["staleness"].values()) == body["num_uses"]


def test_the_command_tells_violations_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(20):
        run = ToyRun(
            seed=seed,
            fault=Fault.BOUND_OFF_BY_ONE,
            path_dir=tmp_path / str(seed) / "history",
        )
        run.run()
        if run.is_fault_made:
            assert main(tmp_path / str(seed), as_json=True) == 1
            assert json.loads(capsys.readouterr().out)["verdict"] == "violated"
            assert main(tmp_path / str(seed)) == 1
            break
    out = capsys.readouterr().out
    assert "violation: worker" in out
    assert "VIOLATED: " in out


def change_summary(run_dir: Path, **changes: object) -> None:
    path = run_dir / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(("seen_by_run", "status"), [(0, 0), (-1, 1), (1, 1)])
def test_the_command_compares_what_the_summary_claims(
    tmp_path: Path, seen_by_run: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(tmp_path)
    claim = check(honest()).max_staleness + seen_by_run
    change_summary(run_dir, max_staleness_seen=claim)
    assert main(run_dir) == status
    assert (f"max_staleness_seen {claim}" in capsys.readouterr().out) == bool(status)


def leave_open(path: Path, num_bytes: int | None = None) -> None:
    """As if it had never been closed."""
    data = bytearray(path.read_bytes()[:num_bytes])
    data[16 : HEADER.size] = (-1).to_bytes(8, "little", signed=True)
    path.write_bytes(data)


@pytest.mark.parametrize("claim", [0, 7])
def test_after_a_crash_summary_and_history_may_know_different_parts(
    claim: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(tmp_path)
    leave_open(run_dir / "history" / "server-1.events")
    change_summary(run_dir, max_staleness_seen=claim)
    assert main(run_dir) == 3
    assert f"note: summary.json says max_staleness_seen {claim}" in capsys.readouterr().out


def test_without_a_summary_the_run_did_not_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(tmp_path)
    (run_dir / "summary.json").unlink()
    assert main(run_dir) == 3
    assert "there is no summary.json" in capsys.readouterr().out
    assert main(run_dir, as_json=True) == 3
    body = json.loads(capsys.readouterr().out)
    assert (body["verdict"], body["proved"], body["is_complete"]) == ("incomplete", False, False)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"mode": 3}', '{"mode": "sync"}', '{"max_staleness_seen": true}']
)
def test_a_damaged_summary_is_one_line(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(tmp_path)
    (run_dir / "summary.json").write_text(text)
    assert main(run_dir) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "summary.json is damaged" in err


def test_a_truncated_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = recorded(tmp_path)
    path = run_dir / "history" / "server-0.events"
    path.write_bytes(path.read_bytes()[:-40])
    assert main(run_dir) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "server-0.events is damaged: it was closed with" in captured.err


def test_everything_that_is_wrong_with_an_event_is_told() -> None:
    history = honest()
    changes = {"clock": 4, "weight": 9, "lr_scale": 2}
    report = check(
        change_event(history, lambda events: events["kind"] == EventKind.JOIN, **changes)
    )
    assert [line for line in report.violations if "position 0: JOIN" in line] == [
        "server 0, position 0: JOIN of group 0: at clock 4; a group begins with 0",
        "server 0, position 0: JOIN of group 0: with 9.0 workers; run.json says that the group has "
        "2",
        "server 0, position 0: JOIN of group 0: with lr_scale 2.0; it is 1 except for updates",
    ]


def test_a_name_that_looks_like_a_style_is_printed_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tmp_path / "[bold]") == 2
    assert "[bold]/history does not exist" in capsys.readouterr().err


def test_a_directory_without_history_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tmp_path) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--record" in err


def test_a_run_that_crashed_before_its_first_use_is_incomplete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(tmp_path)
    for path in (run_dir / "history").glob("*-*"):
        leave_open(path, HEADER.size)
    assert main(run_dir) == 3
    assert "no use was recorded that could be checked" in capsys.readouterr().out


def test_wide_histograms_are_put_into_bins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(
        tmp_path, mode="async", iterations=(60, 60, 6), collectives=(), pace=(1, 1, 0.1)
    )
    assert main(run_dir) == 0
    out = capsys.readouterr().out
    assert ".." in out
    assert out.count("█ ") <= 12


@pytest.mark.parametrize("name", ["server-0.events", "server-1.checksums", "worker-1.pushes"])
def test_a_run_with_an_open_file_is_incomplete(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(tmp_path)
    leave_open(run_dir / "history" / name)
    assert main(run_dir) == 3
    out = capsys.readouterr().out
    assert (
        "incomplete: what was recorded keeps the rules of ssp, staleness <= 2; the run did" in out
    )


def test_an_unfinished_run_is_incomplete_and_says_where_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(tmp_path)
    leave_open(run_dir / "history" / "worker-1.uses", HEADER.size + 32 * 9)
    assert main(run_dir) == 3
    assert "the records of worker 1 end early, after 9 uses" in capsys.readouterr().out


def test_a_history_of_format_1_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(tmp_path)
    path = run_dir / "history" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    assert main(run_dir) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "run.json is damaged or of another version of psdist: format" in err


# ---------------------------------------------------------------------------------------------
# Independence


def test_the_check_imports_nothing_of_what_it_judges() -> None:
    code = (
        "import sys, psdist.commands.check, psdist.history.writers\n"
        "print(*sorted(name for name in sys.modules if name.startswith('psdist')), 'torch' in "
        "sys.modules, 'mpi4py' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    *modules, has_torch, has_mpi = done.stdout.split()
    assert (has_torch, has_mpi) == ("False", "False")
    rooms = {name.split(".")[1] for name in modules if name != "psdist"}
    # The controllers are pure, and decisions must follow from them; the others are names and data.
    pure = {"controller", "features", "mode_names"}
    assert rooms == {"commands", "errors", "history", "version", "whole_writes", *pure}
