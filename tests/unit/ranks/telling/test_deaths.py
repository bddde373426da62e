"""What people hear of workers that have died."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import msgpack
import pytest

from psdist.protocol.control import Progress
from psdist.protocol.ids import spare_id
from psdist.protocol.roles import Place, Roles
from psdist.ranks.telling.deaths import DeathReports
from psdist.servers.protocol.joins import Joined, SubstituteDeath
from psdist.servers.protocol.takeovers import ServerDeath, SpareDeath
from psdist.servers.protocol.views import Death, Survived

ROLES = Roles(
    places=tuple(Place(rank=rank, host="n1", pid=rank, cores=(0,)) for rank in range(5)),
    server_ranks=(0,),
    worker_ranks=(1, 2, 3, 4),
    groups=((0,), (1, 2), (3,)),
)


def test_a_death_is_told_at_once_and_with_what_it_has_cost_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    progress = {2: Progress(worker=2, clock=41, samples=9)}
    reports = DeathReports(progress, started_s=time.monotonic() - 5, roles=ROLES)
    with caplog.at_level(logging.WARNING, logger="psdist"):
        reports.declared(Death(2, "worker 2 (rank 3 on n1)", generation=1, left=(1,), chief=0))
        reports.declared(Death(3, "worker 3 (rank 4 on n1)", generation=2, left=(), chief=0))
    assert [record.getMessage() for record in caplog.records] == [
        "worker 2 (rank 3 on n1) has died, and with it worker 1 of its group; the job goes on with "
        "2 workers",
        "worker 3 (rank 4 on n1) has died; the job goes on with 1 worker",
    ]
    reports.survived(Survived(1))
    first, second = reports.told()
    assert {key: first[key] for key in ("worker", "who", "group", "left", "clock")} == {
        "worker": 2,
        "who": "worker 2 (rank 3 on n1)",
        "group": 1,
        "left": [1],
        "clock": 41,
    }
    assert (first["at_s"] >= 5, first["settled_s"] >= 0, first["generation"]) == (True, True, 1)
    assert (second["clock"], second["settled_s"], second["generation"]) == (None, None, 2)
    reports.survived(Survived(2))
    assert reports.told()[1]["settled_s"] >= 0


def test_spares_are_named_where_they_die_and_where_they_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    progress = {2: Progress(worker=2, clock=41, samples=9)}
    reports = DeathReports(progress, started_s=time.monotonic() - 5, roles=ROLES)
    with caplog.at_level(logging.WARNING, logger="psdist"):
        reports.spare_lost(SpareDeath(1, "spare 1 (rank 6 on n1)"))
        reports.spare_lost(SpareDeath(2, "spare 2 (rank 7 on n1)"), is_news=False)
        reports.taken_over(ServerDeath(1, "server 1 (rank 1 on n1)", spare_id(0)))
        reports.taken_over(ServerDeath(2, "server 2 (rank 2 on n1)", 0))
    assert [record.getMessage() for record in caplog.records] == [
        "spare 1 (rank 6 on n1) has died; the job goes on",
        "server 1 (rank 1 on n1) has died; spare 0 has taken its place: no update that was "
        "acknowledged is lost",
        "server 2 (rank 2 on n1) has died; server 0 has taken its place: no update that was "
        "acknowledged is lost",
    ]
    first, second, third, fourth = reports.told()
    assert (first["spare"], first["who"], first["clock"]) == (1, "spare 1 (rank 6 on n1)", 41)
    assert first["at_s"] >= 5
    assert second["spare"] == 2
    assert (third["taken_over_by"], fourth["taken_over_by"]) == ("spare 0", 0)


def test_a_spare_that_takes_a_workers_place_is_told_and_counts_among_those_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    roles = replace(ROLES, groups=((0,), (1,), (2,), (3,)), num_substitutes=1)
    reports = DeathReports({}, started_s=time.monotonic() - 5, roles=roles)
    with caplog.at_level(logging.WARNING, logger="psdist"):
        reports.declared(Death(1, "worker 1 (rank 2 on n1)", generation=1, left=(), chief=0))
        reports.joined(Joined(3, 1, (14, 2), "state-14-0-1"))
        reports.declared(Death(0, "worker 0 (rank 1 on n1)", generation=2, left=(), chief=2))
        reports.substitute_lost(SubstituteDeath(3, "worker 3, a spare (rank 4 on n1)"))
    line = "worker 3, a spare (rank 4 on n1) has taken the place of worker 1, from iteration 14 on"
    assert [record.getMessage() for record in caplog.records] == [
        "worker 1 (rank 2 on n1) has died; the job goes on with 2 workers",
        line,
        "worker 0 (rank 1 on n1) has died; the job goes on with 2 workers",
        "worker 3, a spare (rank 4 on n1) has died; the job goes on",
    ]
    assert reports.joined_lines() == [line]
    (told,) = reports.told_of_joined()
    assert (told["worker"], told["place"], told["clock"]) == (3, 1, 14)
    assert told["who"] == "worker 3, a spare (rank 4 on n1)"
    assert told["at_s"] >= 5
    assert [each.get("spare") for each in reports.told()] == [None, None, 0]


def test_a_next_standby_tells_what_the_coordinator_knew() -> None:
    progress = {2: Progress(worker=2, clock=41, samples=9)}
    reports = DeathReports(progress, started_s=time.monotonic() - 5, roles=ROLES)
    reports.declared(Death(2, "worker 2 (rank 3 on n1)", generation=1, left=(1,), chief=0))
    reports.survived(Survived(1))
    reports.declared(Death(3, "worker 3 (rank 4 on n1)", generation=2, left=(), chief=0))
    reports.taken_over(ServerDeath(0, "server 0 (rank 0 on n1)", host=spare_id(1)))
    reports.joined(Joined(3, place=2, clocks=(7,), state=""))
    standing = msgpack.unpackb(msgpack.packb(reports.standing()))
    other = DeathReports({}, started_s=time.monotonic() - 105, roles=ROLES)
    other.go_on(standing)
    assert other.told() == reports.told()
    assert other.told_of_joined() == reports.told_of_joined()
    assert other._reported[0].death == reports._reported[0].death
    other.survived(Survived(2))
    assert other.told()[1]["settled_s"] is not None


def test_a_group_that_goes_on_is_told_with_who_is_left(caplog: pytest.LogCaptureFixture) -> None:
    reports = DeathReports({}, started_s=time.monotonic(), roles=ROLES)
    death = Death(2, "worker 2", generation=1, left=(), chief=0, group=1, stay=(1,))
    with caplog.at_level(logging.WARNING, logger="psdist"):
        reports.declared(death)
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        line == "worker 2 has died; group 1 goes on with worker 1; the job goes on with 3 workers"
    )
