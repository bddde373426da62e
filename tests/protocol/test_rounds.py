"""A mode that changes with the round: the history of a run is proved round by round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from psdist.commands.check import check
from psdist.history import History
from psdist.history.rules.findings import Findings
from psdist.history.rules.log.replay import ServerReplay
from psdist.history.rules.values.uses import Uses, check_bound
from psdist.servers.protocol.rules import MakeRule
from tests.support.rules import secretly
from tests.support.virtual.job import Schedule, VirtualJob

ROUNDS = 12
CHANGE = 5
SCHEDULE = Schedule(
    seed=1,
    mode="async",
    group_sizes=(1, 1, 1),
    iterations=(ROUNDS,) * 3,
    collectives=((), (), ()),
    compute_s=(1.0, 1e-3, 1e-3),
    num_chunks=4,
    servers=2,
)
TIGHTER = secretly((0, "ssp", 3), (CHANGE, "ssp", 0))
LOOSER = secretly((0, "ssp", 0), (CHANGE, "ssp", 3))
BEFORE, FROM = range(CHANGE), range(CHANGE, ROUNDS)


def play(rule: MakeRule, schedule: Schedule = SCHEDULE) -> History:
    job = VirtualJob(schedule, rule=lambda _server: rule)
    job.run()
    history = job.history()
    # Everything but the bound is the same in all rounds, and proved for the whole run.
    report = check(history)
    assert report.proved, report.violations[:5]
    return history


def judge(history: History, *, bound: int, rounds: range) -> tuple[int, int]:
    """Apply rule 2 of docs/reference/history.md to the uses in these rounds under ssp with this
    bound: the number of violations, and the largest staleness."""
    run = history.run.model_copy(update={"mode": "ssp", "staleness": bound})
    findings, largest = Findings(max_listed_per_rule=0), -1
    uses = Uses.of(history)
    uses = uses.take(np.flatnonzero(np.isin(uses.iteration, rounds)))
    for log in history.servers:
        replay = ServerReplay(run, log)
        mine, _ = uses.of_server(replay, findings)
        largest = max(largest, *check_bound(replay, mine, findings))
    return findings.total, largest


@pytest.mark.parametrize("seed", range(12))
def test_a_bound_that_changes_at_a_round_holds_in_each_round(seed: int) -> None:
    schedule = replace(SCHEDULE, seed=seed, jitter_s=10.0 ** -(2 + seed % 4), sent_s=1e-3)

    tighter = play(TIGHTER, schedule)
    assert judge(tighter, bound=3, rounds=BEFORE) == (0, 3)
    assert judge(tighter, bound=0, rounds=FROM) == (0, 0)

    looser = play(LOOSER, schedule)
    assert judge(looser, bound=0, rounds=BEFORE) == (0, 0)
    assert judge(looser, bound=3, rounds=FROM) == (0, 3)


def test_the_rule_of_other_rounds_is_seen_to_be_broken() -> None:
    """The judge is no formality: a rule held against the wrong rounds finds violations."""
    history = play(TIGHTER)
    assert judge(history, bound=0, rounds=BEFORE)[0] > 0
    late = play(secretly((0, "ssp", 3), (CHANGE + 1, "ssp", 0)))  # changes a round too late
    assert judge(late, bound=0, rounds=FROM)[0] > 0
    assert judge(late, bound=0, rounds=range(CHANGE + 1, ROUNDS)) == (0, 0)


def test_async_rounds_may_follow_bounded_ones() -> None:
    history = play(secretly((0, "ssp", 1), (CHANGE, "async", 0)))
    assert judge(history, bound=1, rounds=BEFORE) == (0, 1)
    assert judge(history, bound=1, rounds=FROM)[0] > 0
