"""Workers fail at random moments of seeded schedules, and substitutes join in their places: rules
hold, every surviving rank finishes, and every value is what arithmetic says. Servers may fail as
well.

More by hand: ``python -m tests.protocol.deaths.test_joins 5000``, then optionally which server
fails.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

from psdist.protocol.control import TakePlace
from psdist.protocol.ids import COORDINATOR
from psdist.servers.protocol.actions import AdmitGroup
from psdist.servers.protocol.joins import Joins
from psdist.servers.protocol.state import ServerCore
from psdist.workers.protocol.joining import Substitute
from tests.support.virtual.joining import play_with_joins
from tests.support.virtual.surviving import deaths_of, prove_survival

SEEDS = range(20)
WITH_SERVERS = range(6)
MANY = range(1000, 1300)
FOUND = (5358,)
"""The dead had made its step in one set, and not in the next: the substitute, where the farthest
was in each, was at no place of the script, and the others waited for ever."""


def play_and_prove(seeds: range, **broken: Any) -> Counter[str]:
    """Play the seeds; return the situations that occurred, with counts."""
    met: Counter[str] = Counter()
    for seed in seeds:
        job = play_with_joins(seed, **broken)
        try:
            prove_survival(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        joined = {each.worker for each in job.joined}
        met[f"{job.schedule.mode}, {min(len(joined), 2)} joined"] += 1
        met["at a boundary"] += bool(joined and job.holds)
        met["in the middle"] += any(each.clocks[0] for each in job.joined)
        met["several sets"] += bool(joined and job.schedule.more_sets)
        met["joined and failed"] += bool(joined & set(deaths_of(job)))
        met["trained"] += any(
            job.workers[each.worker].clock > each.clocks[0] for each in job.joined
        )
        met["another server continued"] += bool(joined) and any(loop.hosted for loop in job.servers)
    return met


def test_substitutes_join_and_every_rule_holds() -> None:
    met = play_and_prove(SEEDS)
    for what in ("sync, 1 joined", "ssp, 1 joined", "async, 1 joined", "trained"):
        assert met[what], met
    for what in ("at a boundary", "in the middle", "several sets", "joined and failed"):
        assert met[what], met


@pytest.mark.parametrize("server", [COORDINATOR, 2], ids=["registrar", "server"])
def test_they_join_where_a_server_dies_as_well(server: int) -> None:
    met = play_and_prove(WITH_SERVERS, server=server)
    for what in ("another server continued", "trained"):
        assert met[what], met


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found(seed: int) -> None:
    play_and_prove(range(seed, seed + 1))


@pytest.mark.slow
@pytest.mark.parametrize("server", [None, COORDINATOR, 2], ids=["none", "registrar", "server"])
def test_many_more(server: int | None) -> None:
    play_and_prove(MANY, server=server)


def test_a_server_that_counts_a_substitute_from_another_round_on_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admit = ServerCore._on_admit

    def admit_later(core: ServerCore, event: AdmitGroup) -> list[Any]:
        return admit(core, event._replace(clock=event.clock + core._server))

    monkeypatch.setattr(ServerCore, "_on_admit", admit_later)
    with pytest.raises(AssertionError, match=r"seed|holds a message"):
        play_and_prove(SEEDS)


def test_a_coordinator_that_lets_the_slowest_decide_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admit = Joins.admit

    def admit_early(joins: Joins, seq: int, clocks: Any, *, state: str) -> Any:
        lowest = tuple(map(min, zip(*clocks, strict=True)))
        monkeypatch.setattr(joins, "may_join", lambda _farthest: True)
        return admit(joins, seq, [tuple(max(0, each - 1) for each in lowest)], state=state)

    monkeypatch.setattr(Joins, "admit", admit_early)
    with pytest.raises(AssertionError, match="a chunk contains update"):
        play_and_prove(SEEDS)


def test_a_substitute_that_does_not_begin_is_waited_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hear(_membership: Substitute, _peer: int, _message: TakePlace) -> list[Any]:
        return []

    monkeypatch.setattr(Substitute, "on_replace", hear)
    met = play_and_prove(range(6))
    assert not any(num for what, num in met.items() if what.endswith(("1 joined", "2 joined")))


if __name__ == "__main__":
    count, *servers = map(int, sys.argv[1:])
    print(play_and_prove(range(count), server=servers[0] if servers else None))
