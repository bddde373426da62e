"""`psdist check` of runs of unusual shape, and at the edges of its rules: these are proved."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from psdist.commands.check import Verdict, check
from psdist.history import EventFlag, EventKind, History
from psdist.history.rules.findings import Findings
from psdist.history.rules.log import replay
from psdist.history.rules.log.replay import ServerReplay
from psdist.history.rules.values.pushes import Claims
from psdist.history.summary import Summary
from tests.support.history.forging import Forgery
from tests.support.history.memory import ServerHistory
from tests.support.history.summaries import summary_of_toy
from tests.support.history.toy_run import ToyRun

MODES = ("sync", "ssp", "async")
TWO_CHUNKS = {"num_chunks": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "one chunk": {"num_chunks": 1},
    "one chunk on the only server": {"num_chunks": 1, "num_servers": 1},
    "one group of one worker": {"groups": ((0,),), "iterations": (5,)},
    "one group of all workers": {"groups": ((0, 1, 2, 3),), "iterations": (5,), "num_chunks": 7},
    "more workers than chunks": {"groups": ((3, 0, 1), (2,)), "iterations": (5, 4), **TWO_CHUNKS},
    "many chunks on three servers": {"num_chunks": 20, "num_servers": 3},
    "a group without iterations": {"iterations": (5, 0, 3), "collectives": ()},
    "no iterations": {"iterations": (0, 0, 0), "collectives": ()},
    "no parameters": {"iterations": (0, 0, 0), "collectives": (), "num_chunks": 0},
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_an_honest_run_of_any_shape_is_proved(shape: dict[str, Any], mode: str) -> None:
    for seed in range(3):
        toy = ToyRun(seed=seed, mode=mode, **shape)
        history = toy.run()
        assert history is not None
        report = check(history, summary=summary_of_toy(toy))
        assert report.verdict == Verdict.PROVED, report.violations
        uses = toy.record.num_chunks * sum(
            toy.groups[group].iterations * len(workers)
            for group, workers in enumerate(toy.record.groups)
        )
        assert report.num_uses == uses


def as_open(history: History) -> History:
    return dataclasses.replace(
        history,
        servers=tuple(dataclasses.replace(log, is_complete=False) for log in history.servers),
        workers=tuple(dataclasses.replace(log, is_complete=False) for log in history.workers),
    )


@pytest.mark.parametrize("mode", MODES)
def test_files_that_hold_everything_and_were_not_closed_break_no_rule(mode: str) -> None:
    for seed in range(8):
        history = ToyRun(seed=seed, mode=mode, empty_rate=0.4).run()
        assert history is not None
        report = check(as_open(history))
        assert report.violations == ()
        assert report.verdict == Verdict.INCOMPLETE


@pytest.mark.parametrize("num_iterations", [1, 3])
def test_a_use_of_the_last_version_of_an_open_log_is_proved(num_iterations: int) -> None:
    forged = Forgery(
        groups=((0,),), iterations=(num_iterations,), collectives=(), num_servers=1, num_chunks=1
    )
    # The server was killed right after the reply to the last push but one.
    last = forged.find_event(0, EventKind.APPLY, last=True)
    assert forged.uses[0]["position"][-1] == last
    forged.events[0] = forged.events[0][:last]
    forged.sums[0] = forged.sums[0][forged.sums[0]["position"] <= last]
    report = check(as_open(forged.history()))
    assert report.violations == ()
    assert report.num_checksums == report.num_uses == num_iterations
    assert report.notes[0] == f"the log of server 0 ends early, after {last} events"


def test_a_worker_may_bring_nothing_to_an_iteration_of_its_group() -> None:
    forged = Forgery()
    weight = forged.push(1, 4)["own"]
    forged.push(0, 4)["own"] = 0.0
    for worker in (0, 1):
        forged.push(worker, 4)["weight"] = weight
    for events in forged.events:
        is_it = (events["kind"] == EventKind.APPLY) & (events["group"] == 0)
        is_it &= events["clock"] == 4
        events["lr_scale"][is_it] *= np.float32(weight) / events["weight"][is_it]
        events["weight"][is_it] = weight
    assert forged.judge().proved


# -- deaths ----------------------------------------------------------------------------------------


def with_dead_group(**settings: Any) -> Forgery:
    """Group 2 fails when it has pushed everything: its last pushes are not answered."""
    forged = Forgery(**settings)
    for server in range(len(forged.events)):
        leave = forged.event(server, EventKind.LEAVE, group=2)
        leave["kind"] = EventKind.DEATH
        if server not in forged.run["owners"]:
            leave["clock"] = 0
        sums = forged.sums[server]
        forged.sums[server] = sums[(sums["worker"] != 3) | (sums["clock"] != 5)]
    return forged


def test_replies_to_a_dead_group_need_no_checksum_and_servers_without_chunks_no_clock() -> None:
    forged = with_dead_group(num_servers=5)
    report = forged.judge()
    assert report.proved, report.violations
    assert report.notes == tuple(
        f"server {server} evicted these groups: [2]" for server in range(5)
    )


def test_a_server_may_contain_less_of_a_dead_group_than_another() -> None:
    forged = with_dead_group()
    forged.delete(1, forged.find_event(1, EventKind.APPLY, group=2, chunk=1, clock=5))
    forged.event(1, EventKind.DEATH, group=2)["clock"] = 5
    shorter, longer = forged.summary["per_server"][1], forged.summary["per_server"][0]
    for name in ("pushes", "steps", "updates", "position", "checksums", "replies"):
        shorter[name] -= 1
    for name in ("checksums", "replies"):
        longer[name] -= 2
    forged.summary["updates_applied"] -= 1
    for staleness, count in (
        ("0", 3),
        ("1", 6),
        ("2", 9),
    ):  # the failed worker's uses are not reported
        forged.summary["staleness_seen"][staleness] -= count
    forged.is_summary_asked = True
    assert (shorter["updates"], longer["updates"]) == (21, 22)
    report = forged.judge()
    assert report.proved, report.violations


# -- replies that a worker leaves outstanding ------------------------------------------------------


def leaves_ahead_of_its_updates(clock: int) -> Forgery:
    """A group that leaves while its last updates, stamped ``clock`` and later, are on their way."""
    forged = Forgery(mode="async", pipeline=1, collectives=(), checksum_every=0)
    for late in range(clock, 6):
        leave = forged.find_event(0, EventKind.LEAVE, group=2)
        forged.move(0, forged.find_event(0, EventKind.APPLY, group=2, chunk=2, clock=late), leave)
        event = forged.apply(0, group=2, chunk=2, clock=late)
        event["lr_scale"] = event["weight"] / 3  # workers of groups 0 and 1
    return forged


def test_with_a_pipeline_a_group_may_leave_ahead_of_its_last_update() -> None:
    forged = leaves_ahead_of_its_updates(5)
    assert forged.judge().proved, forged.judge().violations
    late = forged.find_event(0, EventKind.APPLY, group=2, chunk=2, clock=5)
    assert late > forged.find_event(0, EventKind.LEAVE, group=2)
    # A log that ends before it may have lost the rest, a log that was closed may not.
    cut = as_open(forged.history())
    cut = dataclasses.replace(
        cut,
        servers=(
            dataclasses.replace(cut.servers[0], events=forged.events[0][:late]),
            cut.servers[1],
        ),
    )
    assert check(cut).violations == ()
    forged.delete(0, late)
    assert forged.judge().violations == (
        "server 0, chunk 2: holds 5 updates of group 2, which left after 6 iterations: lost",
    )


def test_a_pipeline_of_one_is_not_one_of_two() -> None:
    (violation,) = leaves_ahead_of_its_updates(4).judge().violations
    assert "update 4 of group 2: applied after the group had said that it had finished 6" in (
        violation
    )


def test_without_a_pipeline_an_update_is_lost_as_soon_as_its_group_has_left() -> None:
    forged = Forgery(checksum_every=0, mode="async")
    forged.delete(0, forged.find_event(0, EventKind.APPLY, group=2, chunk=2, clock=5))
    assert check(as_open(forged.history())).violations == (
        "server 0, chunk 2: holds 5 updates of group 2, which left after 6 iterations: lost",
    )


# -- summary.json ----------------------------------------------------------------------------------


def test_every_step_may_have_copied() -> None:
    forged = Forgery()
    for server in forged.summary["per_server"]:
        server["copies_on_write"] = server["steps"]
    forged.is_summary_asked = True
    assert forged.judge().proved


def test_a_run_that_failed_has_the_counts_of_all_its_servers_or_of_none() -> None:
    forged = Forgery()
    forged.summary |= {"exit": "ended by SIGTERM", "per_server": forged.summary["per_server"][:1]}
    summary = Summary.model_validate(forged.summary)
    assert check(forged.history(), summary=summary).violations == (
        "summary.json says number of servers 1, the history shows 2",
    )


# -- staleness -------------------------------------------------------------------------------------


def test_the_largest_staleness_is_of_all_uses_also_of_chunks_that_others_push() -> None:
    forged = Forgery(mode="async", collectives=())
    before = forged.judge().max_staleness
    use = forged.use(1, iteration=7, chunk=0)  # worker 0's to push
    use["position"] = forged.use(1, iteration=0, chunk=0)["position"]
    assert forged.judge().max_staleness == 7 > before


# -- how updates are counted -----------------------------------------------------------------------


def replay_of(num_events: int) -> ServerReplay:
    """Replay one chunk and two groups that take turns."""
    run = ToyRun(seed=1, groups=((0,), (1,)), iterations=(1, 1), num_chunks=1, num_servers=1).record
    server = ServerHistory(None, 0)
    for number in range(num_events):
        server.apply(0, number % 2, number // 2)
    assert server.log().events["flags"].tolist() == [EventFlag.LAST] * num_events
    return ServerReplay(run, server.log())


@pytest.mark.parametrize(
    ("cells", "parts"),
    [
        (1, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        (4, [(0, 2), (2, 3), (3, 5)]),
        (6, [(0, 3), (3, 4), (4, 5)]),
        (100, [(0, 5)]),
    ],
)
def test_counts_come_in_order_and_no_more_than_asked_for_at_a_time(
    cells: int, parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "BLOCK_CELLS", cells)
    rows = np.array([0, 1, 2, 3, 4])
    found = list(replay_of(4).counts(np.zeros_like(rows), rows))
    assert [(part.start, part.stop) for part, _ in found] == parts
    counts = np.concatenate([counts for _, counts in found])
    assert counts.tolist() == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]


def test_a_mebibyte_of_counts_is_worked_on_at_a_time() -> None:
    num_rows = 2**17 + 1
    rows = np.arange(num_rows)
    chunks = np.zeros_like(rows)
    first, *_ = replay_of(num_rows).counts(chunks, rows)
    assert first[1].nbytes == 2**20


# -- what the workers of a group bring -------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "weight", "is_sum"),
    [
        (1e9, 2e9, True),
        (1e9, 2e9 + 1, True),  # one part in 2e9
        (1e9, 2e9 - 1, True),
        (1e9, 2e9 + 4, False),
        (1e9, 2e9 - 4, False),
        (0.1, 0.2 + 1e-12, True),
        (1e-12, 3e-12, False),
        (1e-12, 0.0, True),  # the group skips the iteration
    ],
)
def test_a_group_pushes_with_the_sum_of_its_workers_up_to_rounding(
    own: float, weight: float, is_sum: bool
) -> None:
    forged = Forgery()
    for worker in (0, 1):
        push = forged.push(worker, 4)
        push["own"], push["weight"], push["is_empty"] = own, weight, weight == 0
    findings = Findings(max_listed_per_rule=9)
    Claims.of(forged.history(), findings)
    assert (findings.total == 0) == is_sum, findings.lines()
