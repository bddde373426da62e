"""Only the coordinator, its standby and later standbys report on ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from psdist.protocol.control import Progress
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.ranks import coordinating
from psdist.ranks.coordinating import Duty
from psdist.ranks.rank import Rank
from psdist.ranks.session import JobSession
from psdist.servers.protocol.coordinator import WriteMetrics
from psdist.servers.protocol.failover.coordinator_log import CoordinatorLog, StandbyInstalled
from psdist.servers.protocol.takeovers import ServerDeath, ShardAlone
from psdist.transport.lines import LineTransport
from tests.unit.ranks.test_shared_spares import SPARE, rank_of


def coordinator_log_of(session: JobSession, *, is_active: bool) -> CoordinatorLog:
    return coordinating.coordinator_log_of(session, is_active=is_active)


def test_a_rank_without_a_duty_reports_nothing(tmp_path: Path) -> None:
    duty = Duty(rank_of(tmp_path).session)
    duty.on_idle()
    assert list(tmp_path.iterdir()) == []


def test_the_next_standby_tells_what_the_coordinator_has_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    its = rank_of(tmp_path, COORDINATOR).session
    active = coordinator_log_of(its, is_active=True)
    reports = Duty(its).report_on(active.coordinator, active)
    its.joined[2] = 0
    for told in (ServerDeath(1, "server 1", host=COORDINATOR), ShardAlone(0, COORDINATOR)):
        reports.on_action(told)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="psdist"):
        reports.on_action(StandbyInstalled(SPARE))
    assert caplog.messages == ["the coordinator, in server 0, has a standby again: spare 1"]

    active.standby = SPARE
    active.coordinator.progress[0] = Progress(worker=0, clock=3, samples=1)
    its = rank_of(tmp_path, SPARE).session
    standby = Duty(its).standby(active.to_snapshot(), reports.to_snapshot())
    assert standby.reports.to_snapshot() == reports.to_snapshot()
    assert its.joined == {2: 0}
    standby.reports.succeed([WriteMetrics({"worker": 0, "clock": 3})])
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"worker": 0, "clock": 3}
    its.exit.write_last_files("ended", 1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [each["server"] for each in summary["deaths"]] == [1]
    assert [each["server"] for each in summary["alone"]] == [0]
    assert (summary["registrar"], summary["deputy"]) == (0, "spare 1")


def test_status_says_where_the_coordinator_is_when_it_has_moved(tmp_path: Path) -> None:
    context = rank_of(tmp_path, COORDINATOR).session
    coordinator_log = coordinator_log_of(context, is_active=True)
    reporter = Duty(context).report_on(
        coordinator_log.coordinator, coordinator_log, is_active=False
    )
    assert reporter.coordinator_line == "", "as at the start"
    coordinator_log.standby = None
    assert reporter.coordinator_line == "in server 0, without a standby"
    coordinator_log.standby, coordinator_log.coordinator_at = SPARE, server_id(1)
    assert reporter.coordinator_line == "in server 1, its standby is spare 1"


def line_of(rank: Rank) -> LineTransport:
    rank.begin_job(1, rank.bootstrap.config)
    assert rank.session.line is not None
    return rank.session.line


def test_the_coordinator_is_where_the_line_has_followed_it(tmp_path: Path) -> None:
    rank = rank_of(tmp_path, SPARE)
    line = line_of(rank)
    assert (line.coordinator_at, line.standby, rank.session.is_coordinator) == (
        COORDINATOR,
        server_id(1),
        False,
    )
    line.host(COORDINATOR)
    assert (line.coordinator_at, rank.session.is_coordinator) == (SPARE, True)
    at_home = line_of(rank_of(tmp_path, COORDINATOR))
    assert (at_home.coordinator_at, at_home.standby) == (COORDINATOR, None)


def test_who_speaks_where_the_job_ends_is_the_coordinator_or_its_standby(tmp_path: Path) -> None:
    rank = rank_of(tmp_path, SPARE)
    line_of(rank)
    lost: Any = rank.endpoint.lost
    assert rank.exit.printing_peer() == COORDINATOR
    lost[COORDINATOR] = "server 0"
    assert rank.exit.printing_peer() == server_id(1)
    lost[server_id(1)] = "server 1"
    assert rank.exit.printing_peer() == worker_id(0), "the first that lives"
